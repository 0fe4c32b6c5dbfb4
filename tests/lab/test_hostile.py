"""What fuzzing has found, and what an attacker would try first: every reader refuses it in its own words, at once."""

import io
import os
import tracemalloc
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from targets import TARGETS, seeds

from shf.lab import checkpoint, lock, records
from shf.lab.choices import ChoicesError, read_choices
from shf.lab.data import DataError
from shf.lab.data.files import read_bounded
from shf.lab.files import IrregularFileError, TooLargeError, open_regular, read_at_most
from shf.lab.npz import NpzError, read_npz, write_npz

CORPUS = Path(__file__).parents[1] / "fuzz" / "corpus"
SEEDS = seeds()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", TARGETS)
def test_the_fuzzers_corpus(name: str) -> None:
    """Inputs that reached new code, and those that once broke a parser. A finding is any other error than the parser's
    own. Fails, for instance, if `read_variables` lets numpy's own errors through."""
    target = TARGETS[name]
    files = sorted((CORPUS / name).iterdir())
    assert files
    tracemalloc.start()
    for content in (file.read_bytes() for file in files):
        assert target(content) in (True, False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 << 20


def changed(content: bytes) -> Iterator[bytes]:
    """A byte replaced, or the end cut off, at 64 places."""
    for part in range(64):
        at = part * len(content) // 64
        for value in (0x00, 0xFF, content[at] ^ 0x10):
            yield content[:at] + bytes([value]) + content[at + 1 :]
        yield content[:at]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", TARGETS)
def test_well_formed_inputs_with_a_change_anywhere(name: str) -> None:
    """What is well-formed is read; with a change it is refused in the parser's own words, or still is what the parser
    promises (the targets look). Fails for each of them if the parser accepts everything, refuses everything, or lets another
    error through, zlib's, say."""
    assert all(map(TARGETS[name], SEEDS[name]))
    outcomes = [TARGETS[name](other) for content in SEEDS[name] for other in changed(content) if other != content]
    assert outcomes.count(False) > len(outcomes) // 2


# --- pipes and sizes ----------------------------------------------------------------------------------------------------


def _samples(path: Path) -> None:
    records.read_samples(path)


def _run(path: Path) -> None:
    path.rename(path.with_name("run.json"))
    records.read_run(path.parent)


def _metrics(path: Path) -> None:
    path.rename(path.with_name("metrics.jsonl"))
    path.with_name("run.json").write_text('{"schema": 1, "config": {}, "metrics": {"bytes": 9, "sha256": ""}}')
    records.read_run(path.parent)


READERS = {
    "samples": (_samples, records.RecordError),
    "run.json": (_run, records.RecordError),
    "metrics.jsonl": (_metrics, records.RecordError),
    "checkpoint": (checkpoint.read, checkpoint.CheckpointDamagedError),
    "tuned settings": (read_choices, ChoicesError),
    "data": (lambda path: read_bounded(path, 10), DataError),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", READERS)
def test_a_pipe_that_nobody_writes_to_is_not_waited_for(tmp_path: Path, name: str) -> None:
    """Fails where a file is opened by `path.open`: that waits for ever."""
    reader, error = READERS[name]
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(error, match="regular file"):
        reader(tmp_path / "pipe")


@pytest.mark.timeout(600)
def test_a_pipe_for_a_note_of_the_owner(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / lock.OWNER_FILE)
    assert lock._owner(tmp_path) is None


def test_only_regular_files_within_the_limit(tmp_path: Path) -> None:
    """Fails if `read_at_most` does not look at the size."""
    path = tmp_path / "x"
    path.write_bytes(b"12345")
    assert read_at_most(path, 5) == b"12345"
    with pytest.raises(TooLargeError, match="5 bytes, expected at most 4"):
        read_at_most(path, 4)
    for place in (tmp_path, Path("/dev/zero")):
        with pytest.raises(OSError, match=r"regular|directory"):
            open_regular(place)
    assert issubclass(IrregularFileError, OSError)


# --- npz ----------------------------------------------------------------------------------------------------------------


def test_an_array_that_promises_more_than_it_has() -> None:
    """A header of 2⁴⁰ numbers over eight bytes. Fails with numpy's own reader, which allocates them first."""
    good = write_npz({"x": np.arange(2, dtype="f4")})
    packed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(good)) as source, zipfile.ZipFile(packed, "w") as target:
        content = source.read("x.npy").replace(b"(2,), }           ", b"(1099511627776,), }")
        target.writestr("x.npy", content)
    with pytest.raises(NpzError, match="does not fit"):
        read_npz(packed.getvalue(), limit=1 << 20)


def test_arrays_that_are_too_large_together() -> None:
    """Each within the limit. Fails if `read_npz` does not add up the sizes: sixteen times the limit would be unpacked."""
    content = write_npz({name: np.zeros(600, np.uint8) for name in "ab"})
    assert set(read_npz(content, limit=1500)) == {"a", "b"}
    with pytest.raises(NpzError, match="more than 1000 bytes unpacked"):
        read_npz(content, limit=1000)


def test_numbers_alone() -> None:
    """Fails if `_read_array` does not look at the type."""
    for values in (np.array(["a"]), np.zeros(2, "M8[s]"), np.zeros(1, "f4,i4"), np.array([1j])):
        with pytest.raises(NpzError, match="no numbers"):
            read_npz(write_npz({"x": values}), limit=1 << 20)
    assert read_npz(write_npz({"x": np.arange(3)}), limit=1 << 20)["x"].tolist() == [0, 1, 2]
