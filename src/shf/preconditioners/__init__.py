"""P of preconditioned CG: diagonal, or two factors for each layer. One of one's own derives from `Preconditioner`."""

from shf.preconditioners.base import GradientPass, Preconditioner, Space, Work
from shf.preconditioners.diagonal import EmpiricalFisher, Identity, Jacobi
from shf.preconditioners.kronecker import Kronecker

__all__ = ["EmpiricalFisher", "GradientPass", "Identity", "Jacobi", "Kronecker", "Preconditioner", "Space", "Work"]
