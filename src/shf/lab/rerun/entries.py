"""What is run to check the paper, in the order in which it is run. Data only.

An entry's name is its directory below results/paper. All runs use one thread, so that two cores work on two of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shf.lab.configure import Request
from shf.lab.runconfig import Pretraining

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
    clock: str = "wall"

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
    pretraining: Pretraining | None = None,
) -> Run:
    return Run(
        name,
        Request(
            experiment,
            method,
            epochs=epochs,
            minutes=minutes,
            split=split,
            options=options,
            pretraining=pretraining,
            rows_every=EPOCHS_ONLY,
            threads=1,
        ),
    )


AS_RELEASED = ("initialisation=normalised", "max_norm=fan-in")
"""Where the author's program departs from the paper's text: its initial weights, and a bound on the weights' norms."""


def _usps() -> Iterator[Run]:
    dropout, plain = "usps-classifier-dropout", "usps-classifier"
    for split in range(1, 6):
        yield _run(f"usps/dropout-as-released-split{split}", dropout, "shf", *AS_RELEASED, split=split)
    yield _run("usps/plain-as-released-split1", plain, "shf", *AS_RELEASED, split=1)
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


def _mnist() -> Iterator[Run]:
    plain, dropout = "mnist-classifier", "mnist-classifier-dropout"
    yield _run("mnist/dropout-as-released", dropout, "shf", *AS_RELEASED)
    yield _run("mnist/dropout-sgd-last", dropout, "dropout-sgd-last", minutes=30)
    yield _run("mnist/dropout-sgd-all", dropout, "dropout-sgd-all", minutes=30)
    yield _run("mnist/plain", plain, minutes=60)


def _autoencoder(experiment: str, minutes: float, tuning: float) -> Iterator[Run | Tuning]:
    yield _run(f"{experiment}/shf", experiment, minutes=minutes)
    yield _run(f"{experiment}/hf", experiment, "hf", minutes=minutes)
    for method in ("nag", "momentum-0.99", "momentum-0.9", "sgd", "sgd-vi"):
        yield Tuning(experiment, method, tuning)
        yield _run(f"{experiment}/{method}", experiment, method, minutes=minutes)


def _momentum_and_small_batches() -> Iterator[Run]:
    experiment = "curves-autoencoder"
    yield _run("curves-autoencoder/shf-long", experiment)
    yield _run("curves-autoencoder/shf-momentum-stays", experiment, "shf", "momentum_off_on_divergence=false")
    small = ("gradient_batch=1000", "curvature_batch=100", "cg_iterations=5")
    yield _run("curves-autoencoder/shf-small-batches", experiment, "shf", *small, minutes=30)


USPS_ABLATION_EPOCHS = 100


def _ablations() -> Iterator[Run | Tuning]:
    """On USPS' first split, with dropout, a tenth of the paper's epochs; one thing changed in each."""
    experiment, settings = "usps-classifier-dropout", {"epochs": USPS_ABLATION_EPOCHS, "split": 1}

    def changed(name: str, *options: str, method: str = "shf", pretraining: Pretraining | None = None) -> Run:
        start = AS_RELEASED if method == "shf" else AS_RELEASED[:1]
        name = f"ablations/usps-{name}"
        return _run(name, experiment, method, *start, *options, pretraining=pretraining, **settings)

    yield changed("reference")
    for zeta in (1, 5, 10, 25):
        yield changed(f"cg-{zeta}", f"cg_iterations={zeta}")
    yield changed("no-preconditioner", "preconditioner=null")
    yield changed("jacobi", "preconditioner=jacobi")
    for rows in (25, 250, 1000):
        yield changed(f"curvature-{rows}", f"curvature_batch={rows}")
    for gamma in ("0", "0.5", "0.99"):
        yield changed(f"momentum-{gamma}", f"cg_decay={gamma}", "cg_decay_growth=1")
    yield changed("hard-damping", f"damping_factor={2 / 3}")
    yield changed("pretrained", pretraining=Pretraining("denoising"))
    yield changed("vsgd", method="vsgd")
    yield Tuning(experiment, "adagrad", 2)
    yield changed("adagrad", method="adagrad")


ENTRIES: tuple[Run | Tuning, ...] = (
    *_usps(),
    *_reuters(),
    *_ablations(),
    *_mnist(),
    *_momentum_and_small_batches(),
    *_autoencoder("curves-autoencoder", minutes=25, tuning=5),
    *_autoencoder("mnist-autoencoder", minutes=20, tuning=5),
)
