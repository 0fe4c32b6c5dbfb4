"""Writes docs/architectures.md from the declared lists of tests/cases.py and tests/limits.py: `python tests/architectures_table.py`."""

from itertools import groupby
from pathlib import Path

from cases import CASES
from limits import FALLS_BACK, REFUSED, WRAPPERS

PAGE = Path(__file__).parent.parent / "docs" / "architectures.md"

HEAD = """# What works

Each line of the tables is a case of `tests/cases.py`: its Gauss-Newton products, gradients and preconditioners are checked against dense
float64 matrices, on all rows and on some of them, with random draws frozen. The two lists at the end, of what falls back and what is
refused, are tested line by line too (`tests/limits.py`). This page is written from these two files.

- **Preconditioner**: how the squares of per-case gradients are found. *Layers*: from the inputs and output gradients of the layers, in the
  gradient's own backward pass. *Exact fallback*: for some of the parameters by batched backward passes over cases, which costs more.
- By default the preconditioner makes no use of the exact fallback where rows influence each other (batch statistics) or differ in size:
  it squares each row's share of the gradient, in part estimated with random signs, at the cost of a gradient at most. The fallback is
  `preconditioner_squares="exact"`; it warns if a step takes more than ten times what it takes without preconditioner.
- Where rows may differ in size (packed sequences, trees and other data that is not rows of tensors), a layer may see parts of rows:
  all parameters then take the exact fallback.
- Where outputs are padded to the longest row of the batch, the passes of the exact fallback run over the whole batch, as with batch
  statistics. `microbatch` is refused where chunks differ in length, `curvature_batch` where targets do not fit. Outputs of one length for
  all (`pad_packed_sequence` has `total_length`) cost less.
- **Memory bound**: whether `microbatch` works. It cannot where rows influence each other.
"""


def table(head: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    return "\n".join(f"| {a} | {b} |" for a, b in (head, ("---", "---"), *rows)) + "\n"


def page() -> str:
    sections = []
    for kind, cases in groupby(CASES, key=lambda case: case.kind):
        rows = [
            f"| {case.name} | {'layers' if case.layers else 'exact fallback'} | {'yes' if case.separable else 'no'} |"
            for case in cases
        ]
        sections.append(
            f"\n## {kind.capitalize()}\n\n| case | preconditioner | memory bound |\n|---|---|---|\n"
            + "\n".join(rows)
            + "\n"
        )
    instead = [*((case.what, case.instead) for case in FALLS_BACK), WRAPPERS]
    sections += [
        "\n## Falls back inside a step, and nowhere else\n\n" + table(("what", "instead"), instead),
        "\n## Refused, with an error that says so\n\n" + table(("what", "why"), [(r.what, r.why) for r in REFUSED]),
    ]
    return HEAD + "".join(sections)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
