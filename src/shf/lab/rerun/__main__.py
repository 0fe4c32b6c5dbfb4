"""`python -m shf.lab.rerun`: the commands behind `make results` and `make results-continue`."""

from pathlib import Path
from typing import Annotated

import typer

from shf.lab.commands import Commands
from shf.lab.experiments import ExperimentError

app = typer.Typer(
    cls=Commands, help="The paper's experiments, rerun.", no_args_is_help=True, pretty_exceptions_enable=False
)

Root = Annotated[Path, typer.Option(help="Where the records are.")]
RESULTS = Path("results") / "paper"


@app.command("continue")
def go_on(
    only: Annotated[list[str] | None, typer.Argument(help="Beginnings of entries' names; by default all.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Begin no entry after so many minutes.")] = None,
    root: Root = RESULTS,
    data_dir: Annotated[Path | None, typer.Option(help="Where the data are.")] = None,
) -> None:
    """Take the queue up where it was, and say what stays undecided. Ctrl-C saves."""
    from rich.console import Console

    from shf.lab.progress import show
    from shf.lab.rerun.entries import ENTRIES
    from shf.lab.rerun.page import open_claims
    from shf.lab.rerun.queue import lacking_checkpoints, work

    chosen = [entry for entry in ENTRIES if not only or entry.name.startswith(tuple(only))]
    if not chosen:
        raise ExperimentError(f"no entry of the queue begins with {' or '.join(only or ())}")
    console = Console(stderr=True)
    done = work(chosen, root, minutes=minutes, data_dir=data_dir, observer=show(console), say=console.print)
    for name in lacking_checkpoints(chosen, root):
        console.print(f"{name} cannot go on here: this machine has its record and not its checkpoints")
    for words in open_claims(root):
        console.print(f"not decided: {words}")
    raise typer.Exit(0 if done else 1)


@app.command()
def draw(root: Root = RESULTS, docs: Annotated[Path, typer.Option(help="Where the page is.")] = Path("docs")) -> None:
    """Make the page's tables and figures anew from the records."""
    from shf.lab.rerun.page import write_page

    for path in write_page(root, docs):
        typer.echo(path)


if __name__ == "__main__":
    app()
