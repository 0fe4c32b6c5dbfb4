"""Files on the disk: bounded reads, atomic writes, a full disk, the lock."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import pytest

from shf.lab.data import DamagedDataError, DataError, cache_directory, data_directory
from shf.lab.data.files import DataFile, exclusive, read_bounded, write_atomic


def test_read_refuses_what_is_too_large(tmp_path: Path) -> None:
    """A sparse file of a terabyte is refused by its size, unread."""
    path = tmp_path / "x"
    with path.open("wb") as stream:
        stream.truncate(1 << 40)
    with pytest.raises(DamagedDataError, match="1099511627776 bytes, expected at most 10"):
        read_bounded(path, 10)


@pytest.mark.timeout(600)
def test_read_refuses_pipes_and_devices(tmp_path: Path) -> None:
    """Opening a pipe nobody writes to would wait for ever, reading /dev/zero would never end."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero")):
        with pytest.raises(DamagedDataError, match="not a regular file"):
            read_bounded(path, 10)


def test_read_of_what_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(DataError, match=str(path)):
            read_bounded(path, 10)


def test_write_creates_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file"
    for content in (b"first", b"second"):
        write_atomic(path, content)
        assert path.read_bytes() == content
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("stage", ["fsync", "replace"])
def test_full_disk(stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old file stays whole, nothing is left behind, and the same call works once there is room."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "file"
    write_atomic(path, b"old")
    with monkeypatch.context() as patch:
        patch.setattr(*((os, "fsync", full) if stage == "fsync" else (Path, "replace", full)))
        with pytest.raises(DataError, match=r"No space left on device\); 3 bytes are needed, \d+ are free.*SHF_CACHE"):
            write_atomic(path, b"new")
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"old"
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"


def test_a_write_that_the_system_stops_half_way(tmp_path: Path) -> None:
    """Not simulated: the kernel refuses to let the file grow beyond 4096 bytes."""
    resource = pytest.importorskip("resource")
    path = tmp_path / "file"
    write_atomic(path, b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(DataError, match="cannot be written"):
            write_atomic(path, bytes(1 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"old"


def test_a_file_where_the_directory_should_be(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        write_atomic(tmp_path / "cache" / "mnist" / "x", b"")
    with pytest.raises(DataError, match="cannot be written"), exclusive(tmp_path / "cache" / "x.lock"):
        pass


def test_lock_says_when_it_waited_in_vain(tmp_path: Path) -> None:
    lock = tmp_path / "x.lock"
    with exclusive(lock), pytest.raises(DataError, match="another process"), exclusive(lock, seconds=0.1):
        pass
    with exclusive(lock, seconds=0.1):
        pass


def test_data_file_names_both_checksums(tmp_path: Path) -> None:
    good = hashlib.sha256(b"good").hexdigest()
    file = DataFile("usps/x.mat", 4, good, "http://home.invalid/x.mat")
    write_atomic(file.at(tmp_path), b"good")
    assert file.read(tmp_path) == b"good"
    write_atomic(file.at(tmp_path), b"evil")
    with pytest.raises(DamagedDataError) as caught:
        file.read(tmp_path)
    for part in (str(file.at(tmp_path)), good, hashlib.sha256(b"evil").hexdigest(), file.home, "shf data get usps"):
        assert part in str(caught.value)


def test_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The argument comes before SHF_DATA; an empty variable is none; what is no directory is an error."""
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.setenv("SHF_DATA", str(tmp_path))
    assert data_directory() == tmp_path
    assert data_directory(other) == other
    monkeypatch.setenv("SHF_DATA", "")
    assert data_directory() is None
    monkeypatch.setenv("SHF_DATA", str(tmp_path / "absent"))
    with pytest.raises(DataError, match=r"SHF_DATA=.*absent: not a directory"):
        data_directory()
    monkeypatch.setenv("SHF_CACHE", str(other))
    assert cache_directory() == other
    monkeypatch.delenv("SHF_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "shf" in cache_directory().parts[-1]
