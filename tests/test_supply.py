"""The lock file: every package pinned and hashed but torch, no address of a registry; what the checks make of it."""

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import shf

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import supply  # noqa: E402

INTEGRATIONS = ROOT / "requirements-integrations.lock"
LOCK = supply.LOCK.read_text(encoding="utf-8")


def names(requirements):
    return {re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", r)[0]).lower() for r in requirements}


def test_a_wheel_has_every_file_of_the_package(tmp_path):
    """Fails if a pattern of .gitignore names one of them, such as a template: the build would leave it out."""
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        packed = {name for name in wheel.namelist() if name.startswith("shf/")}
    source = ROOT / "src"
    files = {f.relative_to(source).as_posix() for f in (source / "shf").rglob("*") if f.is_file()}
    assert packed == {name for name in files if "__pycache__" not in name}
    assert "shf/lab/templates/report.html" in packed


def test_every_package_is_pinned_and_hashed():
    """Fails if one line of the lock loses its hashes: pip would then take whatever the registry serves."""
    wanted = supply.locked_versions(LOCK)
    assert len(wanted) > 50
    with pytest.raises(SystemExit, match="absl-py has no hash"):
        supply.locked_versions("absl-py==1.0\n" + LOCK)


def test_it_covers_what_the_project_asks_for_but_torch():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"]
    locked = ("lab", "dev", "opponents", "sklearn")
    asked = names([*(name for extra in locked for name in extras[extra]), *project["build-system"]["requires"]])
    wanted, more = supply.locked_versions(LOCK), supply.locked_versions(INTEGRATIONS.read_text(encoding="utf-8"))
    assert asked <= set(wanted)
    assert names(extras["integrations"]) <= set(more)
    for found in (wanted, more):  # the one that is there stays: no other build of it comes in, nor what belongs to one
        assert not [
            name for name in found if name.startswith(("torchvision", "nvidia", "cuda", "triton")) or name == "torch"
        ]
    assert {name for name in more if more[name] != wanted.get(name, more[name])} == set()


def test_no_registry_is_named():
    for file in (supply.LOCK, INTEGRATIONS, ROOT / "constraints.txt", ROOT / "Makefile"):
        assert not re.search(r"https?://|index-url|-f ", file.read_text(encoding="utf-8"))


def test_the_make_target_asks_for_hashes():
    """Fails if `make` installs from the lock without --require-hashes."""
    command = subprocess.run(
        ["make", "-n", "-B", ".venv/.installed"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert "--require-hashes --no-deps -r requirements.lock" in command


def test_other_versions_than_locked_are_found():
    """Fails if `differences` compares nothing."""
    assert supply.differences({"pytest": pytest.__version__}) == []
    assert supply.differences({"pytest": "0.1"}) == [f"pytest: {pytest.__version__}, locked 0.1"]
    assert supply.differences({"no-such-package": "1"}) == ["no-such-package: absent, locked 1"]


def test_files_that_were_changed_after_installation_are_found(tmp_path, monkeypatch):
    """A package of two files, one of them edited, then removed. Fails if `altered` does not compare digests."""
    info = tmp_path / "tiny-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: tiny\nVersion: 1\n")
    for name in ("tiny.py", "other.py"):
        (tmp_path / name).write_text("x = 1\n")
    record = [f"{name},sha256={supply._digest(tmp_path / name, 'sha256')},6" for name in ("tiny.py", "other.py")]
    (info / "RECORD").write_text("\n".join([*record, "tiny-1.dist-info/RECORD,,"]) + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert supply.altered(["tiny"]) == []
    (tmp_path / "tiny.py").write_text("x = 2\n")
    assert supply.altered(["tiny"]) == ["tiny: tiny.py is not as it was installed"]
    (tmp_path / "tiny.py").unlink()
    assert supply.altered(["tiny"]) == ["tiny: tiny.py is not as it was installed"]


def test_known_vulnerabilities_are_counted_and_unknown_packages_are_not():
    """Fails if `vulnerabilities` passes over what pip-audit reports."""
    report = (
        '{"dependencies": [{"name": "a", "version": "1", "vulns": [{"id": "X-1"}]},'
        ' {"name": "b", "version": "2", "vulns": []}, {"name": "c", "skip_reason": "not found"}]}'
    )
    assert supply.vulnerabilities(report) == (["a 1: X-1"], 2)


def test_version_and_citation_agree():
    """Fails if one of the places that name the version is forgotten: a release would say two things."""
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {shf.__version__}\n" in citation
    assert f"\n## {shf.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_sdist_has_the_source_and_no_records(tmp_path):
    """Fails if the megabytes of results/ go to everyone who installs from source."""
    build = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    made = next(tmp_path.glob("torch_shf-*.tar.gz"))
    with tarfile.open(made) as sdist:
        tops = {name.split("/")[1] for name in sdist.getnames()}
    assert "src" in tops
    assert not tops & {"results", "benchmarks", "tests", "docs"}
    assert made.stat().st_size < 1_000_000
