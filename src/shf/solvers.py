"""What solves the system (B + λI)δ = -∇f. A solver of one's own derives from `LinearSolver`."""

from shf.linear import CG, Auto, Dense, LinearSolver, LinearSystem, Rows, TrustRegion
from shf.linear.solver import Path, Run

__all__ = ["CG", "Auto", "Dense", "LinearSolver", "LinearSystem", "Path", "Rows", "Run", "TrustRegion"]
