"""What is run to check the paper, in the order in which it is run. Data only.

An entry's name is its directory below results/paper. All runs use one thread, so that two cores work on two of them;
minutes are minutes of the processor, so that they mean the same while the machine does something else.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shf.lab.configure import Request
from shf.lab.experiments import find
from shf.lab.runconfig import Pretraining

SHORT_SEARCH, LONG_SEARCH = 1.5, 4.0
"""Minutes for all trials of a search."""
EPOCHS_ONLY = 10**9
"""Rows of iterations are left out of these records: thousands of epochs, and the figures show epochs."""
CPU = "processor"
"""The clock of runs on a machine that does something else too."""


@dataclass(frozen=True)
class Run:
    """One run of the queue."""

    name: str
    request: Request


@dataclass(frozen=True)
class Tuning:
    """A search for a method's settings; the runs that come after it use what it finds.

    Attributes:
        experiment: its name.
        method: its name.
        minutes: for all trials, by successive halving; or
        steps: of each trial, which then all train in full, and
        grid: the settings they try, in place of the method's own grid.
        options: of the experiment, for all trials.
    """

    experiment: str
    method: str
    minutes: float = 0.0
    steps: int | None = None
    grid: Mapping[str, tuple[float, ...]] | None = None
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"tune {self.experiment} {self.method}"


def _fitted(experiment: str, method: str, epochs: int, updates: int, rates: tuple[float, ...], *options: str) -> Tuning:
    """A search for dropout SGD's rate in runs of so many epochs, the paper's schedules fitted to these: the rate falls by
    as much as in 1000 epochs at 0.998, the momentum rises for half of the run.

    Args:
        experiment: its name.
        method: its name.
        epochs: of a trial, and of the runs that follow.
        updates: of an epoch, on the rows that are not held out.
        rates: that are tried.
        options: of the experiment.
    """
    schedule = {"rate_decay": (round(0.998 ** (1000 / epochs), 3),), "momentum_epochs": (epochs // 2,)}
    grid = {"learning_rate": rates, **schedule}
    return Tuning(experiment, method, steps=epochs * updates, grid=grid, options=options)


def _run(name: str, experiment: str, method: str = "shf", *options: str, **rest: Any) -> Run:
    """A run with these options and the `rest` of a request; its minutes, if that is its limit, are the processor's."""
    how = {"rows_every": EPOCHS_ONLY, "threads": 1, "clock": "wall" if rest.get("minutes") is None else CPU, **rest}
    return Run(name, Request(experiment, method, options=options, **how))


NORMALISED = "initialisation=normalised"
RELEASED_WEIGHTS = (NORMALISED, "max_norm=fan-in")
"""What these runs take from the author's program where it departs from the paper's text: its initial weights, and a bound on
the weights' norms. Not its backtracking, which stops at the first worse iterate, nor its products without masks."""
DECAY = "update_decay=0.998"
"""β falls by 0.2 % an epoch, as in the author's program; the paper leaves open whether it does without dropout."""

WHY = {
    "first-worse": "backtracking=first-worse",
    "reshuffle": "reshuffle=true",
    "curvature-200": "curvature_batch=200",
    "quarter": "initialisation_scale=0.25",
}
"""What may explain the difference to the paper's test error on USPS: one thing changed in each, on the second split."""


def _usps() -> Iterator[Run | Tuning]:
    dropout, plain = "usps-classifier-dropout", "usps-classifier"
    for split in range(1, 6):
        yield _run(f"usps/dropout-released-weights-split{split}", dropout, "shf", *RELEASED_WEIGHTS, split=split)
    for split in (1, 2):  # what chance does to the same split
        name = f"usps/dropout-released-weights-split{split}-seed1"
        yield _run(name, dropout, "shf", *RELEASED_WEIGHTS, split=split, seed=1)
    yield _run("usps/plain-released-weights-split1", plain, "shf", *RELEASED_WEIGHTS, split=1)
    decaying = (*RELEASED_WEIGHTS, DECAY)
    yield _run("usps/plain-released-weights-decay-split1", plain, "shf", *decaying, split=1, epochs=250, clock=CPU)
    for method in ("dropout-sgd-last", "dropout-sgd-all"):
        yield _run(f"usps/{method}-split1", dropout, method, split=1, untuned=True)
        yield _fitted(dropout, method, 300, 67, (10.0, 3.0, 1.0, 0.3), NORMALISED)
        for split in range(1, 6):
            name = f"usps/{method}-tuned-split{split}"
            yield _run(name, dropout, method, NORMALISED, split=split, epochs=300, clock=CPU)
    for name, option in WHY.items():
        where = f"usps/dropout-released-weights-{name}-split2"
        yield _run(where, dropout, "shf", *RELEASED_WEIGHTS, option, split=2, clock=CPU)
    yield _run("usps/dropout-split1", dropout, split=1)


