"""Files from elsewhere: each reader gives the right content, and refuses hostile ones within bounded memory and time."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import pickle
import struct
import tarfile
import tracemalloc
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from targets import PYTHON_2_PICKLE, flat, numeric

from shf.lab.data import DamagedDataError, idx
from shf.lab.data.archives import gunzip, tar_member, zip_member
from shf.lab.data.matfile import read_variables
from shf.lab.data.pickles import load_arrays

MEGABYTE = 1 << 20


@pytest.fixture
def bounded() -> Iterator[None]:
    """The test may not hold more than 16 megabytes at any moment."""
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 * MEGABYTE


class TestIdx:
    @given(hnp.arrays(np.uint8, hnp.array_shapes(min_dims=1, max_dims=3, max_side=6)))
    def test_round_trip(self, values: np.ndarray) -> None:
        np.testing.assert_array_equal(idx.decode(idx.encode(values), axes=values.ndim), values)

    @given(st.binary(max_size=64))
    def test_any_bytes_are_refused_or_an_array(self, content: bytes) -> None:
        with contextlib.suppress(DamagedDataError):
            assert idx.decode(content, axes=1).size == len(content) - 8

    @pytest.mark.parametrize(
        "content",
        [
            pytest.param(b"", id="empty"),
            pytest.param(b"\x1f\x8b\x08\x03" + bytes(20), id="wrong magic"),
            pytest.param(b"\0\0\x0d\x03" + bytes(12), id="floats"),
            pytest.param(b"\0\0\x08\x03" + struct.pack(">3I", 2**32 - 1, 2**32 - 1, 2**32 - 1), id="absurd size"),
            pytest.param(idx.encode(np.zeros((2, 3, 4), np.uint8))[:-1], id="truncated"),
            pytest.param(idx.encode(np.zeros((2, 3, 4), np.uint8)) + b"\0", id="trailing byte"),
        ],
    )
    def test_refuses(self, content: bytes, bounded: None) -> None:
        """Fails, for sizes, if `decode` does not compare header and content."""
        with pytest.raises(DamagedDataError):
            idx.decode(content, axes=3)


class TestArchives:
    def test_gunzip(self) -> None:
        assert gunzip(gzip.compress(b"abc"), 3, "x") == b"abc"

    def test_gzip_bomb_is_left_at_the_limit(self, bounded: None) -> None:
        """Without the limit this holds the whole 200 megabytes of zeros that the bomb unpacks to. Fails if `_at_most`
        reads on."""
        packed = zlib.compressobj(9, zlib.DEFLATED, 31)
        bomb = b"".join(packed.compress(bytes(MEGABYTE)) for _ in range(200)) + packed.flush()
        assert len(bomb) < MEGABYTE
        with pytest.raises(DamagedDataError, match="more than the 1000 bytes"):
            gunzip(bomb, 1000, "bomb")

    @pytest.mark.parametrize("cut", [3, 12, 20, 500, -1])
    def test_truncated_gzip(self, cut: int) -> None:
        with pytest.raises(DamagedDataError):
            gunzip(gzip.compress(os.urandom(1000))[:cut], 1000, "x")

    def test_zip_member_among_hostile_ones(self, tmp_path: Path) -> None:
        """A member that would climb out of the directory is never unpacked: only the named one is read, in memory. Fails
        if the archive is unpacked beside it."""
        archive = tmp_path / "inner" / "x.whl"
        archive.parent.mkdir()
        with zipfile.ZipFile(archive, "w") as opened:
            opened.writestr("../../escaped", b"evil")
            opened.writestr("/tmp/absolute-escape", b"evil")
            opened.writestr("data/member", b"good")
        assert zip_member(archive, "data/member", 10) == b"good"
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == [archive]

    def test_zip_bomb(self, tmp_path: Path, bounded: None) -> None:
        """Fails if `_at_most` does not compare what it has read with the limit."""
        archive = tmp_path / "x.whl"
        with (
            zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as opened,
            opened.open("m", "w", force_zip64=True) as member,
        ):
            for _ in range(200):
                member.write(bytes(MEGABYTE))
        with pytest.raises(DamagedDataError, match="more than"):
            zip_member(archive, "m", 1000)

    def test_damaged_zip(self, tmp_path: Path) -> None:
        archive = tmp_path / "x.whl"
        with zipfile.ZipFile(archive, "w") as opened:
            opened.writestr("m", b"content" * 100)
        good = archive.read_bytes()
        for place in range(0, len(good), 7):
            archive.write_bytes(good[:place] + bytes([good[place] ^ 0xFF]) + good[place + 1 :])
            with contextlib.suppress(DamagedDataError):  # or a flip in a date or the like
                assert zip_member(archive, "m", 700) == b"content" * 100
        archive.write_bytes(good[: len(good) // 2])
        with pytest.raises(DamagedDataError):
            zip_member(archive, "m", 700)

    @staticmethod
    def tar(path: Path, *entries: tuple[tarfile.TarInfo, bytes]) -> Path:
        with tarfile.open(path, "w:gz") as opened:
            for entry, content in entries:
                entry.size = len(content)
                opened.addfile(entry, io.BytesIO(content))
        return path

    def test_tar_member_among_hostile_ones(self, tmp_path: Path) -> None:
        """Links named like the member are passed over (following one would read any file of the machine). Fails if
        `tar_member` does not ask `isreg`."""
        secret = tmp_path / "secret"
        secret.write_bytes(b"secret")
        link = tarfile.TarInfo("p/member")
        link.type, link.linkname = tarfile.SYMTYPE, str(secret)
        device = tarfile.TarInfo("p/member")
        device.type = tarfile.CHRTYPE
        climbing = (tarfile.TarInfo("../../escaped"), b"evil")
        good = (tarfile.TarInfo("p/member"), b"good")
        archive = self.tar(tmp_path / "x.tar.gz", (link, b""), (device, b""), climbing, good)
        assert tar_member(archive, "p/member", 10, archive_limit=MEGABYTE) == b"good"
        assert {path.name for path in tmp_path.iterdir()} == {"secret", "x.tar.gz"}

    def test_tar_with_only_a_link_or_nothing(self, tmp_path: Path) -> None:
        link = tarfile.TarInfo("p/member")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        for archive in (self.tar(tmp_path / "a.tar.gz", (link, b"")), self.tar(tmp_path / "b.tar.gz")):
            with pytest.raises(DamagedDataError, match="not in the archive"):
                tar_member(archive, "p/member", 1000, archive_limit=MEGABYTE)

    def test_tar_bombs(self, tmp_path: Path) -> None:
        """A large member, and a large archive in front of the member, end at their limits. Fails if `_Ration` does not
        count."""
        zeros = bytes(32 * MEGABYTE)
        large = self.tar(tmp_path / "a.tar.gz", (tarfile.TarInfo("m"), zeros))
        hidden = self.tar(tmp_path / "b.tar.gz", (tarfile.TarInfo("other"), zeros), (tarfile.TarInfo("m"), b"good"))
        tracemalloc.start()
        with pytest.raises(DamagedDataError, match="more than the 1000 bytes"):
            tar_member(large, "m", 1000, archive_limit=1 << 30)
        with pytest.raises(DamagedDataError, match="unpacks to more"):
            tar_member(hidden, "m", 1000, archive_limit=4 * MEGABYTE)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 16 * MEGABYTE

    def test_truncated_tar(self, tmp_path: Path) -> None:
        archive = self.tar(tmp_path / "x.tar.gz", (tarfile.TarInfo("m"), os.urandom(5000)))
        archive.write_bytes(archive.read_bytes()[:2000])
        with pytest.raises(DamagedDataError):
            tar_member(archive, "m", 5000, archive_limit=MEGABYTE)


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.marker}",)


class TestPickles:
    @pytest.mark.parametrize("dtype", ["f4", "f8", "u1", "i8", ">i2"])
    @pytest.mark.parametrize("order", ["C", "F"])
    def test_reads_arrays(self, dtype: str, order: str) -> None:
        first = np.arange(12).reshape(3, 4).astype(dtype, order=order)
        read = load_arrays(pickle.dumps((first, (first[0].copy(),)), protocol=3))
        np.testing.assert_array_equal(read[0], first)
        np.testing.assert_array_equal(read[1][0], first[0])
        assert read[0].dtype == first.dtype

    def test_reads_the_strings_of_python_2(self) -> None:
        """As in mnist.pkl.gz: protocol 2, the array's bytes as a Python 2 string."""
        np.testing.assert_array_equal(load_arrays(PYTHON_2_PICKLE), np.array([7, 254], np.uint8))

    @pytest.mark.parametrize("protocol", range(6))
    def test_runs_nothing(self, protocol: int, tmp_path: Path) -> None:
        """With pickle.loads in its place the command runs and the marker is there. Fails if `find_class` resolves any
        other name."""
        marker = tmp_path / "ran"
        hostile = pickle.dumps((np.zeros(3), Evil(marker)), protocol=protocol)
        with pytest.raises(DamagedDataError, match="refused"):
            load_arrays(hostile)
        assert not marker.exists()
        pickle.loads(hostile)  # noqa: S301  (the control: the pickle really is hostile)
        assert marker.exists()

    @pytest.mark.parametrize(
        "name", ["builtins\neval", "builtins\ngetattr", "numpy\nload", "numpy.core.multiarray\nfromfile", "os\nsystem"]
    )
    def test_admits_no_other_name(self, name: str) -> None:
        with pytest.raises(DamagedDataError, match="it asks for"):
            load_arrays(b"\x80\x02c" + name.encode() + b"\n.")

    def test_object_arrays_are_refused(self) -> None:
        """Fails if `_Dtype` admits types that are no numbers."""
        for value in (np.array([{"a": 1}, None]), np.array(["text"]), np.zeros(2, "M8[s]"), np.zeros(1, "f4,i4")):
            with pytest.raises(DamagedDataError):
                load_arrays(pickle.dumps(value, protocol=3))

    def test_other_values_are_refused(self) -> None:
        for value in (1, "text", None, (np.zeros(1), 3), [np.zeros(1)], {"a": np.zeros(1)}, {1, 2}):
            with pytest.raises(DamagedDataError):
                load_arrays(pickle.dumps(value, protocol=3))

    def test_memo_bomb(self, bounded: None) -> None:
        """A memo index of 2³¹ makes the C unpickler clear tens of gigabytes; the scan of opcodes refuses it. Fails
        without that scan."""
        with pytest.raises(DamagedDataError, match="LONG_BINPUT"):
            load_arrays(b"\x80\x02Nr" + struct.pack("<I", 2**31) + b".")

    def test_nested_references_do_not_unfold(self, bounded: None) -> None:
        """Sixty tuples, each twice the one before: 2⁶⁰ parts if followed. Fails, by its time, if `_finished` does not
        count."""
        doubling = b"".join(bytes([ord("h"), i, ord("h"), i, 0x86, ord("q"), i + 1]) for i in range(60))
        with pytest.raises(DamagedDataError, match="more than 64 arrays"):
            load_arrays(b"\x80\x02)q\x00" + doubling + b".")

    def test_absurd_sizes(self, bounded: None) -> None:
        """Shapes or strings that promise more than the file holds allocate nothing. Fails if the shape in a pickle is not
        compared with its bytes: numpy says so then, in other words."""
        good = pickle.dumps(np.zeros((3, 5), np.uint8), protocol=3)
        assert b"K\x03K\x05\x86" in good
        with pytest.raises(DamagedDataError, match=r"array of shape \(2147483647, 2147483647\) with 15 bytes"):
            load_arrays(good.replace(b"K\x03K\x05\x86", b"J\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x86"))
        with pytest.raises(DamagedDataError):
            load_arrays(b"\x80\x03B\xff\xff\xff\xff.")

    @settings(max_examples=300)
    @given(st.data())
    def test_damaged_pickles(self, data: st.DataObject) -> None:
        """Refused, or arrays of numbers that were in the file. Fails if `_Array` does not compare the shape with the bytes,
        or if `_Dtype` admits objects."""
        content = bytearray(pickle.dumps((np.arange(6, dtype="f4").reshape(2, 3), np.arange(2)), protocol=3))
        for _ in range(data.draw(st.integers(1, 4))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        damaged = bytes(content[: data.draw(st.integers(0, len(content)))])
        try:
            found = list(flat(load_arrays(damaged)))
        except DamagedDataError:
            return
        assert all(array.dtype.kind in "iuf" and array.tobytes("A") in damaged for array in found)


def mat(compress: bool = True, **variables: object) -> bytes:
    stream = io.BytesIO()
    scipy.io.savemat(stream, variables, do_compression=compress)
    return stream.getvalue()


class TestMatFiles:
    @pytest.mark.parametrize("compress", [False, True])
    def test_reads_the_named_variables(self, compress: bool) -> None:
        dense, sparse = np.arange(6.0).reshape(2, 3), scipy.sparse.eye(4, format="csc")
        content = mat(compress, dense=dense, sparse=sparse, other="text", cell=np.array([1, "a"], dtype=object))
        read = read_variables(content, ["dense", "sparse"], limit=MEGABYTE, label="x")
        np.testing.assert_array_equal(read["dense"], dense)
        np.testing.assert_array_equal(read["sparse"].toarray(), np.eye(4))
        assert set(read) == {"dense", "sparse"}

    @pytest.mark.parametrize(
        ("value", "found"),
        [
            (np.array([1, "a"], dtype=object), "is cell"),
            ("text", "is char"),
            ({"field": 1}, "is struct"),
            (np.array([1 + 2j]), "has type complex128"),
        ],
    )
    def test_only_numbers(self, value: object, found: str) -> None:
        with pytest.raises(DamagedDataError, match=f"variable a {found}, expected numbers"):
            read_variables(mat(a=value), ["a"], limit=MEGABYTE, label="x")

    def test_absent_variable(self) -> None:
        with pytest.raises(DamagedDataError, match=r"variable b is absent.*\['a'\]"):
            read_variables(mat(a=1.0), ["b"], limit=MEGABYTE, label="x")

    @pytest.mark.parametrize("content", [b"", b"\x89HDF\r\n\x1a\n" + bytes(600), bytes(128), b"MATLAB 4"])
    def test_wrong_magic(self, content: bytes) -> None:
        with pytest.raises(DamagedDataError, match="not a MAT 5 file"):
            read_variables(content, ["a"], limit=MEGABYTE, label="x")

    def test_bomb(self) -> None:
        """64 megabytes of zeros in a tenth of one: unpacking stops at the limit. Fails if `_inflate` has none."""
        content = mat(a=np.zeros((8, MEGABYTE)))
        assert len(content) < MEGABYTE
        tracemalloc.start()
        with pytest.raises(DamagedDataError):
            read_variables(content, ["a"], limit=MEGABYTE, label="x")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 8 * MEGABYTE

    def test_absurd_sizes(self, bounded: None) -> None:
        """Lengths in the file that promise gigabytes: refused, not allocated; elsewhere the number is a value or a name.
        Fails without the comparison of an element's length with the bytes that are there."""
        values = np.arange(12.0)
        content = mat(compress=False, a=values)
        words, read = {}, 0
        for place in range(128, len(content) - 4, 4):
            hostile = content[:place] + struct.pack("<I", 0x7FFFFFF0) + content[place + 4 :]
            try:
                found = read_variables(hostile, ["a"], limit=MEGABYTE, label="x")["a"]
                assert found.shape == (1, 12)
                assert (found == values).sum() >= 11
                read += 1
            except DamagedDataError as error:
                words[place] = str(error)
        assert read >= 24  # the values
        assert sum("promise" in text for text in words.values()) >= 4  # the matrix, its flags, shape and values

    @settings(max_examples=200, deadline=None)
    @given(st.data())
    def test_damaged_files(self, data: st.DataObject) -> None:
        """Refused, or numbers within the limit, those of sparse matrices at places that exist. Fails if other errors than
        DamagedDataError come out of scipy."""
        content = bytearray(mat(compress=data.draw(st.booleans()), a=np.arange(12.0), s=scipy.sparse.eye(3)))
        for _ in range(data.draw(st.integers(1, 6))):
            content[data.draw(st.integers(124, len(content) - 1))] = data.draw(st.integers(0, 255))
        try:
            found = read_variables(bytes(content), ["a", "s"], limit=MEGABYTE, label="x")
        except DamagedDataError:
            return
        assert set(found) == {"a", "s"}
        assert numeric(*found.values())
