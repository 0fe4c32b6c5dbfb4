"""What parts an optimizer has: its roles, and what may stand in each. A new kind of an old part is a line here."""

from collections.abc import Mapping
from typing import Any

from shf.averaging import Averaging
from shf.component import Component, Role
from shf.damping import Damping, HeldOut, LevenbergMarquardt
from shf.data.batches import CurvatureBatch
from shf.distributed.replicated import Communication
from shf.linear import (
    CG,
    Auto,
    Caution,
    DecayStep,
    Dense,
    LinearSolver,
    MarginalValue,
    Momentum,
    RelativeProgress,
    Rows,
    Survival,
    TrustRegion,
)
from shf.model.steady import StructuralDamping
from shf.preconditioners import EmpiricalFisher, Identity, Jacobi, Kronecker, Preconditioner
from shf.problems.noise import NoiseMeasure
from shf.runtime.guards import Guards
from shf.selection import Selection
from shf.update import Update

_DIAGONAL: Mapping[Any, type[Component]] = {"empirical-fisher": EmpiricalFisher, "jacobi": Jacobi}
_PRECONDITIONER = (
    "preconditioner",
    """"empirical-fisher", "jacobi", "kronecker" (see [docs/fast.md](fast.md)) or None; or one of `shf.preconditioners`.""",
)


def _preconditioner(kinds: Mapping[Any, type[Component]]) -> Role:
    return Role(kinds, _PRECONDITIONER, Preconditioner, "preconditioner")


SHF: Mapping[str, Role] = {
    "damping": Role(
        {"batch": LevenbergMarquardt, "held-out": HeldOut},
        (
            "damping_rule",
            """what λ listens to. "batch": ρ on the step's own batch, the paper's. "held-out": what the next batch says
            of the step, with powers of `damping_factor`; a small ρ still raises λ (see [docs/fast.md](fast.md)).""",
        ),
        Damping,
        "damping",
    ),
    "structure": Role.of(StructuralDamping),
    "solver": Role(
        {"cg": CG, "dense": Dense, "rows": Rows, "auto": Auto, "trust-region": TrustRegion},
        (
            "solver",
            """what solves for the step: "cg"; exactly, "dense" by parameters, "rows" by rows, "auto" by the smaller side;
            or "trust-region", exact steps as long as the model holds (see [docs/physics.md](physics.md)). Or one of
            `shf.solvers`.""",
        ),
        LinearSolver,
        "solver",
    ),
    "stopping": Role.of(MarginalValue),
    "caution": Role.of(Caution),
    "survival": Role.of(Survival),
    "curvature": Role.of(CurvatureBatch),
    "momentum": Role.of(Momentum),
    "update": Role.of(Update),
    "preconditioner": _preconditioner({**_DIAGONAL, "kronecker": Kronecker, None: Identity}),
    "selection": Role.of(Selection),
    "decay": Role.of(DecayStep),
    "averaging": Role.of(Averaging),
    "noise": Role.of(NoiseMeasure),
    "guards": Role.of(Guards),
    "communication": Role.of(Communication),
}
"""Those of `shf.SHF`."""

HF: Mapping[str, Role] = {
    "damping": Role({None: LevenbergMarquardt}, None, Damping, "damping", {"damping_factor": 2 / 3}),
    "structure": Role.of(StructuralDamping),
    "solver": Role(
        {"cg": CG},
        ("solver", """what solves for the step: "cg"; or one of `shf.solvers`."""),
        LinearSolver,
        "solver",
        {"cg_iterations": 250},
    ),
    "stopping": Role.of(RelativeProgress),
    "momentum": Role.of(Momentum, cg_decay=0.95, cg_decay_growth=1.0, cg_decay_max=1.0),
    "update": Role.of(Update),
    "preconditioner": _preconditioner({**_DIAGONAL, None: Identity}),
    "selection": Role.of(Selection, backtracking="first-worse"),
    "averaging": Role.of(Averaging),
    "guards": Role.of(Guards),
    "communication": Role.of(Communication),
}
"""Those of `shf.HF`, with Martens' values, and without what has no place where one step sees all of the data."""
