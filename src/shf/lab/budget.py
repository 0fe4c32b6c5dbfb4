"""How much of a run's budget (epochs or minutes of training) is spent, and how long the rest will take."""

from __future__ import annotations

from shf.lab.observer import Progress
from shf.lab.training import Training

_ESTIMATE_SECONDS = 2.0
_ESTIMATE_ITERATIONS = 5


def exhausted(training: Training) -> bool:
    """Whether the run has reached its epochs or its minutes of training, whichever comes first."""
    config, at = training.config, training.position
    if config.epochs is not None and at.epoch >= config.epochs:
        return True
    return config.minutes is not None and at.elapsed >= 60.0 * config.minutes


def progress(training: Training) -> Progress:
    at, config = training.position, training.config
    fraction = _fraction(training)
    left = at.elapsed * (1.0 - fraction) / fraction if fraction > 0 else None
    return Progress(
        fraction=fraction,
        elapsed=at.elapsed,
        left=left,
        epoch=at.epoch,
        epochs=config.epochs,
        iteration=at.iteration,
    )


def _fraction(training: Training) -> float:
    config, at = training.config, training.position
    done = [0.0]
    if config.epochs is not None:
        done.append((at.epoch + at.index / training.iterations_per_epoch) / config.epochs)
    if config.minutes is not None:
        done.append(at.elapsed / (60.0 * config.minutes))
    return min(1.0, max(done))


def enough_to_estimate(training: Training, first_iteration: int) -> bool:
    """Whether enough iterations were seen since `first_iteration` to speak of the whole."""
    at = training.position
    return at.iteration - first_iteration >= _ESTIMATE_ITERATIONS or at.elapsed >= _ESTIMATE_SECONDS
