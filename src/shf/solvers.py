"""What solves the system (B + λI)δ = -∇f. A solver of one's own derives from `LinearSolver`."""

from shf.linear.solver import CG, LinearSolver, Path, Run
from shf.linear.system import LinearSystem

__all__ = ["CG", "LinearSolver", "LinearSystem", "Path", "Run"]
