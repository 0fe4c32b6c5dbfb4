"""The file of tuned settings: what was chosen for which method on which experiment, and by what search. No torch here.

The package carries one; a user's own file comes before it. Both hold ``{experiment: {method: choice}}``.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any

import filelock
import platformdirs

from shf.lab.files import read_at_most, write_atomically

VARIABLE = "SHF_TUNED"
_MOST_BYTES = 1 << 26

Choices = dict[str, dict[str, "Choice"]]


class ChoicesError(ValueError):
    """A file of tuned settings that cannot be read."""


@dataclass(frozen=True)
class Trial:
    """One combination of settings and how it fared.

    Attributes:
        settings: of the method.
        input_dropout: None where the experiment's own was kept.
        scores: on the held-out rows after each rung that it took part in; None for a number that was not finite.
        iterations: steps it was given in all.
        seconds: that they took, by the budget's clock.
    """

    settings: Mapping[str, Any]
    input_dropout: float | None
    scores: tuple[float | None, ...]
    iterations: int
    seconds: float


@dataclass(frozen=True)
class Choice:
    """The outcome of a search.

    Attributes:
        experiment: its name.
        method: its name.
        settings: what was chosen from the method's grid.
        input_dropout: the chosen amount; None where it was not searched.
        score: on the held-out rows, at the end of the search; smaller is better.
        metric: what the score is.
        budget: of the whole search, {"seconds": …}, {"processor_seconds": …} or {"iterations": …}, equal for all methods
            that are compared.
        held_out: rows that scored the trials; taken from the training part, never from the test set.
        seed: of initial weights, batches and the choice of held-out rows.
        edge: settings whose chosen value is the first or last of its grid: a wider grid might do better.
        trials: all of them.
    """

    experiment: str
    method: str
    settings: Mapping[str, Any]
    input_dropout: float | None
    score: float
    metric: str
    budget: Mapping[str, float]
    held_out: int
    seed: int
    edge: tuple[str, ...] = ()
    trials: tuple[Trial, ...] = field(default=(), repr=False)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Choice":
        names = {f.name for f in fields(cls)}
        if not isinstance(record, Mapping) or set(record) != names:
            found = sorted(record) if isinstance(record, Mapping) else type(record).__name__
            raise ChoicesError(f"a choice must have the fields {sorted(names)}, found {found}")
        if not isinstance(record["settings"], Mapping):
            raise ChoicesError(f"the settings of a choice must be an object, found {record['settings']!r}")
        trials = tuple(Trial(**{**trial, "scores": tuple(trial["scores"])}) for trial in record["trials"])
        return cls(**{**record, "edge": tuple(record["edge"]), "trials": trials})


def user_file() -> Path:
    """Where a user's own choices are: the environment variable SHF_TUNED, or ``tuned.json`` in the user's settings."""
    given = os.environ.get(VARIABLE)
    return Path(given).expanduser() if given else platformdirs.user_config_path("shf") / "tuned.json"


def read_choices(path: Path) -> Choices:
    """The choices in a file; none where there is no file.

    Raises:
        ChoicesError: if the file is not one of tuned settings.
    """
    if not path.exists():
        return {}
    try:
        return _parse(read_at_most(path, _MOST_BYTES).decode(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ChoicesError(f"{path} cannot be read as a file of tuned settings ({error})") from error


def packaged_choices() -> Choices:
    """The choices that come with the package."""
    file = resources.files("shf.lab").joinpath("tuned.json")
    return _parse(file.read_text(encoding="utf-8"), "tuned.json of the package")


def find_choice(experiment: str, method: str, path: Path | None = None) -> Choice | None:
    """The tuned settings of a method on an experiment: the user's (from `path` or `user_file`), else the package's.

    Raises:
        ChoicesError: if the user's file is not one of tuned settings, or the one that SHF_TUNED names is not there: the
            package's choice in its place would be called tuned as well.
    """
    if path is None and os.environ.get(VARIABLE) and not user_file().exists():
        raise ChoicesError(
            f"{VARIABLE}={os.environ[VARIABLE]}: there is no such file; let `shf tune` write it, unset the variable for the "
            "package's own choices, or run --untuned"
        )
    for choices in (read_choices(path or user_file()), packaged_choices()):
        if (found := choices.get(experiment, {}).get(method)) is not None:
            return found
    return None


def write_choice(choice: Choice, path: Path | None = None) -> Path:
    """Puts a choice into a file, in place of an older one for the same experiment and method; returns the file.

    Written atomically and under a lock: searches that end at the same time do not lose each other's choices.
    """
    path = path or user_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(f"{path}.lock", timeout=60):
        choices = read_choices(path)
        choices.setdefault(choice.experiment, {})[choice.method] = choice
        content = {e: {m: c.to_json() for m, c in sorted(of.items())} for e, of in sorted(choices.items())}
        write_atomically(path, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())
    return path


def _parse(text: str, origin: str) -> Choices:
    try:
        content = json.loads(text)
        return {e: {m: Choice.from_json(record) for m, record in of.items()} for e, of in content.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ChoicesError(
            f"{origin} is not a file of tuned settings ({error}); move it away, or tune again with another file"
        ) from error
