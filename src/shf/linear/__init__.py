"""The system (B + λI)δ = -∇f, and what solves it. No network here."""

from shf.linear.solver import CG, LinearSolver
from shf.linear.stopping import Caution, MarginalValue, RelativeProgress, Stopping
from shf.linear.system import LinearSystem
from shf.linear.warmstart import Momentum

__all__ = ["CG", "Caution", "LinearSolver", "LinearSystem", "MarginalValue", "Momentum", "RelativeProgress", "Stopping"]
