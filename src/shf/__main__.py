"""``python -m shf``: the same as the command ``shf``."""

from shf.cli import main

if __name__ == "__main__":
    main()
