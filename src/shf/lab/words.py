"""Figures in words, the same everywhere a person reads them. No torch here."""

from __future__ import annotations

import math


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
