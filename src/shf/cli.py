"""The command ``shf``. Its commands live in `shf.lab.commands`; without the extra ``lab`` this says what to install."""

import importlib.util
import sys

_NEEDED = ("typer", "rich", "numpy", "scipy", "matplotlib", "jinja2", "filelock", "platformdirs")


def main() -> None:
    """Run the command line; ends the process with 0 (done), 1 (failed or not finished) or 2 (wrong usage)."""
    if sys.argv[1:] == ["--version"]:
        from shf import __version__

        print(f"shf {__version__}")
        return
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"shf: the command needs the laboratory, which is not installed (missing: {', '.join(missing)}).\n"
            "Install it with: pip install '.[lab]' in a clone of the project",
            file=sys.stderr,
        )
        sys.exit(1)
    from shf.lab.commands import app

    app()
