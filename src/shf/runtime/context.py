"""The context that every step runs in, whatever the caller has switched on; and warnings that point at the caller's line."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from shf.data.draws import preserved_global_state
from shf.errors import SHFWarning
from shf.runtime.interrupts import deferred_interrupts


def warn(words: str, kind: type[SHFWarning] = SHFWarning) -> None:
    """A warning that points at the caller's own line, however deep within shf and torch it comes from."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _INSIDE:
        frame, level = frame.f_back, level + 1
    warnings.warn(words, kind, stacklevel=level)


_INSIDE = ("shf", "torch", "contextlib")
"""Packages whose frames are passed over."""


@contextmanager
def twice_differentiable_kernels(device: torch.device, *, recurrent: bool = True) -> Iterator[None]:
    """Kernels whose backward can itself be differentiated, inside this block only.

    Fused attention and cuDNN's recurrent kernels have no second derivative: attention uses its mathematical form here,
    and cuDNN is set aside if there are recurrent layers. The fast path of transformer layers in eval mode, which torch
    takes only where no gradient is wanted, is shut: with a padding mask it computes another function. Autocast is off:
    curvature in half precision is noise. What `torch.compile` has made runs as it was written.
    """
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with (
            _as_written(),
            sdpa_kernel(SDPBackend.MATH),
            torch.backends.cudnn.flags(enabled=False) if recurrent else nullcontext(),
            torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext(),
        ):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


def _as_written() -> AbstractContextManager[None]:
    """Inside, nothing is compiled: compiled graphs cannot be differentiated twice, and what torch first meets inside of a
    dispatch mode, such as that of frozen draws, it never compiles afterwards, outside of a step either."""
    if "torch._dynamo" not in sys.modules or not hasattr(torch.compiler, "set_stance"):  # nothing is; torch before 2.6
        return nullcontext()
    stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


def is_recurrent(model: nn.Module) -> bool:
    """Whether it has layers for which torch would take cuDNN's recurrent kernels."""
    return any(isinstance(m, nn.RNNBase) for m in model.modules())


def set_aside(model: nn.Module, device: torch.device) -> list[str]:
    """What the user has switched on and a step will not use, in words."""
    found = []
    if torch.is_autocast_enabled(device.type):
        found.append("autocast is on: SHF switches it off inside step, where half precision would drown the curvature")
    if device.type == "cuda" and torch.backends.cudnn.enabled and is_recurrent(model):
        found.append(
            "cuDNN's recurrent kernels cannot be differentiated twice: SHF uses torch's own, slower ones inside step, and "
            "cuDNN everywhere else"
        )
    return found


class StepContext:
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
