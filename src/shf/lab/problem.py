"""From the description of an experiment to something that can be trained: data, network, loss."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shf.lab.baselines.protocol import Loss
from shf.lab.data import Dataset, load
from shf.lab.data.sources import Notify, quiet
from shf.lab.evaluation import evaluate, samples
from shf.lab.experiments import Experiment, Task
from shf.lab.initialisation import initialise_
from shf.lab.models import autoencoder, classifier, regressor
from shf.losses import per_case


@dataclass(frozen=True)
class Problem:
    """An experiment with its data, a freshly initialised network and the loss that is minimised."""

    experiment: Experiment
    data: Dataset
    model: nn.Sequential
    loss: Loss
    data_dir: Path | None = None
    split: int = 1

    def evaluate(self) -> dict[str, float]:
        """``train_…`` and ``test_…`` loss and errors of the network as it is now."""
        data, task = self.data, self.experiment.task
        cases = self.experiment.evaluation_cases
        train = evaluate(
            self.model, self.loss, task, data.train_inputs, data.train_targets, cases=cases, unit=data.unit
        )
        test = evaluate(self.model, self.loss, task, data.test_inputs, data.test_targets, cases=cases, unit=data.unit)
        return {f"train_{k}": v for k, v in train.items()} | {f"test_{k}": v for k, v in test.items()}

    def samples(self) -> dict[str, Any]:
        """Images for the report (see `shf.lab.evaluation.samples`)."""
        if self.data.image_shape is None and self.data.whole is None:
            return {}
        return samples(self.model, self.experiment.task, self.data, self._test_pixels())

    def _test_pixels(self) -> Tensor:
        if self.experiment.task is not Task.CLASSIFIER:
            return self.data.test_inputs
        raw = load_data(self.experiment, data_dir=self.data_dir, split=self.split, standardise=False).test_inputs
        return raw / raw.max().clamp_min(1e-12)


def build(
    experiment: Experiment,
    *,
    seed: int = 0,
    split: int = 1,
    data_dir: Path | None = None,
    dropout_layers: str = "last",
    progress: Notify = quiet,
) -> Problem:
    """The problem of an experiment, initialised from `seed`. The data do not depend on the seed."""
    data = load_data(experiment, data_dir=data_dir, split=split, progress=progress)
    model = build_model(experiment, seed=seed, dropout_layers=dropout_layers)
    return Problem(experiment, data, model, build_loss(experiment), data_dir, split)


def load_data(experiment: Experiment, *, data_dir: Path | None = None, split: int = 1, **options: Any) -> Dataset:
    options = {**experiment.data_options, **options}
    if experiment.data == "usps":
        options["split"] = split
    return load(experiment.data, data_dir=data_dir, **options)


def build_model(experiment: Experiment, *, seed: int = 0, dropout_layers: str = "last") -> nn.Sequential:
    """The experiment's network with initial weights drawn from `seed`."""
    model: nn.Sequential
    if experiment.task is Task.AUTOENCODER:
        model = autoencoder(experiment.sizes)
    elif experiment.task is Task.REGRESSION:
        model = regressor(experiment.sizes)
    else:
        model = classifier(
            experiment.sizes,
            input_dropout=experiment.input_dropout,
            hidden_dropout=experiment.hidden_dropout,
            dropout=dropout_layers,
            sparse_input=experiment.data == "reuters",
        )
    initialise_(
        model,
        experiment.initialisation,
        generator=torch.Generator().manual_seed(seed),
        bias=experiment.bias,
        scale=experiment.initialisation_scale,
    )
    return model


def build_loss(experiment: Experiment) -> Loss:
    """Cross-entropy per case: of the softmax for classifiers; of the logistic outputs of autoencoders, summed over them.
    The squared error of a regression."""
    losses = {Task.CLASSIFIER: nn.CrossEntropyLoss(), Task.AUTOENCODER: per_case(nn.BCEWithLogitsLoss())}
    return losses.get(experiment.task, nn.MSELoss())
