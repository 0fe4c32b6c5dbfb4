"""Stochastic Hessian-free optimization (Kiros, 2013) for PyTorch: curvature without a learning rate."""

from shf import losses
from shf.cg import CGResult, CGStop, conjugate_gradient
from shf.config import Config, HFConfig, presets
from shf.curvature import gauss_newton_product
from shf.hf import HF
from shf.optimizer import SHF, SHFWarning
from shf.ranks import RankError
from shf.step import StepInfo

__version__ = "0.1.0"

__all__ = [
    "HF",
    "SHF",
    "CGResult",
    "CGStop",
    "Config",
    "HFConfig",
    "RankError",
    "SHFWarning",
    "StepInfo",
    "conjugate_gradient",
    "gauss_newton_product",
    "losses",
    "presets",
]
