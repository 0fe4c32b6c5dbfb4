"""A build backend that builds nothing: it answers pip's question for metadata without running a line of the package.

`pip download` of a source archive asks a build backend for the package's metadata, and for an archive without
pyproject.toml that backend is ``setuptools.build_meta:__legacy__``, which runs the archive's setup.py. Data need no
build: `packages.py` puts a copy of this file where pip looks for that backend, and it repeats what PKG-INFO says.
It runs in a process of pip's, so it imports the standard library alone.
"""

import email
import shutil
import sys
from pathlib import Path

__legacy__ = sys.modules[__name__]


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: object = None) -> str:
    """PEP 517: write a .dist-info directory for the unpacked archive in the current directory, return its name."""
    with Path("PKG-INFO").open(encoding="utf-8", errors="replace") as stream:
        stated = email.message_from_file(stream)
    folder = Path(metadata_directory, f"{stated['Name']}-{stated['Version']}.dist-info")
    folder.mkdir()
    shutil.copyfile("PKG-INFO", folder / "METADATA")
    return folder.name
