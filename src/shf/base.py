"""What `SHF` and `HF` have in common: parameter groups, state, epochs, and the writes of a step. Only it and `averaging`
write parameters."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shf.averaging import Averaging, exchange_, swapped
from shf.composition import Config
from shf.data.batches import Count, Select, count_rows, select_rows
from shf.distributed.replicated import Communication, Connection
from shf.groups import Group, Parameters, check_decay, make_groups, members, refuse_incomplete, refuse_settings
from shf.iteration import Iteration
from shf.lastsolution import LastSolution
from shf.model.network import Forward, Network, call_model
from shf.options import Options
from shf.runtime.context import StepContext, warn
from shf.state import forget_all_but, refuse_other_shapes, step_seed
from shf.terms import Term, make_objective

_COUNTERS = {"epoch", "iteration", "seed", "averaged"}
"""Numbers that are no part's own."""


class CurvatureOptimizer(Optimizer):
    """An optimizer whose steps are iterations of Algorithm 1; `shf.SHF` and `shf.HF` say on what."""

    _config_type: type[Config] = Config
    _step_supports_amp_scaling = True  # GradScaler hands `step` what it is given, and needs no gradients

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Tensor] | Mapping[str, Term | Callable[[Any, Any], Tensor]] | None = None,
        params: Parameters | None = None,
        *,
        weight_decay: float = 0.0,
        reduction: str | None = None,
        forward: Forward = call_model,
        select: Select = select_rows,
        count: Count = count_rows,
        seed: int | None = None,
        process_group: Any = "auto",
        **options: Unpack[Options],
    ) -> None:
        refuse_incomplete(type(self).__name__, model, loss)
        self.config = self._config_type(**options)
        weight_decay = check_decay(type(self).__name__, weight_decay)
        if seed is not None and (not isinstance(seed, Integral) or isinstance(seed, bool)):
            raise ValueError(f"{type(self).__name__}(seed={seed!r}): must be a whole number or None")
        self._objective = make_objective(self.config, model, loss, reduction, forward, select, count)
        self._subject = self._objective.subject
        self.model, self.loss = self._subject.model, self._objective.losses
        self._averaged_now = False  # whether the parameters are their averages for now
        self._connection = Connection(process_group, self.config.part(Communication))
        self._last_solution = LastSolution()
        self._cache: dict[str, Any] = {}  # what follows from the state
        self._context = StepContext(self.model)
        super().__init__(make_groups(self.model, params, weight_decay), {"weight_decay": weight_decay})
        seed = int(torch.randint(2**62, ()).item() if seed is None else seed)
        self.param_groups[0]["shf"] = {**self.config.first(), "epoch": 0, "iteration": 0, "seed": seed}

    # --- what a user reads -------------------------------------------------------------------------------------------

    @property
    def damping(self) -> float:
        """λ, the damping strength that the next step will use; nan where the first is yet to choose it."""
        return float(self._scalars["damping"])

    @property
    def cg_decay(self) -> float:
        """γ, the share of the last CG solution that the next step starts from."""
        return float(self._scalars["cg_decay"]) if self._scalars["momentum"] else 0.0

    @property
    def update_scale(self) -> float:
        """β, the factor before every update of this epoch."""
        return float(self._scalars["update_scale"])

    @property
    def epoch_index(self) -> int:
        """e, counted from 0: which rows are the curvature batch."""
        return int(self._scalars["epoch"])

    def __repr__(self) -> str:
        usual = self.config.defaults()
        settings = ", ".join(f"{name}={value!r}" for name, value in self.config.values.items() if value != usual[name])
        groups = ", ".join(
            f"{sum(p.numel() for p in g['params'])} with weight_decay={g['weight_decay']:g}" for g in self.param_groups
        )
        return (
            f"{type(self).__name__}({settings}; λ={self.damping:.4g}, epoch {self.epoch_index}; parameters: {groups}; "
            f"{self._connection!r})"
        )

    # --- training ----------------------------------------------------------------------------------------------------

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the parameters are the running average of the iterates (`averaging`), with "auto" while that is the better
        one on new batches; outside, they are as they were.

        Example:
            `with optimizer.averaged(): error = evaluate(model)`

        Buffers, such as the statistics of BatchNorm, are not averaged.
        """
        if not self.config.averaging:
            raise RuntimeError(f"{type(self).__name__}(averaging=0): no average is kept; give averaging=0.95, say")
        if self._scalars.get("averaged") or not self._average_serves():  # by `eval`; or the iterates do better
            yield
            return
        with swapped(self.model.parameters(), self.state):
            before, self._averaged_now = self._averaged_now, True
            try:
                yield
            finally:
                self._averaged_now = before

    def eval(self) -> None:
        """Puts the running average of the iterates in the parameters' place until `train` is called, as loops do that know
        schedule-free optimizers. Without `averaging` nothing happens.

        The iterates wait in the optimizer's state: checkpoints of model and optimizer made meanwhile belong together.
        """
        self._exchange(averaged=True)

    def train(self) -> None:
        """Puts the iterates back in the parameters' place, after `eval`; a step needs them there."""
        self._exchange(averaged=False)

    def _exchange(self, *, averaged: bool) -> None:
        if bool(self._scalars.get("averaged")) == averaged or (averaged and not self._average_serves()):
            return
        exchange_(self.model.parameters(), self.state, self.param_groups[0])

    def _average_serves(self) -> bool:
        return self.config.part(Averaging).serves(self._scalars)

    def next_epoch(self) -> None:
        """Begins the next epoch: γ ← min(1.01 γ, 0.99), β ← cβ, and the next curvature rows."""
        scalars = self._scalars
        following = {**scalars, "epoch": scalars["epoch"] + 1, **self.config.next_epoch(scalars)}
        self.param_groups[0]["shf"] = following

    def epoch(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Passes the loader's batches through, and begins the next epoch when they end.

        After a `break` out of the loop it has not begun: call `next_epoch()` yourself.

        Example:
            `for inputs, targets in optimizer.epoch(loader): optimizer.step(inputs, targets)`
        """
        yield from loader
        self.next_epoch()

    def disable_momentum(self) -> None:
        """Sets γ to 0 for good: CG starts from zero from now on (end of §5.2)."""
        self.param_groups[0]["shf"] = {**self._scalars, "momentum": False}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """For loops that call it; SHF itself neither reads nor writes `.grad`."""
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters of the model (for example unfrozen layers); others are refused."""
        own = {id(p) for p in self.model.parameters()}
        params = members(param_group)
        if any(id(p) not in own for p in params):
            shapes = [tuple(p.shape) for p in params if id(p) not in own]
            raise ValueError(
                f"parameters of shape {shapes} do not belong to the model that {type(self).__name__} was given: put them "
                "into it (those of a loss too), or leave them out"
            )
        refuse_settings(type(self).__name__, param_group, self.config.names())
        group = Group({**param_group, "params": params})
        if "weight_decay" in group:
            group["weight_decay"] = check_decay(f"{type(self).__name__}: parameter group", group["weight_decay"])
        super().add_param_group(group)

    def state_dict(self) -> dict[str, Any]:
        """Everything that continues the run: δ, λ, γ, β, epoch, seed, and what other options remember of each parameter.
        With `split_vectors`, call it on all processes."""
        self._last_solution.gather(self.state, self._connection.ranks())
        found = super().state_dict()
        first, *others = found["param_groups"]
        numbers = {**first["shf"], "options": self.config.in_words()}
        return {**found, "param_groups": [{**first, "shf": numbers}, *others]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues where `state_dict` was taken: δ, λ, γ, β, epoch, seed and the groups' weight decay come from it. What
        options remember that are off here is dropped. Options are not loaded: a warning names those that differ."""
        if "shf" not in (state_dict.get("param_groups") or [{}])[0]:
            raise ValueError(
                f"the state was not saved by {type(self).__name__}: its first parameter group has no 'shf'"
            )
        refuse_other_shapes(state_dict, self.param_groups)
        if others := self.config.others(state_dict["param_groups"][0]["shf"].get("options", "{}")):
            warn(
                f"the state was saved by an optimizer with other options: {others}. Those given here hold, and "
                "the run goes on otherwise than it would have"
            )
        super().load_state_dict(state_dict)
        self.param_groups = [Group(group) for group in self.param_groups]
        self._forget_switched_off()
        self._last_solution.forget()

    def __getstate__(self) -> dict[str, Any]:
        """All of it (torch's own drops what it does not know): a deep copy has the model's copy, and works. One made inside
        `averaged()` has the average for its parameters."""
        return {**self.__dict__, "_averaged_now": False}

    # --- inside ------------------------------------------------------------------------------------------------------

    @property
    def _scalars(self) -> dict[str, Any]:
        """λ, γ, β and counters. They live in the first parameter group, which torch saves and loads unchanged."""
        return self.param_groups[0]["shf"]  # type: ignore[no-any-return]

    @property
    def _device(self) -> torch.device:
        device: torch.device = next(p.device for group in self.param_groups for p in group["params"])
        return device

    def _settings(self) -> dict[str, Any]:
        """What an optimizer is made of: the other processes must have the same."""
        return {
            "optimizer": type(self).__name__,
            "option": dict(self.config.values),
            "state": {name: value for name, value in self._scalars.items() if name != "seed"},
            "has a last CG solution": self._last_solution.there(self.state),
        }

    def _adopt(self, seed: int) -> int:
        """Takes over the processes' common seed; returns this iteration's."""
        if seed != self._scalars["seed"]:
            self.param_groups[0]["shf"] = {**self._scalars, "seed": seed}
        return step_seed(self._scalars)

    def _refuse_averages(self) -> None:
        if self._averaged_now:
            raise RuntimeError("step inside `with optimizer.averaged()`: what it did would be lost; step outside")
        if self._scalars.get("averaged"):
            raise RuntimeError("step after optimizer.eval(): the parameters are averages; call optimizer.train() first")

    def _network(self) -> Network:
        """The parameters to train now, in the model's order."""
        self._refuse_averages()
        return self._subject.network(self.param_groups, self._connection.ranks())

    def _forget_switched_off(self) -> None:
        """Removes from the state what options that are off have left in it: it would be stale once they are on again."""
        own = self.config.numbers | _COUNTERS
        kept = {name: value for name, value in self._scalars.items() if name in own}
        self.param_groups[0]["shf"] = {**self.config.first(), **kept}
        forget_all_but(self.state, self.config.tensors)

    def _iteration(self) -> Iteration:
        """One iteration of Algorithm 1, which writes here."""
        ranks, group = self._connection.ranks(), self.param_groups[0]
        return Iteration(self.config, ranks, self.state, group, self._last_solution, self._cache)
