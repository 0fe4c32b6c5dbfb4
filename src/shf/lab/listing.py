"""Tables for the terminal: experiments, optimizers, and the data on this machine."""

from collections.abc import Iterable, Mapping

from rich.table import Table
from rich.text import Text

from shf.lab.baselines.protocol import MethodSpec
from shf.lab.data import DataStatus
from shf.lab.experiments import Experiment
from shf.lab.words import duration


def experiments_table(experiments: Iterable[Experiment], seconds_per_epoch: Mapping[str, float]) -> Table:
    """The paper's setting and figure, and the time here: measured, or estimated for two cores (≈)."""
    table = _table("experiment", "what, the paper's setting and result", "time here")
    for experiment in experiments:
        measured = seconds_per_epoch.get(experiment.name)
        estimate = f"≈ {duration(60 * experiment.minutes)}"
        time = estimate if measured is None else duration(measured * experiment.epochs)
        what = "\n".join(filter(None, (experiment.summary, _setting(experiment), _paper(experiment))))
        table.add_row(*map(Text, (experiment.name, what, time)))
    return table


def _setting(experiment: Experiment) -> str:
    settings = experiment.settings
    return (
        f"λ {settings['damping']:g}, gradient {experiment.gradient_batch}, curvature {settings['curvature_batch']}, "
        f"ζ {settings['cg_iterations']}, {experiment.epochs} epochs"
    )


def _paper(experiment: Experiment) -> str:
    found = experiment.paper.get("shf")
    unit = {"test_errors": " errors", "test_error_percent": " %"}.get(experiment.metric, "")
    words = experiment.figure if found is None else f"{found:g}{unit} ({experiment.figure})"
    return f"the paper: {words}" if words else ""


def methods_table(methods: Iterable[MethodSpec]) -> Table:
    """What `--optimizer` takes, and which settings `shf tune` chooses."""
    table = _table("optimizer", "what it is", "tuned")
    for method in methods:
        table.add_row(*map(Text, (method.name, method.summary, ", ".join(method.grid) or "nothing")))
    return table


def data_table(statuses: Iterable[DataStatus]) -> Table:
    """Which data sets are here, how large, and where they are or would come from."""
    table = _table("data", "here", "size", "location or source")
    for status in statuses:
        here = "damaged" if status.problem else "yes" if status.present else "no"
        size = f"{status.bytes / 1e6:.1f} MB" if status.bytes else "–"
        words = f"{status.where} ({status.source})" if status.where else status.source
        table.add_row(*map(Text, (status.name, here, size, status.problem or words)))
    return table


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for number, heading in enumerate(headings):
        table.add_column(heading, overflow="fold", no_wrap=number == 0)  # the first column is what people copy
    return table
