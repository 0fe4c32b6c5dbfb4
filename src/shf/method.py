"""What Algorithm 1 is made of."""

from dataclasses import dataclass, field

from shf.damping import Damping
from shf.linear import DecayStep, LinearSolver, Momentum, Stopping
from shf.preconditioners.base import Preparation
from shf.selection import Selection


@dataclass(frozen=True)
class Method:
    """What Algorithm 1 is made of in one step.

    Attributes:
        damping: the rule for λ.
        preparation: the preconditioner.
        solver: of the system.
        stopping: when CG ends early, and which iterates it keeps.
        momentum: how the last solution comes in.
        selection: which iterate is taken, and how far along it.
        decay: whether weight decay has a direction of its own.
        most: the most iterations of the solver, where the step before asks for caution.
    """

    damping: Damping
    preparation: Preparation
    solver: LinearSolver
    stopping: Stopping = field(default_factory=Stopping)
    momentum: Momentum = field(default_factory=Momentum)
    selection: Selection = field(default_factory=Selection)
    decay: DecayStep = field(default_factory=DecayStep)
    most: int = 2**63 - 1
