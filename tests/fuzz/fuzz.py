"""Coverage-guided fuzzing of one parser: python tests/fuzz/fuzz.py TARGET SECONDS [FOLDER]   (pip install -e '.[fuzz]')

New inputs that reach new code go to FOLDER (by default a temporary one); an input that breaks the parser is written beside
them as crash-…, and belongs, once the parser is repaired, into tests/fuzz/corpus/TARGET.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris
import numpy as np  # noqa: F401 - the large libraries first: they are not ours to cover
import scipy.io  # noqa: F401
import torch  # noqa: F401

FORMATS = ("gzip", "pickletools", "tarfile", "zipfile")
for module in FORMATS:  # once more, to see which of their branches are reached
    sys.modules.pop(module, None)
with atheris.instrument_imports(include=["shf", *FORMATS]):
    from targets import TARGETS, seeds

HERE = Path(__file__).parent


def main() -> None:
    name, seconds = sys.argv[1], int(sys.argv[2])
    folder = Path(sys.argv[3] if len(sys.argv) > 3 else tempfile.mkdtemp(prefix=f"fuzz-{name}-"))
    folder.mkdir(parents=True, exist_ok=True)
    for number, content in enumerate(seeds()[name]):
        (folder / f"seed-{number}").write_bytes(content)
    kept = HERE / "corpus" / name
    corpus = [str(folder), *([str(kept)] if kept.is_dir() else [])]
    limits = [
        f"-max_total_time={seconds}",
        "-max_len=8192",
        "-timeout=20",
        "-rss_limit_mb=2048",
        "-print_final_stats=1",
    ]
    atheris.Setup([sys.argv[0], *limits, f"-artifact_prefix={folder}/", *corpus], TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
