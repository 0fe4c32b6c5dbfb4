"""The page's figures in the paper's form: which records each shows. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass

from shf.lab.figures import AXES, counterpart
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
    """A figure in the paper's form: one column of several records against another; dashed, what it is on the other part of
    the data."""

    name: str
    title: str
    column: str
    runs: Mapping[str, str]
    against: str = "epoch"
    log_x: bool = False
    dashed: bool = False

    def chart(self, records: Records) -> Chart | None:
        """None as long as none of its records is there."""
        series: list[Series] = []
        for colour, (name, label) in enumerate(self.runs.items()):
            if (record := records.get(name)) is None:
                continue
            x = record.column(self.against)
            if self.dashed:
                series.append(Series("", x, record.column(counterpart(self.column)), colour, dashed=True))
            series.append(Series(label, x, record.column(self.column), colour))
        x_label = AXES[self.against]
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


def _table_one(name: str, experiment: str, words: str, *, log_x: bool = False) -> tuple[FigureOf, FigureOf]:
    """Table 1's methods over time, and over epochs as in the paper's Figure 3."""
    runs = {f"{experiment}/{method}": label for method, label in reversed(TABLE_ONE.items())}
    title, column = f"{words}: training error ‖x-x̂‖² per case", "train_squared_error"
    return (
        FigureOf(name, title, column, runs, "elapsed_seconds", log_x=log_x),
        FigureOf(f"{name}-epochs", f"{title}, as in the paper's Figure 3", column, runs),
    )


_MOMENTUM_TITLE = "CURVES at the paper's settings: training error ‖x-x̂‖² per case"
FIGURE_LIST: Mapping[str, tuple[FigureOf, ...]] = {
    "classification": (
        FigureOf("usps-damping", "damping λ, USPS", "damping", _USPS_LAMBDA),
        FigureOf("usps-error", "USPS: test error, % (dashed: training)", "test_error_percent", _USPS, dashed=True),
        FigureOf(
            "reuters-error", "Reuters: training error, % (dashed: test)", "train_error_percent", _REUTERS, dashed=True
        ),
        FigureOf("mnist-damping", "damping λ, MNIST", "damping", _MNIST_LAMBDA),
        FigureOf("mnist-error", "MNIST: test errors (dashed: training)", "test_errors", _MNIST, dashed=True),
    ),
    "autoencoders": (
        *_table_one("curves", "curves-autoencoder", "CURVES", log_x=True),
        FigureOf("curves-momentum", _MOMENTUM_TITLE, "train_squared_error", _CURVES_MOMENTUM),
        *_table_one("mnist-pixels", "mnist-autoencoder", "MNIST"),
    ),
}
"""By the part of the page where they stand."""
