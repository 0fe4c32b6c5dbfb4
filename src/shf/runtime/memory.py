"""Out of memory inside a step: recognised whoever raised it, and answered with the microbatch that needs half of it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shf.errors import RankError, StepMemoryError

_ALLOCATOR_WORDS = ("can't allocate memory", "not enough memory", "out of memory", "cannot allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """torch's CPU allocator raises a plain RuntimeError, CUDA's its own error, Python MemoryError."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, RankError):  # another process's words
        return False
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _ALLOCATOR_WORDS)


class Demand:
    """What a step holds in memory at once, as far as it is known when memory runs out.

    Attributes:
        rows: rows of the largest batch; None as long as none was seen.
        separable: whether rows may be taken in chunks.
    """

    rows: int | None = None
    separable: bool = True


@contextmanager
def explained_exhaustion(microbatch: int | None) -> Iterator[Demand]:
    """Around a step: an error of any allocator becomes a `StepMemoryError` that says what to try."""
    demand = Demand()
    try:
        yield demand
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, StepMemoryError) or not is_out_of_memory(error):
            raise
        advice, half = _advice(demand, microbatch)
        raise StepMemoryError(f"out of memory in a step: {advice}. Nothing has changed. ({error})", half) from error


def _advice(demand: Demand, microbatch: int | None) -> tuple[str, int | None]:
    if demand.rows is None:
        return "memory ran out before the batch was looked at", None
    at_once = min(microbatch or demand.rows, demand.rows)
    if at_once <= 1:
        return "one row at a time is too much already; the vectors of the parameters' size are what is left", None
    if not demand.separable:
        return f"rows influence each other, so use a batch of {demand.rows // 2} rows instead of {demand.rows}", None
    return f"{at_once} rows were in memory at once; use microbatch={at_once // 2}", at_once // 2
