"""Pages of the documentation whose tables come from records: parts between `<!-- name -->` and `<!-- end -->`."""

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from shf.lab.files import write_atomically


def spread(values: Sequence[float], digits: str = ".4g") -> str:
    """The mean, and the range where there are several."""
    mean = format(statistics.fmean(values), digits)
    return mean if len(values) == 1 else f"{mean} ({min(values):{digits}} to {max(values):{digits}})"


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], rule: str = "---") -> str:
    """A table in Markdown; the rule is that of all columns but the first, "---:" to set them to the right."""
    lines = [heads, *rows]
    first, *others = ("| " + " | ".join(map(str, cells)) + " |" for cells in lines)
    return "\n".join([first, "|---|" + f"{rule}|" * (len(heads) - 1), *others])


def fill(path: Path, parts: Mapping[str, str]) -> None:
    """Replaces what stands between the marks of each part of a page."""
    write_atomically(path, filled(path.read_text(encoding="utf-8"), parts).encode())


def filled(page: str, parts: Mapping[str, str]) -> str:
    """The page with what stands between the marks of each part replaced.

    Raises:
        ValueError: if the page does not have exactly one place for a part.
    """
    for name, content in parts.items():
        pattern = re.compile(rf"(<!-- {re.escape(name)} -->\n)(?:(?!<!-- ).)*(<!-- end -->)", re.DOTALL)
        page, count = pattern.subn(lambda match, content=content: f"{match[1]}\n{content}\n\n{match[2]}", page)  # type: ignore[misc]
        if count != 1:
            raise ValueError(f"the page has {count} places for {name!r}, expected 1")
    return page
