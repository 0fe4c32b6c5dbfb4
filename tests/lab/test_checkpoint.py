"""Checkpoints: whole or not there, damage found before torch sees it, hostile files refused."""

import io
import os
import pickle
import subprocess
import sys
import tracemalloc
import zipfile
from pathlib import Path

import pytest
import torch

import shf
from helpers import labelled, mlp
from shf.lab import checkpoint
from shf.lab.checkpoint import (
    CheckpointDamagedError,
    CheckpointStore,
    CheckpointVersionError,
    encode,
    read,
)


def state(value: float = 1.0) -> dict[str, object]:
    return {"weights": torch.full((40, 5), value), "position": {"epoch": 3, "elapsed": 0.1}, "names": ["a", "b"]}


def test_a_state_comes_back_exactly(tmp_path: Path) -> None:
    path = tmp_path / "c.ckpt"
    path.write_bytes(encode(state()))
    found = read(path)
    assert torch.equal(found["weights"], torch.ones(40, 5))
    assert found["position"] == {"epoch": 3, "elapsed": 0.1}
    assert found["names"] == ["a", "b"]


def test_store_keeps_the_last_two_and_the_best(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    for iteration in (5, 10, 200):
        store.save(iteration, state(iteration))
    store.save_best(state(-1))
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert names == ["best.ckpt", "iteration-0000000010.ckpt", "iteration-0000000200.ckpt"]
    loaded = store.load_latest()
    assert loaded is not None
    assert loaded.state["weights"][0, 0] == 200
    assert loaded.passed_over == ()


def test_nothing_written_yet_is_no_error(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "checkpoints").load_latest() is None


@pytest.mark.parametrize("part", range(65))
@pytest.mark.parametrize("damage", ["flip", "truncate"])
def test_damage_anywhere_is_found_and_the_previous_one_used(tmp_path: Path, part: int, damage: str) -> None:
    """Every 1/64 of the file: a flipped bit, or all cut off from there.

    Fails if `_verified` no longer compares the digest: flips inside tensor data then load as other weights.
    """
    store = CheckpointStore(tmp_path / "checkpoints")
    store.save(1, state(1))
    path = store.save(2, state(2))
    content = bytearray(path.read_bytes())
    at = min(part * len(content) // 64, len(content) - 1)
    if damage == "flip":
        content[at] ^= 1 << (part % 8)
    else:
        del content[at:]
    path.write_bytes(content)
    loaded = store.load_latest()
    assert loaded is not None
    assert loaded.path.name == "iteration-0000000001.ckpt"
    assert loaded.state["weights"][0, 0] == 1
    assert path.name in loaded.passed_over[0]


def test_a_damaged_one_does_not_push_out_an_intact_one(tmp_path: Path) -> None:
    """The newest is damaged, the run goes back and saves again, and that one is damaged too. Fails if `save` counts a file
    that was found damaged among the last two: the only other intact one would have been removed for it."""
    CheckpointStore(tmp_path).save(10, state(10))
    damaged = CheckpointStore(tmp_path).save(14, state(14))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    store = CheckpointStore(tmp_path)
    assert store.load_latest() is not None
    for iteration in (12, 18):
        newest = store.save(iteration, state(iteration))
        assert not damaged.exists()
    newest.write_bytes(newest.read_bytes()[:-1])
    loaded = CheckpointStore(tmp_path).load_latest()
    assert loaded is not None
    assert loaded.state["weights"][0, 0] == 12
    store.save(14, state(14))  # a name that was damaged once is as good as any other
    assert sorted(p.name for p in tmp_path.iterdir())[0] == "iteration-0000000014.ckpt"


def test_all_damaged_is_an_error_that_names_them(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    store.save(1, state()).write_bytes(b"")
    with pytest.raises(CheckpointDamagedError, match="iteration-0000000001"):
        store.load_latest()


def test_a_newer_schema_is_refused_and_not_taken_for_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if `read` does not look at the schema."""
    store = CheckpointStore(tmp_path / "checkpoints")
    store.save(1, state())
    monkeypatch.setattr(checkpoint, "SCHEMA", checkpoint.SCHEMA + 1)
    store.save(2, state())
    monkeypatch.undo()
    with pytest.raises(CheckpointVersionError, match=r"schema 2.*reads up to 1"):
        store.load_latest()


def test_a_checkpoint_of_the_first_schema_continues() -> None:
    """Written before rejections were counted. Fails if its schema is refused, or if a state without the newer numbers does
    not load: the next step must be the one that was taken then."""
    state = read(Path(__file__).parent / "fixtures" / "schema-1.ckpt")
    optimizer = shf.SHF(mlp(dropout=0.5), torch.nn.CrossEntropyLoss(), seed=9)
    optimizer.model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    info = optimizer.step(*labelled(seed=3))
    then = state["then"]
    assert info.loss_before == pytest.approx(then["loss_before"], rel=1e-12)
    assert info.loss_after == pytest.approx(then["loss_after"], rel=1e-9)
    assert optimizer.damping == then["damping"]


class _Malice:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> object:
        return os.system, (self.command,)


def _sealed(payload: bytes) -> bytes:
    """A well-formed file around any payload, as an attacker who knows the format would write it."""
    import hashlib

    beginning = f"{checkpoint.SCHEMA} {len(payload)} ".encode()
    digest = hashlib.sha256(beginning + payload).hexdigest().encode()
    return b"shf-checkpoint " + beginning + digest + b"\n" + payload


def test_a_pickle_that_runs_code_is_refused(tmp_path: Path) -> None:
    """Two fences: fails if the pickle's names are not looked at and torch.load is called without weights_only=True."""
    trap = tmp_path / "sprung"
    buffer = io.BytesIO()
    torch.save({"x": _Malice(f"touch {trap}")}, buffer)
    for payload in (buffer.getvalue(), pickle.dumps(_Malice(f"touch {trap}"))):
        path = tmp_path / "c.ckpt"
        path.write_bytes(_sealed(payload))
        with pytest.raises(CheckpointDamagedError):
            read(path)
        assert not trap.exists()


def test_a_compressed_archive_is_refused_unopened(tmp_path: Path) -> None:
    """A bomb: 64 MiB of zeros in a few kilobytes. Fails if the compression of members is not looked at."""
    packed, plain = io.BytesIO(), io.BytesIO()
    torch.save({"x": torch.zeros(1 << 24)}, plain)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for member in source.infolist():
            target.writestr(member.filename, source.read(member))
    path = tmp_path / "c.ckpt"
    path.write_bytes(_sealed(packed.getvalue()))
    with pytest.raises(CheckpointDamagedError, match="a compressed archive; no checkpoint"):
        read(path)


def test_a_file_larger_than_the_memory_is_refused_unread(tmp_path: Path) -> None:
    """A sparse file of 8 TiB whose first line is in order. Fails without the look at the size: hashing it takes days."""
    path, size = tmp_path / "c.ckpt", 1 << 43
    line = f"shf-checkpoint 1 {size} {'0' * 64}\n".encode()
    with path.open("wb") as file:
        file.write(line)
        try:
            file.truncate(len(line) + size)
        except OSError:
            pytest.skip("this file system has no files of 8 TiB")
    with pytest.raises(CheckpointDamagedError, match="more than this machine's memory"):
        read(path)


def test_memory_is_not_filled_before_the_checksum_is_right(tmp_path: Path) -> None:
    """64 MiB with a wrong checksum. Fails if the payload is read as a whole first."""
    path, size = tmp_path / "c.ckpt", 64 << 20
    with path.open("wb") as file:
        file.write(f"shf-checkpoint 1 {size} {'0' * 64}\n".encode())
        file.truncate(file.tell() + size)
    tracemalloc.start()
    with pytest.raises(CheckpointDamagedError, match="SHA-256"):
        read(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


def test_members_that_share_their_bytes_are_refused(tmp_path: Path) -> None:
    """One megabyte that a hundred entries point to. Fails if the sizes of the members are not added up."""
    plain, shared = io.BytesIO(), io.BytesIO()
    torch.save({"x": torch.zeros(1 << 18)}, plain)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(shared, "w") as target:
        for member in source.infolist():
            target.writestr(member.filename, source.read(member))
        large = max(target.infolist(), key=lambda m: m.file_size)
        for k in range(100):
            twin = zipfile.ZipInfo(f"archive/data/{k + 1}")
            twin.header_offset, twin.file_size = large.header_offset, large.file_size
            twin.compress_size, twin.CRC = large.compress_size, large.CRC
            target.filelist.append(twin)
    path = tmp_path / "c.ckpt"
    path.write_bytes(_sealed(shared.getvalue()))
    with pytest.raises(CheckpointDamagedError, match="members are larger than the file"):
        read(path)


def test_names_that_no_checkpoint_needs_are_refused(tmp_path: Path) -> None:
    """`weights_only` would call bytearray(2⁴⁰). Fails without the look at the pickle's names."""
    plain, packed = io.BytesIO(), io.BytesIO()
    torch.save({"x": 1}, plain)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(packed, "w") as target:
        for member in source.infolist():
            content = source.read(member)
            if member.filename.endswith("data.pkl"):
                content = b"\x80\x02cbuiltins\nbytearray\n\x8a\x06" + (1 << 40).to_bytes(6, "little") + b"\x85R."
            target.writestr(member.filename, content)
    path = tmp_path / "c.ckpt"
    path.write_bytes(_sealed(packed.getvalue()))
    with pytest.raises(CheckpointDamagedError, match="asks for 'builtins bytearray'"):
        read(path)


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"shf-checkpoint\n", b"shf-checkpoint 1 999999999999999 " + b"0" * 64 + b"\n", b"\0" * 4096]
)
def test_no_checkpoint_at_all(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "c.ckpt"
    path.write_bytes(content)
    with pytest.raises(CheckpointDamagedError):
        read(path)


def test_a_list_is_no_state(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save([1, 2], buffer)
    path = tmp_path / "c.ckpt"
    path.write_bytes(_sealed(buffer.getvalue()))
    with pytest.raises(CheckpointDamagedError, match="expected a mapping"):
        read(path)


def test_a_file_too_large_for_the_disk_leaves_the_old_one(tmp_path: Path) -> None:
    """The system itself refuses the write half way (a limit on file sizes stands for the full disk). Fails if
    `CheckpointStore.save` removes older ones before the new one is there."""
    script = """
import resource, sys
import torch
from pathlib import Path
from shf.lab.checkpoint import CheckpointStore
store = CheckpointStore(Path(sys.argv[1]))
store.save(1, {"x": torch.ones(10)})
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    store.save(2, {"x": torch.ones(100_000)})
except OSError as error:
    print("refused:", error.errno)
loaded = store.load_latest()
print(loaded.path.name, float(loaded.state["x"].sum()), sorted(p.name for p in Path(sys.argv[1]).iterdir()))
"""
    found = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True, timeout=1200
    ).stdout.splitlines()
    assert found[0] == "refused: 27"
    assert found[1] == "iteration-0000000001.ckpt 10.0 ['iteration-0000000001.ckpt']"


def test_leftovers_of_a_killed_write_are_cleared(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    (tmp_path / ".iteration-0000000001.ckpt.77.partial").write_bytes(b"half")
    store.save(2, state())
    assert [p.name for p in tmp_path.iterdir()] == ["iteration-0000000002.ckpt"]
