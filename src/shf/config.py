"""Settings: frozen, validated where they are defined, and the named presets of the paper."""

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, ClassVar, Self, TypedDict

from shf.damping.levenberg import DAMPING_MAX, DAMPING_MIN, HELD_OUT_RISE
from shf.preconditioners.diagonal import Preconditioner
from shf.selection import Backtracking

ARGUMENTS = ("weight_decay", "reduction", "forward", "select", "count", "seed", "process_group")
"""What an optimizer takes by name besides its options."""
_OF_RATES = ("lr", "learning_rate", "momentum", "nesterov", "betas")
"""What optimizers with a learning rate take."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of SHF; the paper's symbols in brackets.

    Attributes:
        damping: initial damping strength [λ], on the scale of the loss: a loss that is k times larger wants a λ that is k
            times larger. "auto" takes it, and a floor for it, from the curvature of the first batch (see
            [docs/fast.md](fast.md)).
        damping_factor: λ is multiplied or divided by this after a step [99/100].
        damping_rise: where λ rises, it is divided by `damping_factor` to this power. 1 is the paper's: it rises as fast as
            it falls.
        structural_damping: [μ] of Martens & Sutskever (2011): CG solves with B + λ(I + μS), where ½δ'Sδ is half the squared
            change of the tensors that the model names by `shf.hold_steady`, summed over them (time steps, layers) and
            averaged over the rows of the curvature batch. For recurrent networks; 0 for none, at no cost.
        damping_rule: what λ listens to. "batch": ρ on the step's own batch, the paper's. "held-out": what the next batch
            says of the step, with powers of `damping_factor`; a small ρ still raises λ (see [docs/fast.md](fast.md)).
        cg_iterations: CG iterations per step [ζ]: 3-5 for classification, 25-50 for deep autoencoders.
        cg_worth: stop CG before ζ once an iteration gains less per cost than the step as a whole.
        cg_noise: after a step with ρ < ¼ CG makes one iteration, until `noise_every` measures at most this share of noise in
            a gradient; None for always ζ (see [docs/fast.md](fast.md)).
        curvature_batch: rows of the curvature batch [|X^c|]; None for all rows of the gradient batch.
        curvature_rows: which rows of a gradient batch are the curvature batch in epoch e. "block": (eC + i) mod B for
            i < C, the paper's. "strided": (⌊iB/C⌋ + e) mod B, spread evenly over the batch; with several processes, a
            block may lie on one of them and leave the others idle, this gives each its proportion.
        delta_momentum: how the last solution δ comes in. "start": CG starts from γδ, the paper's. "exact": CG starts from
            zero, and the model is minimised over its solution and δ together, unless γ is 0 (see [docs/fast.md](fast.md)).
        cg_decay: the share of the last CG solution that CG starts from, in the first epoch [γ_1].
        cg_decay_growth: γ is multiplied by this at every following epoch.
        cg_decay_max: γ's ceiling.
        update_decay: β, the factor before every update, is multiplied by this at every following epoch [c].
        preconditioner: "empirical-fisher", "jacobi", "kronecker" (see [docs/fast.md](fast.md)) or None.
        preconditioner_exponent: [ξ] of the two diagonal preconditioners, "empirical-fisher" and "jacobi".
        factor_average: Kronecker factors are running averages; the largest share of the old ones that a renewal keeps.
        factor_every: steps from one renewal of the Kronecker factors to the next; None for as many as hold the average cost
            of renewals to a fifth of a step's.
        backtracking: which CG iterate is taken: "all" (the best of all), "first-worse", or None (the last; what exact
            momentum adds to it is taken unless the objective is higher there).
        line_search_steps: trials of the line search before a step is rejected [ω].
        max_norm: bound on each unit's squared incoming norm after an update: a number, "fan-in" for
            round(√inputs) as in the author's program, or None.
        damping_min: λ's floor.
        damping_max: λ's ceiling; `StepInfo.damping_bound` says when either is reached.
        nonfinite: what to do with a batch whose loss or gradient is not finite before the step: "raise" an error, or
            "skip" it. Either way everything stays as it is; a skipped batch is reported in `StepInfo.skipped`, and the
            next step is as if it had not been there.
        max_rejections: after so many steps in a row that did not move the parameters, an `SHFWarning` says what λ, ρ,
            gradient and batch look like and what to try; None for never.
        averaging: the share of the running average of the iterates that a step keeps; 0 for no average. `SHF.averaged`
            puts the average in the parameters' place, for evaluation.
        noise_every: steps between two measurements of the gradient's noise (`StepInfo.gradient_noise`); None for none.
        microbatch: the most rows that are in memory at once; None for no bound.
        momentum_off_on_divergence: set γ to 0 for good once an epoch's mean objective is above the previous one's twice
            running (§5.2); the objective per row, where the loss is a sum over rows.
        split_vectors: with several processes, split CG's vectors, preconditioner and δ over them, so that the optimizer's
            memory falls with their number; `state_dict` is then to be called on all of them.
        message_dtype: "bfloat16" to halve or quarter the messages between processes; None for the parameters' own dtype.
        check_every: steps between two comparisons, bit by bit, of the parameters on all processes.
        rank_timeout: seconds until a process that does not answer is given up, set on the process group; None leaves the
            group's own.
    """

    _owner: ClassVar[str] = "SHF"

    damping: float | str = 1.0
    damping_factor: float = 0.99
    damping_rise: float = 1.0
    structural_damping: float = 0.0
    damping_rule: str = "batch"
    cg_iterations: int = 3
    cg_worth: bool = False
    cg_noise: float | None = None
    curvature_batch: int | None = None
    curvature_rows: str = "block"
    delta_momentum: str = "start"
    cg_decay: float = 0.5
    cg_decay_growth: float = 1.01
    cg_decay_max: float = 0.99
    update_decay: float = 1.0
    preconditioner: str | None = "empirical-fisher"
    preconditioner_exponent: float = 0.75
    factor_average: float = 0.95
    factor_every: int | None = None
    backtracking: str | None = "all"
    line_search_steps: int = 60
    max_norm: float | str | None = None
    damping_min: float = DAMPING_MIN
    damping_max: float = DAMPING_MAX
    nonfinite: str = "raise"
    max_rejections: int | None = 50
    averaging: float = 0.0
    noise_every: int | None = None
    microbatch: int | None = None
    momentum_off_on_divergence: bool = False
    split_vectors: bool = False
    message_dtype: str | None = None
    check_every: int = 100
    rank_timeout: float | None = None

    def __post_init__(self) -> None:
        check = _Checker(self._owner, self)
        if self.damping != "auto":
            check.number("damping", above=0.0, or_else="or 'auto'")
        check.number("damping_factor", above=0.0, most=1.0)
        check.number("structural_damping", least=0.0)
        check.number("damping_rise", least=1.0)
        check.choice("damping_rule", ["batch", "held-out"])
        power = max(self.damping_rise, HELD_OUT_RISE if self.damping_rule == "held-out" else 1.0)
        if self.damping_factor**power < 1e-15:
            raise ValueError(
                f"{self._owner}(damping_factor={self.damping_factor!r}): λ may rise by its power {power:g} in one step "
                f"(damping_rise={self.damping_rise!r}, damping_rule={self.damping_rule!r}), which is more than 1e15; give a "
                "larger factor"
            )
        check.integer("cg_iterations", least=1)
        check.flag("cg_worth")
        if self.cg_noise is not None:
            check.number("cg_noise", least=0.0, below=1.0, or_else="or None")
            if self.noise_every is None:
                raise ValueError(
                    f"{self._owner}(cg_noise={self.cg_noise!r}): needs a noise that is measured; give noise_every=10"
                )
        check.integer("curvature_batch", least=1, optional=True)
        check.choice("curvature_rows", ["block", "strided"])
        check.choice("delta_momentum", ["start", "exact"])
        check.number("cg_decay", least=0.0, most=1.0)
        check.number("cg_decay_growth", least=1.0)
        check.number("cg_decay_max", least=0.0, most=1.0)
        check.number("update_decay", above=0.0, most=1.0)
        check.choice("preconditioner", [kind.value for kind in Preconditioner])
        check.number("preconditioner_exponent", least=0.0, most=1.0)
        check.number("factor_average", least=0.0, most=1.0)
        check.integer("factor_every", least=1, optional=True)
        check.choice("backtracking", [rule.value for rule in Backtracking])
        check.integer("line_search_steps", least=0)
        if self.max_norm != "fan-in" and self.max_norm is not None:
            check.number("max_norm", above=0.0, or_else="'fan-in', or None")
        check.number("damping_min", above=0.0)
        check.number("damping_max", above=0.0)
        check.number("damping_max", least=self.damping_min)
        if self.damping != "auto":
            check.within("damping", "damping_min", "damping_max")
        check.choice("nonfinite", ["raise", "skip"])
        check.integer("max_rejections", least=1, optional=True)
        check.number("averaging", least=0.0, below=1.0)
        check.integer("noise_every", least=1, optional=True)
        check.integer("microbatch", least=1, optional=True)
        check.flag("momentum_off_on_divergence")
        check.flag("split_vectors")
        check.choice("message_dtype", [None, "bfloat16"])
        check.integer("check_every", least=1)
        if self.rank_timeout is not None:
            check.number("rank_timeout", above=0.0, most=1e9, or_else="or None")
        if self.preconditioner == Preconditioner.KRONECKER.value and self.message_dtype is not None:
            raise ValueError(
                f"{self._owner}(preconditioner='kronecker', message_dtype={self.message_dtype!r}): factors rounded to that "
                "are not positive definite any more; use message_dtype=None"
            )

    @classmethod
    def names(cls) -> list[str]:
        return [field.name for field in dataclasses.fields(cls)]

    @classmethod
    def from_options(cls, owner: str, options: Mapping[str, Any]) -> Self:
        """From keyword arguments of an optimizer; one that does not exist is an error that lists those that do."""
        unknown = sorted(set(options) - set(cls.names()))
        if unknown:
            known = [*ARGUMENTS, *cls.names()]
            advice = _advice(unknown[0], known)
            raise TypeError(f"{owner}() has no option {unknown[0]!r}: {advice}options are: {', '.join(known)}")
        return cls(**{name: _plain(value) for name, value in options.items()})


