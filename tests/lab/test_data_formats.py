"""Files from elsewhere: each reader gives the right content, and refuses hostile ones within bounded memory and time."""

from __future__ import annotations

import gzip
import hashlib
import io
import pickle
import struct
import tracemalloc
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
import scipy.io
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st
from targets import numeric

from shf.lab.data import DamagedDataError, mnist
from shf.lab.data.files import DataFile
from shf.lab.data.matfile import read_variables

MEGABYTE = 1 << 20


@pytest.fixture
def bounded() -> Iterator[None]:
    """The test may not hold more than 16 megabytes at any moment."""
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 * MEGABYTE


class TestPackedFiles:
    """A ``.gz`` of a data set: unpacked no further than its content is long, then compared with its checksum."""

    FILE = DataFile("toy/x.gz", 1000, hashlib.sha256(bytes(range(250)) * 4).hexdigest(), "http://home.invalid/x.gz")

    def test_content(self) -> None:
        for level in (1, 9):
            assert self.FILE.content(gzip.compress(bytes(range(250)) * 4, level), "x") == bytes(range(250)) * 4

    def test_a_bomb_is_left_at_the_limit(self, bounded: None) -> None:
        """Fails if `content` reads on: it holds the whole 200 megabytes of zeros then."""
        packed = zlib.compressobj(9, zlib.DEFLATED, 31)
        bomb = b"".join(packed.compress(bytes(MEGABYTE)) for _ in range(200)) + packed.flush()
        assert len(bomb) < MEGABYTE
        with pytest.raises(DamagedDataError, match=r"\(1001 bytes\)"):
            self.FILE.content(bomb, "bomb")

    @pytest.mark.parametrize("cut", [3, 12, 20, 200, -1])
    def test_truncated(self, cut: int) -> None:
        with pytest.raises(DamagedDataError, match="nothing readable"):
            self.FILE.content(gzip.compress(bytes(range(250)) * 4)[:cut], "x")

    def test_another_content(self) -> None:
        """Fails if `content` does not compare the checksum."""
        with pytest.raises(DamagedDataError, match=self.FILE.sha256):
            self.FILE.content(gzip.compress(bytes(1000)), "x")


class TestPickle:
    def test_mnist_as_the_package_has_it(self) -> None:
        """Images as pixel / 256 in float32; training and validation cases together are the training cases."""
        pixels = np.arange(6 * 784).astype(np.uint8).reshape(6, 784)
        digits = np.array([5, 0, 4, 1, 9, 2])
        parts = [(pixels[rows].astype(np.float32) / 256, digits[rows]) for rows in np.split(np.arange(6), 3)]
        files = {
            path: gzip.decompress(x) for path, x in mnist.from_pickle(gzip.compress(pickle.dumps(parts, 2))).items()
        }
        assert set(files) == {file.path for file in mnist.FILES}
        assert files[mnist.TRAIN_IMAGES.path] == struct.pack(">4I", 0x803, 4, 28, 28) + pixels[:4].tobytes()
        assert files[mnist.TRAIN_LABELS.path] == struct.pack(">2I", 0x801, 4) + bytes([5, 0, 4, 1])
        assert files[mnist.TEST_IMAGES.path] == struct.pack(">4I", 0x803, 2, 28, 28) + pixels[4:].tobytes()
        assert files[mnist.TEST_LABELS.path] == struct.pack(">2I", 0x801, 2) + bytes([9, 2])


CELL = np.array([1, "a"], dtype=object)


def mat(compress: bool = True, **variables: object) -> bytes:
    stream = io.BytesIO()
    scipy.io.savemat(stream, variables, do_compression=compress)
    return stream.getvalue()


class TestMatFiles:
    @pytest.mark.parametrize("compress", [False, True])
    @pytest.mark.parametrize("dtype", ["f8", "f4", "u1", "i2", "i8"])
    def test_reads_the_named_variables(self, compress: bool, dtype: str) -> None:
        """Against scipy's own writer; odd lengths are padded in the file."""
        first, second = np.arange(6).reshape(2, 3).astype(dtype), np.arange(5.0).reshape(1, 5)
        content = mat(compress, first=first, x=second, s=scipy.sparse.eye(4, format="csc"), other="text", cell=CELL)
        read = read_variables(content, ["first", "x"], limit=MEGABYTE, label="x")
        np.testing.assert_array_equal(read["first"], first)
        np.testing.assert_array_equal(read["x"], second)
        assert set(read) == {"first", "x"}

    def test_both_byte_orders(self) -> None:
        """One matrix, 3 × 1, of the class double with its values stored in 16 bits, written by hand."""
        for order, mark in (("<", b"IM"), (">", b"MI")):
            flags = struct.pack(f"{order}4I", 6, 8, 6, 0)
            shape, name = struct.pack(f"{order}2I2i", 5, 8, 3, 1), struct.pack(f"{order}I", 1 << 16 | 1) + b"a\0\0\0"
            values = struct.pack(f"{order}2I3h2x", 3, 6, -1, 2, 300)
            body = flags + shape + name + values
            head = bytes(124) + struct.pack(f"{order}H", 0x0100) + mark
            content = head + struct.pack(f"{order}2I", 14, len(body)) + body
            found = read_variables(content, ["a"], limit=MEGABYTE, label="x")["a"]
            assert found.tolist() == [[-1], [2], [300]]

    @pytest.mark.parametrize(
        "value", [CELL, "text", {"field": 1}, np.array([1 + 2j]), scipy.sparse.eye(3)], ids=lambda v: type(v).__name__
    )
    def test_only_dense_numbers(self, value: object) -> None:
        with pytest.raises(DamagedDataError, match="variable a is not an array of numbers"):
            read_variables(mat(a=value), ["a"], limit=MEGABYTE, label="x")

    def test_absent_variable(self) -> None:
        with pytest.raises(DamagedDataError, match=r"variable b is absent.*\['a'\]"):
            read_variables(mat(a=1.0), ["b"], limit=MEGABYTE, label="x")

    @pytest.mark.parametrize("content", [b"", b"\x89HDF\r\n\x1a\n" + bytes(600), bytes(128), b"MATLAB 4"])
    def test_wrong_magic(self, content: bytes) -> None:
        with pytest.raises(DamagedDataError, match="not a MAT 5 file"):
            read_variables(content, ["a"], limit=MEGABYTE, label="x")

    def test_bomb(self) -> None:
        """64 megabytes of zeros in a tenth of one: unpacking stops at the limit. Fails without one."""
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
        """Refused in the reader's own words, or numbers within the limit."""
        content = bytearray(mat(compress=data.draw(st.booleans()), a=np.arange(12.0), b=np.eye(3)))
        for _ in range(data.draw(st.integers(1, 6))):
            content[data.draw(st.integers(124, len(content) - 1))] = data.draw(st.integers(0, 255))
        try:
            found = read_variables(bytes(content), ["a", "b"], limit=MEGABYTE, label="x")
        except DamagedDataError:
            return
        assert set(found) == {"a", "b"}
        assert numeric(*found.values())
