"""Pages of the documentation whose tables come from records: parts between `<!-- name -->` and `<!-- end -->`."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence


def spread(values: Sequence[float], digits: str = ".4g") -> str:
    """The mean, and the range where there are several."""
    mean = format(statistics.fmean(values), digits)
    return mean if len(values) == 1 else f"{mean} ({min(values):{digits}} to {max(values):{digits}})"


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
