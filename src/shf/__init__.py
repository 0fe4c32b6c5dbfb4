"""Stochastic Hessian-free optimization (Kiros, 2013) for PyTorch: curvature without a learning rate."""

from shf import losses
from shf.beyond.growing import GrowingLoader
from shf.cg import CGResult, CGStop, conjugate_gradient
from shf.config import Config, HFConfig, presets
from shf.curvature import gauss_newton_product
from shf.damping import DampingBound
from shf.faults.exhaustion import StepMemoryError
from shf.faults.nonfinite import NonFiniteError
from shf.hf import HF
from shf.optimizer import SHF
from shf.processes.ranks import RankError
from shf.steady import hold_steady
from shf.step import StepInfo
from shf.surroundings import SHFWarning

__version__ = "0.1.0"

__all__ = [
    "HF",
    "SHF",
    "CGResult",
    "CGStop",
    "Config",
    "DampingBound",
    "GrowingLoader",
    "HFConfig",
    "NonFiniteError",
    "RankError",
    "SHFWarning",
    "StepInfo",
    "StepMemoryError",
    "conjugate_gradient",
    "gauss_newton_product",
    "hold_steady",
    "losses",
    "presets",
]
