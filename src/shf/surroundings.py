"""The context that every step runs in, whatever the caller has switched on; and warnings that point at the caller's line."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from shf.interruption import deferred_interrupts
from shf.network import is_recurrent, set_aside, twice_differentiable_kernels
from shf.randomness import preserved_global_state


class SHFWarning(UserWarning):
    """Something in the surroundings of a step that the user may not expect."""


def warn(words: str) -> None:
    """An SHFWarning that points at the caller's own line, however deep within shf and torch it comes from."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _INSIDE:
        frame, level = frame.f_back, level + 1
    warnings.warn(words, SHFWarning, stacklevel=level)


_INSIDE = ("shf", "torch", "contextlib")
"""Packages whose frames are passed over."""


class Surroundings:
    """Around a step: kernels that can be differentiated twice, no inference mode, torch's global generator put back
    afterwards, and Ctrl-C deferred. Settings of the user's that a step overrides (autocast, cuDNN's recurrent kernels) are
    warned of once.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._said: set[str] = set()

    @contextmanager
    def __call__(self, device: torch.device) -> Iterator[None]:
        for words in set_aside(self._model, device):
            if words not in self._said:
                self._said.add(words)
                warn(words)
        kernels = twice_differentiable_kernels(device, recurrent=is_recurrent(self._model))
        with deferred_interrupts(), torch.inference_mode(False), preserved_global_state(), kernels:
            yield