REUTERS_RATES = ("100.0", "10.0", "3.0", "1.0", "0.3", "0.1")
"""Dropout SGD's rates beside the chosen one: held-out documents hardly tell them apart, and choose for the test error where
the claim is about training."""


def _reuters() -> Iterator[Run | Tuning]:
    plain, dropout = "reuters-classifier", "reuters-classifier-dropout"
    yield _run("reuters/plain", plain)
    yield _run("reuters/plain-decay", plain, "shf", DECAY, clock=CPU)
    yield _run("reuters/dropout", dropout)
    yield _run("reuters/dropout-sgd-last", dropout, "dropout-sgd-last", untuned=True)
    yield _fitted(dropout, "dropout-sgd-last", 150, 50, (30.0, 10.0, 3.0, 1.0))
    yield _run("reuters/dropout-sgd-last-tuned", dropout, "dropout-sgd-last", epochs=150, clock=CPU)
    schedule = ("rate_decay=0.987", "momentum_epochs=75")
    for rate in REUTERS_RATES:
        options = (f"learning_rate={rate}", *schedule)
        name = f"reuters/dropout-sgd-last-rate-{rate}"
        yield _run(name, dropout, "dropout-sgd-last", *options, epochs=150, untuned=True, clock=CPU)
    yield _run("reuters/plain-damping-0.01", plain, "shf", "damping=0.01")
    yield _run("reuters/dropout-damping-0.01", dropout, "shf", "damping=0.01")


def _mnist() -> Iterator[Run | Tuning]:
    """Dropout SGD with the paper's rate, which is too large here; with rates of a short search, for twenty minutes; and
    from the same weights as SHF, tuned for as many epochs."""
    plain, dropout = "mnist-classifier", "mnist-classifier-dropout"
    yield _run("mnist/dropout-released-weights", dropout, "shf", *RELEASED_WEIGHTS, clock=CPU)
    yield _run("mnist/plain-released-weights-decay", plain, "shf", *RELEASED_WEIGHTS, DECAY, clock=CPU)
    yield _run("mnist/plain-released-weights", plain, "shf", *RELEASED_WEIGHTS, minutes=40)
    for method, rate in {"dropout-sgd-last": 0.3, "dropout-sgd-all": 1.0}.items():
        yield _run(f"mnist/{method}", dropout, method, minutes=4, untuned=True)
        yield _run(f"mnist/{method}-tuned", dropout, method, f"learning_rate={rate}", minutes=20, untuned=True)
        yield _fitted(dropout, method, 500, 500, (3.0, 1.0, 0.3), NORMALISED)
        yield _run(f"mnist/{method}-500", dropout, method, NORMALISED, epochs=500, clock=CPU)


AUTOENCODER_MINUTES = 20.0
FIRST_ORDER = {
    "nag": LONG_SEARCH,
    "momentum-0.99": SHORT_SEARCH,
    "momentum-0.9": SHORT_SEARCH,
    "sgd": SHORT_SEARCH,
    "sgd-vi": LONG_SEARCH,
}
"""Table 1's first-order methods, and the minutes of their searches: NAG has two settings, and SGD-VI is slow to show
anything."""


def _timed(name: str, experiment: str, method: str, *options: str) -> Run:
    """A row for every 25 seconds too, because an epoch of HF takes longer."""
    return _run(name, experiment, method, *options, minutes=AUTOENCODER_MINUTES, evaluate_seconds=25)


def _opponents(experiment: str) -> Iterator[Run | Tuning]:
    """Table 1's methods but SHF, for equal time."""
    for method, minutes in FIRST_ORDER.items():
        yield Tuning(experiment, method, minutes)
        yield _timed(f"{experiment}/{method}", experiment, method)
    yield _timed(f"{experiment}/hf", experiment, "hf")


CURVES_UPDATES = 25_000
"""250 epochs of 100 batches: what the paper's schedules of momentum are fitted to, its reduction at the end included."""
CURVES_GRIDS: Mapping[str, Mapping[str, tuple[float, ...]]] = {
    "nag": {"learning_rate": (0.03, 0.01, 0.003), "max_momentum": (0.99, 0.999)},
    "momentum-0.99": {"learning_rate": (0.03, 0.01, 0.003)},
    "momentum-0.9": {"learning_rate": (0.1, 0.03, 0.01)},
    "sgd": {"learning_rate": (0.3, 0.1, 0.03)},
    "sgd-vi": {"learning_rate": (0.3, 0.1, 0.03)},
}


