"""What a network is worth: errors of a classifier, reconstruction errors of an autoencoder, and examples to look at.

Autoencoder errors come in both units in use, always named: ``squared_error`` is ‖x-x̂‖² summed over pixels, mean over
cases (Martens); ``half_squared_error`` is half of it (the author's program). Evaluation leaves the network's mode and
all random generators as they were.
"""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shf.data.batches import select_rows
from shf.lab.baselines.protocol import Loss
from shf.lab.data import Dataset, terrain
from shf.lab.experiments import Task
from shf.lab.loop import evaluating

_CHUNK = 2000
_MOST_SAMPLES = 24


def evaluate(
    model: nn.Module,
    loss: Loss,
    task: Task,
    inputs: Tensor,
    targets: Tensor,
    *,
    cases: int | None = None,
    unit: float = 1.0,
) -> dict[str, float]:
    """Loss and errors over the first `cases` cases (all by default), computed in chunks.

    Returns:
        ``loss`` (mean per case, no weight decay) and, for a classifier, ``errors`` and ``error_percent``; for an
        autoencoder, ``squared_error`` and ``half_squared_error``; for a regression, ``rms_error``, in which 1 of the
        targets is worth `unit`.
    """
    rows = inputs.shape[0] if cases is None else min(cases, inputs.shape[0])
    total_loss, total = 0.0, 0.0
    with evaluating(model):
        for chunk in torch.split(torch.arange(rows), _CHUNK):
            x, t = select_rows(inputs, chunk), select_rows(targets, chunk)
            z = model(x)
            total_loss += float(loss(z, t)) * len(chunk)
            total += _errors(task, z, t)
    mean = total / rows
    if task is Task.REGRESSION:
        return {"loss": total_loss / rows, "rms_error": unit * math.sqrt(mean)}
    if task is Task.CLASSIFIER:
        return {"loss": total_loss / rows, "errors": total, "error_percent": 100.0 * mean}
    return {"loss": total_loss / rows, "squared_error": mean, "half_squared_error": mean / 2}


def _errors(task: Task, outputs: Tensor, targets: Tensor) -> float:
    """Of some cases, summed: how many are wrong, or ‖x-x̂‖²."""
    if task is Task.CLASSIFIER:
        return float((outputs.argmax(1) != targets).sum())
    restored = outputs.sigmoid() if task is Task.AUTOENCODER else outputs
    return float((restored - targets).double().square().sum())


def samples(model: nn.Module, task: Task, data: Dataset, pixels: Tensor) -> dict[str, NDArray[Any]]:
    """Images for the report: reconstructions of test cases, the first test digits that the network gets wrong, or a map
    as it is and as it was learned.

    Args:
        data: what the network was trained on, images.
        pixels: the test images as ink in [0, 1], before standardisation.
    """
    if data.whole is not None:
        return {"maps": _maps(model, data.whole)}
    assert data.image_shape is not None
    with evaluating(model):
        if task is Task.AUTOENCODER:
            rows = torch.linspace(0, len(pixels) - 1, min(_MOST_SAMPLES // 2, len(pixels))).long()
            restored = model(data.test_inputs[rows]).sigmoid()
            return {
                "originals": _images(pixels[rows], data.image_shape),
                "reconstructions": _images(restored, data.image_shape),
            }
        predictions = torch.cat([model(chunk).argmax(1) for chunk in torch.split(data.test_inputs, _CHUNK)])
    rows = (predictions != data.test_targets).nonzero().flatten()[:_MOST_SAMPLES]
    return {
        "images": _images(pixels[rows], data.image_shape),
        "labels": data.test_targets[rows].numpy().astype(np.int64),
        "predictions": predictions[rows].numpy().astype(np.int64),
    }


def _maps(model: nn.Module, whole: Tensor) -> NDArray[np.uint8]:
    """Every fourth point of the map, and of what the network says: (2, rows, columns), 0 for the lowest."""
    shape = whole.shape
    where = torch.from_numpy(terrain.places(shape)).view(*shape, 2)[::4, ::4]
    with evaluating(model):
        both = torch.stack([whole[::4, ::4], model(where.reshape(-1, 2)).view(where.shape[:2])])
    return _images((both - whole.min()) / (whole.max() - whole.min()), (where.shape[0], where.shape[1]))


def _images(rows: Tensor, shape: tuple[int, int]) -> NDArray[np.uint8]:
    grey = (rows.clamp(0, 1) * 255).round().to(torch.uint8)
    return grey.reshape(-1, *shape).numpy()
