"""The page's figures in the paper's form: which records each shows. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shf.lab.plots import Chart, Series
from shf.lab.rerun.judges import Records

TABLE_ONE = {
    "nag": "NAG",
    "momentum-0.99": "M(0.99)",
    "momentum-0.9": "M(0.9)",
    "sgd": "SGD",
    "sgd-vi": "SGD-VI",
    "hf": "HF",
    "shf": "SHF",
}
"""Table 1's methods in its order: our names, and the paper's."""


@dataclass(frozen=True)
class FigureOf:
    """A figure in the paper's form: one column of several records against another."""

    name: str
    part: str
    title: str
    column: str
    runs: Mapping[str, str]
    against: str = "epoch"
    log_x: bool = False
    dashed: str | None = None

    def chart(self, records: Records) -> Chart | None:
        """None as long as none of its records is there."""
        series: list[Series] = []
        for colour, (name, label) in enumerate(self.runs.items()):
            record = records.get(name)
            if record is None:
                continue
            x = record.column(self.against)
            if self.dashed is not None:
                series.append(Series("", x, record.column(self.dashed), colour, dashed=True))
            series.append(Series(label, x, record.column(self.column), colour))
        labels = {"epoch": "epochs", "elapsed_seconds": "seconds of training"}
        x_label = labels[self.against]
        return Chart(self.name, self.title, x_label, tuple(series), log_y=True, log_x=self.log_x) if series else None


_USPS_LAMBDA = {
    "usps/dropout-released-weights-split1": "with dropout",
    "usps/plain-released-weights-decay-split1": "without dropout, β decaying",
    "usps/plain-released-weights-split1": "without dropout, β = 1",
}
_USPS = {
    "usps/dropout-released-weights-split1": "dropout SHF",
    "usps/plain-released-weights-decay-split1": "SHF, β decaying",
    "usps/plain-released-weights-split1": "SHF, β = 1",
    "usps/dropout-sgd-last-tuned-split1": "dropout SGD, last, tuned",
    "usps/dropout-sgd-all-tuned-split1": "dropout SGD, all, tuned",
}
_REUTERS = {
    "reuters/plain-decay": "SHF, β decaying",
    "reuters/plain": "SHF, β = 1",
    "reuters/dropout": "dropout SHF",
    "reuters/dropout-sgd-last-tuned": "dropout SGD, tuned",
    "reuters/dropout-sgd-last": "dropout SGD, the paper's rate",
}
_MNIST = {
    "mnist/dropout-released-weights": "dropout SHF",
    "mnist/plain-released-weights": "SHF",
    "mnist/dropout-sgd-last-tuned": "dropout SGD, last",
    "mnist/dropout-sgd-all-tuned": "dropout SGD, all",
}
_MNIST_LAMBDA = {"mnist/dropout-released-weights": "with dropout", "mnist/plain-released-weights": "without dropout"}


_CURVES_MOMENTUM = {
    "curves-autoencoder/shf": "SHF, γ set to 0 when training diverges",
    "curves-autoencoder/shf-momentum-stays": "SHF, γ left on",
}


def _of(experiment: str) -> dict[str, str]:
    return {f"{experiment}/{method}": label for method, label in reversed(TABLE_ONE.items())}


FIGURE_LIST: tuple[FigureOf, ...] = (
    FigureOf("usps-damping", "classification", "damping λ, USPS", "damping", _USPS_LAMBDA),
    FigureOf(
        "usps-error",
        "classification",
        "USPS: test error, % (dashed: training)",
        "test_error_percent",
        _USPS,
        dashed="train_error_percent",
    ),
    FigureOf(
        "reuters-error",
        "classification",
        "Reuters: training error, % (dashed: test)",
        "train_error_percent",
        _REUTERS,
        dashed="test_error_percent",
    ),
    FigureOf("mnist-damping", "classification", "damping λ, MNIST", "damping", _MNIST_LAMBDA),
    FigureOf(
        "mnist-error",
        "classification",
        "MNIST: test errors (dashed: training)",
        "test_errors",
        _MNIST,
        dashed="train_errors",
    ),
    FigureOf(
        "curves",
        "autoencoders",
        "CURVES: training error ‖x-x̂‖² per case",
        "train_squared_error",
        _of("curves-autoencoder"),
        "elapsed_seconds",
        log_x=True,
    ),
    FigureOf(
        "curves-epochs",
        "autoencoders",
        "CURVES: training error ‖x-x̂‖² per case, as in the paper's Figure 3",
        "train_squared_error",
        _of("curves-autoencoder"),
    ),
    FigureOf(
        "curves-momentum",
        "autoencoders",
        "CURVES at the paper's settings: training error ‖x-x̂‖² per case",
        "train_squared_error",
        _CURVES_MOMENTUM,
    ),
    FigureOf(
        "mnist-pixels",
        "autoencoders",
        "MNIST: training error ‖x-x̂‖² per case",
        "train_squared_error",
        _of("mnist-autoencoder"),
        "elapsed_seconds",
    ),
    FigureOf(
        "mnist-pixels-epochs",
        "autoencoders",
        "MNIST: training error ‖x-x̂‖² per case, as in the paper's Figure 3",
        "train_squared_error",
        _of("mnist-autoencoder"),
    ),
)
