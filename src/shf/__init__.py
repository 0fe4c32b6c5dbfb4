"""Stochastic Hessian-free optimization (Kiros, 2013) for PyTorch: curvature without a learning rate."""

from shf import losses
from shf.algorithm import StepInfo
from shf.config import Config, HFConfig, presets
from shf.damping.levenberg import DampingBound
from shf.data.growing import GrowingLoader
from shf.errors import NonFiniteError, RankError, SHFWarning, StepMemoryError
from shf.hf import HF
from shf.linear.cg import CGResult, CGStop, conjugate_gradient
from shf.model.gaussnewton import gauss_newton_product
from shf.model.steady import hold_steady
from shf.optimizer import SHF

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