class Options(TypedDict, total=False):
    """The settings of `HFConfig` as keyword arguments, for type checkers and completion; the last two `HF` alone has."""

    damping: float | str
    damping_factor: float
    damping_rise: float
    structural_damping: float
    damping_rule: str
    cg_iterations: int
    cg_worth: bool
    cg_noise: float | None
    curvature_batch: int | None
    curvature_rows: str
    delta_momentum: str
    cg_decay: float
    cg_decay_growth: float
    cg_decay_max: float
    update_decay: float
    preconditioner: str | None
    preconditioner_exponent: float
    factor_average: float
    factor_every: int | None
    backtracking: str | None
    line_search_steps: int
    max_norm: float | str | None
    damping_min: float
    damping_max: float
    nonfinite: str
    max_rejections: int | None
    averaging: float
    noise_every: int | None
    microbatch: int | None
    momentum_off_on_divergence: bool
    split_vectors: bool
    message_dtype: str | None
    check_every: int
    rank_timeout: float | None
    progress_tolerance: float
    iterate_spacing: float


def _advice(name: str, known: list[str]) -> str:
    """What to do about an option that does not exist, where that can be guessed; ends where the list of options begins."""
    if name in _OF_RATES:
        return (
            "there is no learning rate in this optimizer, the length of a step comes from curvature, damping and a line "
            "search; leave it out; "
        )
    close = difflib.get_close_matches(name, known, cutoff=0.7)
    return f"did you mean {' or '.join(map(repr, close))}? " if close else ""


