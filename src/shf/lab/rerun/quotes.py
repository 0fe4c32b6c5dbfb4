"""Numbers in the sentences of a page, read anew from the records. No torch here.

A quoted number stands behind a mark that says where it comes from, invisible on the page itself:

    ends at <!--last usps/dropout-released-weights-split1 test_error_percent .2f-->1.13<!--/--> %

that is: what to take, the record (or several, by a pattern), its column, and the digits. `highest[30:67]` looks only at
these epochs, the first and the last included. Several records give several numbers, unless what is taken is over all.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

import numpy as np
from numpy.typing import NDArray

from shf.lab.records import RunRecord

Column = NDArray[np.float64]

MARKED = re.compile(r"<!--(?P<mark>[^\s<>][^<>]*)-->[^<>]*<!--/-->")
MARK = re.compile(
    r"(?P<how>[a-z-]+)(\[(?P<first>\d+):(?P<last>\d+)\])?\s(?P<runs>\S+)\s(?P<column>\w+)\s(?P<digits>\.\d[fg])"
)

OF_ONE: Mapping[str, Callable[[Column, Column], float]] = {
    "last": lambda epochs, values: values[-1],
    "lowest": lambda epochs, values: np.nanmin(values),
    "highest": lambda epochs, values: np.nanmax(values),
    "median": lambda epochs, values: float(np.nanmedian(values)),
    "epoch-of-lowest": lambda epochs, values: epochs[np.nanargmin(values)],
    "epoch-of-highest": lambda epochs, values: epochs[np.nanargmax(values)],
}
"""From a run's epochs and a column to one number; of equal ones the first epoch."""

OVER_ALL: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mean": lambda ends: float(np.mean(ends)),
    "spread": lambda ends: max(ends) - min(ends),
}
"""From what several runs have at their ends to one number."""


def quoted(page: str, records: Mapping[str, RunRecord]) -> str:
    """The page with every marked number read anew; where there is no record of it, that it was not run.

    Raises:
        ValueError: if a mark cannot be understood, or names a column that the records do not have.
    """
    return MARKED.sub(lambda found: f"<!--{found['mark']}-->{_number(found['mark'], records)}<!--/-->", page)


def _number(mark: str, records: Mapping[str, RunRecord]) -> str:
    asked = MARK.fullmatch(mark)
    if asked is None or asked["how"] not in {*OF_ONE, *OVER_ALL}:
        ways = ", ".join([*OF_ONE, *OVER_ALL])
        raise ValueError(f"<!--{mark}-->: expected 'HOW RECORD COLUMN DIGITS', HOW one of {ways}")
    chosen = [record for name, record in records.items() if fnmatchcase(name, asked["runs"])]
    if not chosen:
        return "(not run)"
    take = OF_ONE.get(asked["how"], OF_ONE["last"])
    numbers = [take(*_column(record, asked, mark)) for record in chosen]
    if asked["how"] in OVER_ALL:
        numbers = [OVER_ALL[asked["how"]](numbers)]
    return ", ".join(format(number, asked["digits"]) for number in numbers)


def _column(record: RunRecord, asked: re.Match[str], mark: str) -> tuple[Column, Column]:
    """Epochs and values, of the epochs that are asked for."""
    epochs, values = record.column("epoch"), record.column(asked["column"])
    if asked["first"] is not None:
        inside = (epochs >= int(asked["first"])) & (epochs <= int(asked["last"]))
        epochs, values = epochs[inside], values[inside]
    if not np.isfinite(values).any():
        raise ValueError(f"<!--{mark}-->: {record.directory} has no number in that column and those epochs")
    return epochs, values
