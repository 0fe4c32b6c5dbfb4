"""Whether processes are about to do the same thing: facts compared as text. No messages here."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

_NAMED = 5
"""How many differences an error spells out."""


def to_text(facts: Mapping[str, Any]) -> str:
    """Facts as JSON, equal for equal facts."""
    return json.dumps(facts, sort_keys=True, ensure_ascii=False, default=str)


def differences(texts: Sequence[str]) -> tuple[str, list[int]]:
    """In what the processes' facts differ from the first one's, in words, and which processes those are."""
    first = _entries(json.loads(texts[0]))
    found, ranks = [], []
    for rank, text in enumerate(texts[1:], start=1):
        other = _entries(json.loads(text))
        keys = [key for key in {**first, **other} if str(first.get(key, _ABSENT)) != str(other.get(key, _ABSENT))]
        found += [
            f"{key} is {first.get(key, _ABSENT)} on rank 0, {other.get(key, _ABSENT)} on rank {rank}" for key in keys
        ]
        ranks += [rank] if keys else []
    more = f"; and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return "; ".join(found[:_NAMED]) + more, ranks


_ABSENT = "absent"


def _entries(facts: Any, path: str = "") -> dict[str, Any]:
    """Nested facts as path → value."""
    if not isinstance(facts, dict):
        return {path: facts}
    return {k: v for key, value in facts.items() for k, v in _entries(value, f"{path}.{key}" if path else key).items()}
