"""Durations and suggestions in words, the same everywhere a person reads them. No torch here."""

import difflib
import math
from collections.abc import Iterable


def duration(seconds: float) -> str:
    """'45 s', '12 min', '3 h 20 min'; '–' for what is not known."""
    if not math.isfinite(seconds):
        return "–"
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def suggest(name: str, known: Iterable[str]) -> str:
    """'did you mean …' with the nearest of the known names, then all of them."""
    names = sorted(known)
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    question = f"did you mean {nearest[0]!r}? " if nearest else ""
    return f"{question}known: {', '.join(names)}"
