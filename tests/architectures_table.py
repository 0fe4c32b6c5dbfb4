"""Writes docs/architectures.md from the declared list of tests/cases.py: `python tests/architectures_table.py`."""

from itertools import groupby
from pathlib import Path

from cases import CASES

PAGE = Path(__file__).parent.parent / "docs" / "architectures.md"

HEAD = """# What works

Each line is a case of `tests/cases.py`. Its Gauss-Newton products, gradients and preconditioners are checked against dense float64
matrices, on all rows and on some, with frozen draws. This page is written from that list.

- **Preconditioner**: *layers*, from the inputs and output gradients of its layers in the gradient's own backward pass; *exact
  fallback*, for some of its parameters by batched backward passes over cases, which costs more.
- Where rows may differ in size (packed sequences, trees and other data that is not rows of tensors), a layer may see parts of rows:
  all parameters then take the exact fallback.
- **Memory bound**: whether `microbatch` works. It cannot where rows influence each other.
"""

TAIL = """
## Falls back inside a step, and nowhere else

| what | instead |
|---|---|
| fused attention (`F.scaled_dot_product_attention`, `nn.MultiheadAttention`) | its mathematical form: the fused kernels have no second derivative |
| cuDNN's recurrent layers, on a GPU | torch's own, with one warning; without recurrent layers cuDNN stays |
| autocast | off, with one warning |
| `torch.compile`, `DataParallel`, `DistributedDataParallel` around the model | the module inside, which shares its parameters with the wrapper |

## Refused, with an error that says so

| what | why |
|---|---|
| `torch.bernoulli(x)`, `torch.multinomial(x)` of the network's own values | the draw would change with every trial step |
| randomness from `random` or `numpy` inside `forward` | it cannot be frozen; the module is named |
| seeding torch inside `forward` | the draws of a step could not be told apart |
| a random draw in which no single axis grows in proportion to the rows, with `curvature_batch` or `microbatch` | which numbers belong to which row is unknown |
| `microbatch` with batch statistics | outputs on a chunk are not those on the batch |
| losses that are not convex in the outputs | the Gauss-Newton matrix would not be positive semi-definite |
| dropout over the steps of packed sequences, or over the nodes of trees, with `curvature_batch` or `microbatch` | whose numbers are whose is unknown |
| `structural_damping` > 0 with a model that names no tensor by `shf.hold_steady`, or overwrites one that it named | there would be nothing to hold steady |
| reentrant gradient checkpointing | it cannot be differentiated by `autograd.grad`; use `use_reentrant=False` |
| half-precision parameters | products would be mostly rounding |
"""


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
    return HEAD + "".join(sections) + TAIL


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
