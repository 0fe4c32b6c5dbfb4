"""What the make targets install, looked at: python tools/supply.py locked [LOCK] | audit

locked   every package of requirements.lock (or another lock file) is installed in the version that it names, and its files
         are as they were installed (by the SHA-256 that each package's RECORD has of them)
audit    known vulnerabilities of those packages, by pip-audit; where its database is out of reach, says so and passes:
         what is left then is `locked`
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

LOCK = Path(__file__).parents[1] / "requirements.lock"


def locked_versions(text: str) -> dict[str, str]:
    """Name → version; every package must have at least one hash."""
    found = {}
    for entry in re.split(r"\n(?=\S)", text.strip()):
        name, version = re.match(r"(\S+?)==([^\s;\\]+)", entry).groups()  # type: ignore[union-attr]
        if "--hash=sha256:" not in entry:
            raise SystemExit(f"{LOCK.name}: {name} has no hash; make the file anew with `make lock`")
        found[name] = version
    return found


def differences(wanted: dict[str, str]) -> list[str]:
    """What is installed otherwise than it is locked."""
    found = []
    for name, version in wanted.items():
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            installed = "absent"
        if installed != version:
            found.append(f"{name}: {installed}, locked {version}")
    return found


def altered(names: Iterable[str]) -> list[str]:
    """Files of installed packages that are missing, or are not what was installed. No network is needed for it."""
    found = []
    for name in names:
        for file in metadata.files(name) or []:
            place = Path(str(file.locate()))
            if file.hash is not None and (not place.is_file() or _digest(place, file.hash.mode) != file.hash.value):
                found.append(f"{name}: {file} is not as it was installed")
    return found


def _digest(path: Path, kind: str) -> str:
    """As a RECORD writes it: base64 without padding."""
    return base64.urlsafe_b64encode(hashlib.new(kind, path.read_bytes()).digest()).rstrip(b"=").decode()


def vulnerabilities(report: str) -> tuple[list[str], int]:
    """From pip-audit's report: what is known to be vulnerable, and how many packages it could look up."""
    packages = json.loads(report)["dependencies"]
    known = [p for p in packages if "skip_reason" not in p]
    return [f"{p['name']} {p['version']}: {v['id']}" for p in known for v in p["vulns"]], len(known)


def audit(wanted: dict[str, str]) -> int:
    command = ["--disable-pip", "--require-hashes", "--requirement", str(LOCK), "--format", "json", "--timeout", "10"]
    command = [sys.executable, "-m", "pip_audit", "--progress-spinner", "off", *command]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        found, known = vulnerabilities(done.stdout)
    except (ValueError, KeyError):
        found, known = [], 0
    if "No module named pip_audit" in done.stderr:
        raise SystemExit("pip-audit is not installed: make the environment anew with `make`")
    if known == 0:
        print(f"the database of vulnerabilities is out of reach: none of {len(wanted)} packages was audited")
        return 0
    print(f"{known} of {len(wanted)} packages audited, {len(found)} known vulnerabilities", *found, sep="\n")
    return 1 if found else 0


def main() -> int:
    command, *files = sys.argv[1:] or [""]
    wanted = locked_versions((LOCK.parent / (files or [LOCK.name])[0]).read_text(encoding="utf-8"))
    if command == "audit":
        return audit(wanted)
    if command == "locked":
        found = differences(wanted) or altered(wanted)
        print(*found or [f"all {len(wanted)} packages are as locked, and their files as installed"], sep="\n")
        return 1 if found else 0
    raise SystemExit(__doc__)


if __name__ == "__main__":
    sys.exit(main())
