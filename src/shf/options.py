"""The options of the optimizers as keyword arguments, for type checkers and completion.

Made by tools/options.py from the fields of their parts, which declare them.
"""

from typing import TypedDict

from shf.damping.rule import Damping
from shf.linear.solver import LinearSolver
from shf.preconditioners.base import Preconditioner


class Options(TypedDict, total=False):
    """Those of `shf.SHF`, and at the end what only `shf.HF` has."""

    damping_rule: str
    damping: float | str | Damping
    damping_min: float
    damping_max: float
    damping_factor: float
    damping_rise: float
    structural_damping: float
    solver: str | LinearSolver
    cg_iterations: int
    target_ratio: float
    cg_worth: bool
    cg_noise: float | None
    cg_survival: float | None
    curvature_batch: int | None
    curvature_rows: str
    delta_momentum: str
    cg_decay: float
    cg_decay_growth: float
    cg_decay_max: float
    momentum_off_on_divergence: bool
    update_decay: float
    max_norm: float | str | None
    preconditioner: str | Preconditioner | None
    preconditioner_exponent: float
    preconditioner_squares: str
    factor_average: float
    factor_every: int | None
    backtracking: str | None
    line_search_steps: int
    decay_direction: bool
    averaging: float | str
    noise_every: int | None
    nonfinite: str
    max_rejections: int | None
    microbatch: int | None
    split_vectors: bool
    message_dtype: str | None
    check_every: int
    rank_timeout: float | None
    progress_tolerance: float
    iterate_spacing: float
