"""What is run to check the paper, in the order in which it is run. Data only.

An entry's name is its directory below results/paper. All runs use one thread, so that two cores work on two of them;
minutes are minutes of the processor, so that they mean the same while the machine does something else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shf.lab.configure import Request
from shf.lab.experiments import find
from shf.lab.runconfig import Pretraining

SHORT_SEARCH, LONG_SEARCH = 1.5, 4.0
"""Minutes for all trials of a search."""
EPOCHS_ONLY = 10**9
"""Rows of iterations are left out of these records: thousands of epochs, and the figures show epochs."""


@dataclass(frozen=True)
class Run:
    """One run of the queue."""

    name: str
    request: Request


@dataclass(frozen=True)
class Tuning:
    """A search for a method's settings; the runs that come after it use what it finds."""

    experiment: str
    method: str
    minutes: float

    @property
    def name(self) -> str:
        return f"tune {self.experiment} {self.method}"


def _run(
    name: str,
    experiment: str,
    method: str = "shf",
    *options: str,
    epochs: int | None = None,
    minutes: float | None = None,
    split: int | None = None,
    seed: int = 0,
    pretraining: Pretraining | None = None,
    evaluate_seconds: float | None = None,
    untuned: bool = False,
) -> Run:
    return Run(
        name,
        Request(
            experiment,
            method,
            epochs=epochs,
            minutes=minutes,
            split=split,
            seed=seed,
            options=options,
            pretraining=pretraining,
            rows_every=EPOCHS_ONLY,
            threads=1,
            clock="wall" if minutes is None else "processor",
            evaluate_seconds=evaluate_seconds,
            untuned=untuned,
        ),
    )


RELEASED_WEIGHTS = ("initialisation=normalised", "max_norm=fan-in")
"""Where the author's program departs from the paper's text: its initial weights, and a bound on the weights' norms."""


def _usps() -> Iterator[Run]:
    dropout, plain = "usps-classifier-dropout", "usps-classifier"
    for split in range(1, 6):
        yield _run(f"usps/dropout-released-weights-split{split}", dropout, "shf", *RELEASED_WEIGHTS, split=split)
    for split in (1, 2):  # what chance does to the same split
        yield _run(f"usps/dropout-released-weights-split{split}-seed1", dropout, "shf", *RELEASED_WEIGHTS, split=split, seed=1)
    yield _run("usps/plain-released-weights-split1", plain, "shf", *RELEASED_WEIGHTS, split=1)
    yield _run("usps/dropout-sgd-last-split1", dropout, "dropout-sgd-last", split=1)
    yield _run("usps/dropout-sgd-all-split1", dropout, "dropout-sgd-all", split=1)
    yield _run("usps/dropout-split1", dropout, split=1)
    yield _run("usps/plain-split1", plain, split=1)
    yield _run("usps/dropout-quarter-split1", dropout, "shf", "initialisation_scale=0.25", split=1)


def _reuters() -> Iterator[Run]:
    plain, dropout = "reuters-classifier", "reuters-classifier-dropout"
    yield _run("reuters/plain", plain)
    yield _run("reuters/dropout", dropout)
    yield _run("reuters/dropout-sgd-last", dropout, "dropout-sgd-last")
    for damping in ("0.1", "0.01"):
        yield _run(f"reuters/plain-damping-{damping}", plain, "shf", f"damping={damping}")
        yield _run(f"reuters/dropout-damping-{damping}", dropout, "shf", f"damping={damping}")


def _mnist() -> Iterator[Run | Tuning]:
    """Dropout SGD with the paper's rate, which is too large here, and with one that was searched."""
    plain, dropout = "mnist-classifier", "mnist-classifier-dropout"
    yield _run("mnist/dropout-released-weights", dropout, "shf", *RELEASED_WEIGHTS)
    for method in ("dropout-sgd-last", "dropout-sgd-all"):
        yield _run(f"mnist/{method}", dropout, method, minutes=4, untuned=True)
        yield Tuning(dropout, method, LONG_SEARCH)
        yield _run(f"mnist/{method}-tuned", dropout, method, minutes=20)
    yield _run("mnist/plain-released-weights", plain, "shf", *RELEASED_WEIGHTS, minutes=40)


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


def _curves() -> Iterator[Run | Tuning]:
    """And small batches; and, hours each, what it is worth to set γ to 0 when training diverges."""
    experiment = "curves-autoencoder"
    yield from _opponents(experiment)
    small = ("gradient_batch=1000", "curvature_batch=100", "cg_iterations=5")
    yield _timed(f"{experiment}/shf-small-batches", experiment, "shf", *small)
    yield _run(f"{experiment}/shf", experiment)
    yield _run(f"{experiment}/shf-momentum-stays", experiment, "shf", "momentum_off_on_divergence=false")


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
        ours = method == "shf"
        start = tuple(option for option in self.start if ours or option.startswith("initialisation"))
        return _run(
            f"ablations/{self.name}-{name}",
            self.experiment,
            method,
            *start,
            *options,
            epochs=self.epochs,
            split=self.split,
            pretraining=pretraining,
        )

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