def _curves() -> Iterator[Run | Tuning]:
    """All methods for the experiment's epochs; SHF last: with γ shut off when training diverges, and with γ left on."""
    experiment = "curves-autoencoder"
    check = "learning_rate=0.001"  # whether training and test errors fall together
    yield _run(f"{experiment}/adam", experiment, "adam", check, epochs=100, untuned=True, clock=CPU)
    for method, grid in CURVES_GRIDS.items():
        with_end = "momentum" in method or method == "nag"
        trial = CURVES_UPDATES * 5 // 6  # on the rows that are not held out
        ends = {"total_updates": (trial,)} if with_end else {}
        yield Tuning(experiment, method, steps=trial, grid={**grid, **ends})
        options = (f"total_updates={CURVES_UPDATES}",) if with_end else ()
        yield _run(f"{experiment}/{method}", experiment, method, *options, clock=CPU)
    yield _run(f"{experiment}/hf", experiment, "hf", evaluate_seconds=25, clock=CPU)
    small = ("gradient_batch=1000", "curvature_batch=100", "cg_iterations=5")
    yield _run(f"{experiment}/shf-small-batches", experiment, "shf", *small, clock=CPU)
    yield _run(f"{experiment}/shf", experiment, clock=CPU)
    stays = "momentum_off_on_divergence=false"
    yield _run(f"{experiment}/shf-momentum-stays", experiment, "shf", stays, clock=CPU)


def _mnist_pixels() -> Iterator[Run | Tuning]:
    """SHF for equal time too: its 100 epochs would take a core days."""
    yield from _opponents("mnist-autoencoder")
    yield _timed("mnist-autoencoder/shf", "mnist-autoencoder", "shf")


@dataclass(frozen=True)
class Ablated:
    """What ablations start from: an experiment at its own settings but for `start`, and its length."""

    name: str
    experiment: str
    epochs: int
    curvature: tuple[int, ...]
    start: tuple[str, ...] = ()
    split: int | None = None

    def changed(self, name: str, *options: str, method: str = "shf", pretraining: Pretraining | None = None) -> Run:
        start = [option for option in self.start if method == "shf" or option.startswith("initialisation")]
        limits = {"epochs": self.epochs, "split": self.split, "pretraining": pretraining}
        return _run(f"ablations/{self.name}-{name}", self.experiment, method, *start, *options, **limits)

    def entries(self) -> Iterator[Run | Tuning]:
        """One thing changed in each."""
        yield self.changed("reference")
        for zeta in sorted({1, 3, 5, 10, 25} - {find(self.experiment).settings["cg_iterations"]}):
            yield self.changed(f"cg-{zeta}", f"cg_iterations={zeta}")
        yield self.changed("no-preconditioner", "preconditioner=null")
        yield self.changed("jacobi", "preconditioner=jacobi")
        for rows in self.curvature:
            yield self.changed(f"curvature-{rows}", f"curvature_batch={rows}")
        most, off = max(self.curvature), "momentum_off_on_divergence=true"
        yield self.changed(f"curvature-{most}-off", f"curvature_batch={most}", off)
        for gamma in ("0", "0.5", "0.99"):
            yield self.changed(f"momentum-{gamma}", f"cg_decay={gamma}", "cg_decay_growth=1")
        yield self.changed("momentum-0.5-grows", "cg_decay=0.5")
        yield self.changed("momentum-0.99-off", "cg_decay=0.99", "cg_decay_growth=1", off)
        yield self.changed("hard-damping", f"damping_factor={2 / 3}")
        yield self.changed("pretrained", pretraining=Pretraining("denoising"))
        yield self.changed("vsgd", method="vsgd")
        yield Tuning(self.experiment, "adagrad", SHORT_SEARCH)
        yield self.changed("adagrad", method="adagrad")


ABLATED = (
    Ablated("usps", "usps-classifier-dropout", 50, (25, 250, 1000), RELEASED_WEIGHTS, split=1),
    Ablated("curves", "curves-demo", 60, (25, 250, 800)),
)

ENTRIES: tuple[Run | Tuning, ...] = (
    *_usps(),
    *_reuters(),
    *(entry for ablated in ABLATED for entry in ablated.entries()),
    *_mnist(),
    *_curves(),
    *_mnist_pixels(),
)