def _plain(value: Any) -> Any:
    """Numbers as Python's own: numpy's would go into the optimizer's state, which must load with weights_only=True."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


@dataclass(frozen=True, kw_only=True)
class HFConfig(Config):
    """The settings of Martens' batch method: the same, with other values, and two rules for long CG runs.

    Attributes:
        progress_tolerance: [ε] CG stops once the relative progress over the last k iterations is below kε.
        iterate_spacing: iterates ⌈spacing^i⌉ are kept for backtracking.
    """

    _owner: ClassVar[str] = "HF"

    damping_factor: float = 2 / 3
    cg_iterations: int = 250
    cg_decay: float = 0.95
    cg_decay_growth: float = 1.0
    cg_decay_max: float = 1.0
    backtracking: str | None = "first-worse"
    progress_tolerance: float = 5e-4
    iterate_spacing: float = 1.3

    def __post_init__(self) -> None:
        super().__post_init__()
        check = _Checker(self._owner, self)
        check.number("progress_tolerance", least=0.0)
        check.number("iterate_spacing", above=1.0)
        for name, value in (("damping", "auto"), ("preconditioner", "kronecker")):
            if getattr(self, name) == value:
                raise ValueError(f"HF({name}={value!r}): only shf.SHF has it")
        for name in ("damping_rule", "cg_worth", "cg_noise", "delta_momentum", "averaging", "noise_every"):
            if (value := getattr(self, name)) != getattr(Config, name):
                raise ValueError(f"HF({name}={value!r}): only shf.SHF has it")
        for name in ("curvature_batch", "curvature_rows"):
            if (value := getattr(self, name)) != getattr(Config, name):
                raise ValueError(
                    f"HF({name}={value!r}): give the curvature batch to step, step(batches, curvature=...)"
                )


@dataclass(frozen=True)
class _Checker:
    """Raises errors that name the argument, its value and its range."""

    owner: str
    settings: Config

    def _fail(self, name: str, expected: str) -> None:
        raise ValueError(f"{self.owner}({name}={getattr(self.settings, name)!r}): must be {expected}")

    def number(
        self,
        name: str,
        *,
        least: float | None = None,
        above: float | None = None,
        most: float | None = None,
        below: float | None = None,
        or_else: str = "",
    ) -> None:
        value = getattr(self.settings, name)
        bounds = [
            f"{word} {bound:g}"
            for word, bound in (
                ("at least", least),
                ("greater than", above),
                ("at most", most),
                ("below", below),
            )
            if bound is not None
        ]
        expected = "a number " + " and ".join(bounds) + (f", {or_else}" if or_else else "")
        fine = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
        if (
            not fine
            or (least is not None and value < least)
            or (above is not None and value <= above)
            or (most is not None and value > most)
            or (below is not None and value >= below)
        ):
            self._fail(name, expected)

    def within(self, name: str, low: str, high: str) -> None:
        """A setting between two others."""
        value, least, most = (getattr(self.settings, field) for field in (name, low, high))
        if not least <= value <= most:
            self._fail(name, f"between {low}={least:g} and {high}={most:g}")

    def integer(self, name: str, *, least: int, optional: bool = False) -> None:
        value = getattr(self.settings, name)
        if optional and value is None:
            return
        if not isinstance(value, Integral) or isinstance(value, bool):
            self._fail(name, "a whole number" + (" or None" if optional else ""))
        if value < least:
            self._fail(name, f"at least {least}" + (" or None" if optional else ""))

    def flag(self, name: str) -> None:
        if not isinstance(getattr(self.settings, name), bool):
            self._fail(name, "True or False")

    def choice(self, name: str, options: list[Any]) -> None:
        if getattr(self.settings, name) not in options:
            self._fail(name, "one of " + ", ".join(repr(option) for option in options))


class presets:  # noqa: N801 - used as a namespace: shf.presets.classifier
    """Settings to be unpacked: `shf.SHF(model, loss, **shf.presets.classifier)`. `fast` is beyond the paper, the others are
    its experiments'."""

    classifier: Mapping[str, Any] = MappingProxyType(
        {"damping": 1.0, "cg_iterations": 3, "curvature_batch": 100, "weight_decay": 5e-4}
    )
    """§5: gradient batches of 1000 rows, no dropout."""

    dropout_classifier: Mapping[str, Any] = MappingProxyType(
        {"damping": 1.0, "cg_iterations": 3, "curvature_batch": 100, "weight_decay": 2e-5, "update_decay": 0.998}
    )
    """§5 with dropout on the inputs and the last hidden layer; β decays by the author's 0.998 per epoch."""

    autoencoder: Mapping[str, Any] = MappingProxyType(
        {"damping": 10.0, "cg_iterations": 25, "weight_decay": 0.0, "momentum_off_on_divergence": True}
    )
    """§5.2, CURVES: gradient and curvature batches of 2000 rows. λ = 10 belongs to a loss that is summed over outputs and
    averaged over cases, `shf.losses.per_case(...)`: torch's mean over all elements is hundreds of times smaller, and there
    this damping would freeze the network."""

    fast: Mapping[str, Any] = MappingProxyType(
        {
            "damping": "auto",
            "damping_factor": 0.7,
            "damping_rise": 4.0,
            "cg_iterations": 2,
            "cg_noise": 0.3,
            "cg_decay": 0.0,
            "backtracking": None,
            "preconditioner": "kronecker",
            "averaging": 0.9,
            "noise_every": 10,
        }
    )
    """Beyond the paper ([docs/fast.md](fast.md)): nothing in it belongs to the scale of a loss. Feed it from
    `shf.GrowingLoader`, evaluate within `optimizer.averaged()`."""
