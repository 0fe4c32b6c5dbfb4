"""Stochastic Hessian-free optimization (Kiros, 2013) for PyTorch: curvature without a learning rate."""

import warnings

with warnings.catch_warnings():  # torch says so on import where numpy is absent; nothing here needs it
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    import torch as torch

from shf import damping, losses, preconditioners, solvers
from shf.closure import batch, evaluate
from shf.composition import Config, HFConfig
from shf.data.growing import GrowingLoader
from shf.errors import NonConvexLossWarning, NonFiniteError, RankError, SHFWarning, StepMemoryError
from shf.hf import HF
from shf.info import DampingBound, StepInfo
from shf.linear.cg import CGResult, CGStop, conjugate_gradient
from shf.model.steady import hold_steady
from shf.optimizer import SHF
from shf.presets import presets
from shf.product import gauss_newton_product
from shf.terms import Term

__version__ = "0.2.0"

__all__ = [
    "HF",
    "SHF",
    "CGResult",
    "CGStop",
    "Config",
    "DampingBound",
    "GrowingLoader",
    "HFConfig",
    "NonConvexLossWarning",
    "NonFiniteError",
    "RankError",
    "SHFWarning",
    "StepInfo",
    "StepMemoryError",
    "Term",
    "batch",
    "conjugate_gradient",
    "damping",
    "evaluate",
    "gauss_newton_product",
    "hold_steady",
    "losses",
    "preconditioners",
    "presets",
    "solvers",
]
