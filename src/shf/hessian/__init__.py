"""The Hessian L'' of a loss by the outputs."""

from shf.hessian.expansion import LossExpansion
from shf.losses import Loss

__all__ = ["Loss", "LossExpansion"]
