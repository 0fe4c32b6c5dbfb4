"""Tensors that a model names as worth holding steady: what structural damping penalises the change of."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shf.component import Component, number, option


@dataclass(frozen=True, kw_only=True)
class StructuralDamping(Component):
    """(B + λ(I + μS))δ = -∇f (Martens & Sutskever, 2011)."""

    strength: float = option(
        0.0,
        number(least=0.0),
        """[μ] of Martens & Sutskever (2011): CG solves with B + λ(I + μS), where ½δ'Sδ is half the squared change of the
        tensors that the model names by `shf.hold_steady`, summed over them (time steps, layers) and averaged over the rows
        of the curvature batch. For recurrent networks; 0 for none, at no cost.""",
        name="structural_damping",
    )


@dataclass
class Steady:
    """The tensors named in one forward pass, in order, each as it was when it was named."""

    tensors: list[Tensor] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def intact(self) -> list[Tensor]:
        """The tensors; refused where one was overwritten since, because it is then not what was named."""
        for k, (h, version) in enumerate(zip(self.tensors, self.versions, strict=True)):
            if h._version != version:
                raise RuntimeError(
                    f"hold_steady: tensor number {k}, of shape {tuple(h.shape)}, was overwritten in place after it was "
                    "named; name what the operation returns, or use the operation that is not in place"
                )
        return self.tensors


_RECORD: ContextVar[Steady | None] = ContextVar("shf_steady", default=None)


def hold_steady(tensor: Tensor) -> Tensor:
    """Names a tensor whose change structural damping is to hold back; returns it unchanged.

    To be called in a module's `forward`, as often as there are such tensors: for a recurrent network at each time step. It
    does something only inside the steps of an optimizer with `structural_damping` > 0; elsewhere it costs nothing.

    Example:
        >>> class Cell(torch.nn.RNNCell):
        ...     def forward(self, x, h):
        ...         return hold_steady(super().forward(x, h))
    """
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        found = f"a tensor of {tensor.dtype}" if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
        raise TypeError(f"hold_steady takes one floating-point tensor, got {found}")
    if torch.compiler.is_compiling():
        return tensor
    record = _RECORD.get()
    if record is not None:
        record.tensors.append(tensor)
        record.versions.append(tensor._version)
    return tensor


@contextmanager
def named_tensors(*, enabled: bool) -> Iterator[Steady]:
    """Records what is named inside the block, and nothing if not enabled."""
    found = Steady()
    token = _RECORD.set(found if enabled else None)
    try:
        yield found
    finally:
        _RECORD.reset(token)
