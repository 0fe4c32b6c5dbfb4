"""The optimizers that the laboratory compares, all behind one small protocol."""

from shf.lab.baselines.protocol import Loss, Method, MethodSpec
from shf.lab.baselines.registry import METHODS, find

__all__ = ["METHODS", "Loss", "Method", "MethodSpec", "find"]
