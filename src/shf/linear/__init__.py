"""The system (B + λI)δ = -∇f, and what solves it. No network here."""

from shf.linear.decaystep import DecayStep
from shf.linear.exact import Auto, Dense, Rows
from shf.linear.solver import CG, LinearSolver
from shf.linear.stopping import Caution, MarginalValue, RelativeProgress, Stopping
from shf.linear.survival import Survival
from shf.linear.system import LinearSystem
from shf.linear.trustregion import TrustRegion
from shf.linear.warmstart import Momentum

__all__ = [
    "CG",
    "Auto",
    "Caution",
    "DecayStep",
    "Dense",
    "LinearSolver",
    "LinearSystem",
    "MarginalValue",
    "Momentum",
    "RelativeProgress",
    "Rows",
    "Stopping",
    "Survival",
    "TrustRegion",
]
