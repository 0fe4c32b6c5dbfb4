"""SHF as a torch.optim.Optimizer: parameter groups, state, epochs. Only it and `beyond.averaging` write parameters."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from numbers import Integral
from typing import Any, Protocol, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shf.algorithm import Problem, Solver, State, StepInfo, shf_step
from shf.averaging import swapped
from shf.config import Config, Options
from shf.damping.initial import mean_eigenvalue
from shf.data.batches import Batch, Count, Select, count_rows, curvature_rows, explained_pair, select_rows
from shf.data.draws import mix
from shf.distributed.collective import Collective
from shf.distributed.contribution import Contribution
from shf.distributed.replicated import Communication, Connection
from shf.errors import NonFiniteError
from shf.extras import Extras, forget_switched_off, is_unsettled, make_extras, make_solver
from shf.groups import Group, Parameters, check_decay, decay_weights, make_groups, members, refuse_settings, trainable
from shf.linear.lastsolution import LastSolution
from shf.losses import Loss, Reduction
from shf.maxnorm import clip_norms_, input_major_groups
from shf.model.network import Forward, Network, call_model, unwrap
from shf.preconditioners.diagonal import Preconditioner
from shf.preconditioners.kronecker import FactorMemory
from shf.probing.derivatives import refuse_single_derivatives_on
from shf.probing.layout import NO_ROWS, Layout, LayoutMemory, few_rows
from shf.probing.losses import refuse_contradictions
from shf.probing.unsupported import refuse_unsupported
from shf.problems.decay import Decay
from shf.problems.objective import Objective, Settings
from shf.runtime.context import StepContext, warn
from shf.runtime.diagnosis import diagnose
from shf.runtime.interrupts import no_interrupts
from shf.runtime.memory import explained_exhaustion
from shf.schedules import at_next_epoch, first_scalars
from shf.state import refuse_other_shapes


class _Problem(Problem, Protocol):
    """One iteration's objective, the module's buffers as its gradient pass left them, and the rows that it is over, those of
    all processes."""

    @property
    def buffers(self) -> Mapping[str, Tensor]: ...

    @property
    def represents(self) -> int: ...


class SHF(Optimizer):
    """Stochastic Hessian-free optimization (Kiros, ICLR 2013).

    One `step` is one iteration of Algorithm 1: on the batch it is given it computes objective, gradient and
    preconditioner, solves (B + λI) δ = -∇f by a few CG iterations that start from the last solution, with curvature
    products on `curvature_batch` of the rows, chooses among the CG iterates, adapts λ, searches along the line, and moves.

    There is no learning rate: schedulers have nothing to schedule. `.grad` is neither read nor written, so gradient
    clipping and scaling do nothing. `step` enables grad by itself, respects `model.train()` / `model.eval()`, freezes all
    of the model's randomness for its duration, and leaves torch's global generator alone.

    With several processes each gives `step` its own rows, of any number: batch, `curvature_batch` and masks are those of
    one process that holds all rows in rank order, and all processes take the same step (see [docs/scaling.md](scaling.md)).

    Args:
        model: the module. DistributedDataParallel and torch.compile wrappers are looked through.
        loss: `loss(outputs, targets)`, one number, convex in the outputs: any torch loss on logits, or a callable.
        params: parameters of the model to train, or groups of them; by default all. Frozen ones are left alone.
        weight_decay: w of the penalty ½ w ‖θ‖², on parameters with two or more dimensions; in groups given explicitly
            (dicts), on all of their members, with a value of their own if they have one.
        reduction: "mean" or "sum" over rows; read from the loss object where it has one.
        forward: how the model is called, `forward(model, inputs)`; by default a tuple is `model(*inputs)`, a dict
            `model(**inputs)`.
        select: `select(data, rows)`, the given rows of inputs or targets.
        count: `count(inputs)`, the number of rows.
        seed: of the dropout masks; drawn once from torch's generator if None. With several processes, rank 0's counts.
        process_group: the torch.distributed group of the processes that train together; "auto" for the default group once
            it is initialised, None to stay alone.
        **options: see `shf.Config`; `damping`, `cg_iterations`, `curvature_batch` are those to look at first.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> optimizer = SHF(model, nn.CrossEntropyLoss(), curvature_batch=10)
        >>> info = optimizer.step(torch.randn(50, 4), torch.randint(3, (50,)))
        >>> info.loss_after <= info.loss_before
        True
    """

    _config_type: type[Config] = Config
    _described = "batch"

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Tensor],
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
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"{type(self).__name__}(model=<{type(model).__name__}>): expected a torch.nn.Module, the model itself and "
                "not its parameters"
            )
        self.config = self._config_type.from_options(type(self).__name__, options)
        weight_decay = check_decay(type(self).__name__, weight_decay)
        if seed is not None and (not isinstance(seed, Integral) or isinstance(seed, bool)):
            raise ValueError(f"{type(self).__name__}(seed={seed!r}): must be a whole number or None")
        self.model = unwrap(model)
        self.loss = Loss(loss, reduction)
        self._forward, self._select, self._count = forward, select, count
        self._layouts = LayoutMemory()
        self._probed = False  # whether loss and second derivatives were looked at
        self._averaged_now = False  # whether the parameters are their averages for now
        self._connection = Connection(process_group, _communication(self.config))
        self._last_solution = LastSolution()
        self._factors = FactorMemory()
        self._context = StepContext(self.model)
        super().__init__(make_groups(self.model, params, weight_decay), {"weight_decay": weight_decay})
        seed = int(torch.randint(2**62, ()).item() if seed is None else seed)
        self.param_groups[0]["shf"] = first_scalars(self.config, seed)

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
        settings = ", ".join(f"{name}={getattr(self.config, name)!r}" for name in self.config.names())
        groups = ", ".join(
            f"{sum(p.numel() for p in g['params'])} with weight_decay={g['weight_decay']:g}" for g in self.param_groups
        )
        return (
            f"{type(self).__name__}({settings}; λ={self.damping:.4g}, epoch {self.epoch_index}; parameters: {groups}; "
            f"{self._connection!r})"
        )

    # --- training ----------------------------------------------------------------------------------------------------

    def step(self, inputs: Any, targets: Any = None) -> StepInfo:  # type: ignore[override]
        """One iteration of Algorithm 1 on a gradient batch.

        Args:
            inputs: a tensor, a tuple (`model(*inputs)`) or a dict (`model(**inputs)`), rows along axis 0.
            targets: what the loss takes; any structure of tensors, or None.

        Returns:
            What happened. If an error is raised, parameters, buffers and state are as they were before; an interrupt that
            comes while they are written waits until they are.
        """
        ranks, config = self._connection.ranks(), self.config
        with self._context(self._device), ranks.step(), explained_exhaustion(config.microbatch) as demand:
            own, agreement = ranks.agree(lambda: self._prepare(inputs, targets, ranks))
            (share,), (batch, layout) = agreement.shares, own.data
            demand.rows, demand.separable = batch.rows, layout.separable
            strided = config.curvature_rows == "strided"
            seed = self._adopt(agreement.seed)
            make = partial(
                Objective,
                own.network,
                self.loss,
                batch,
                layout,
                curvature_rows=curvature_rows(share.total, config.curvature_batch, self.epoch_index, strided=strided),
                decay=self._decay(own.network),
                seed=seed,
                ranks=ranks,
                share=share,
            )
            mean, looks = None, 0  # at the curvature, for the first λ
            if is_unsettled(self._scalars):
                plain = make(settings=replace(self._settings, preconditioner=Preconditioner.NONE, noise=False))
                try:
                    mean, looks = mean_eigenvalue(plain, own.network.theta(), seed, ranks)
                except NonFiniteError as error:
                    return self._pass_over(error, batch)
            extras = make_extras(
                config, self._factors, own.network, self.state, self._scalars, mean, share.total, ranks
            )
            objective = make(settings=self._settings, renewal=extras.renewal)
            solver = make_solver(config, self._scalars, share.total)
            info = self._iterate(objective, own.network, ranks, batch, solver, extras)
            if looks == 0 or info.skipped is not None:
                return info
            return replace(info, gradients=info.gradients + 1, products=info.products + looks)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the parameters are the running average of the iterates (`averaging`); outside, they are as they were.

        Example:
            `with optimizer.averaged(): error = evaluate(model)`

        Buffers, such as the statistics of BatchNorm, are not averaged.
        """
        if not self.config.averaging:
            advice = "give averaging=0.95, say" if type(self.config) is Config else "only shf.SHF has it"
            raise RuntimeError(f"{type(self).__name__}(averaging=0): no average is kept; {advice}")
        with swapped(self.model.parameters(), self.state):
            before, self._averaged_now = self._averaged_now, True
            try:
                yield
            finally:
                self._averaged_now = before

    def next_epoch(self) -> None:
        """Begins the next epoch: γ ← min(1.01 γ, 0.99), β ← cβ, and the next curvature rows."""
        self.param_groups[0]["shf"] = at_next_epoch(self._scalars, self.config)

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
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues where `state_dict` was taken: δ, λ, γ, β, epoch, seed and the groups' weight decay come from it. What
        options remember that are off here is dropped."""
        if "shf" not in (state_dict.get("param_groups") or [{}])[0]:
            raise ValueError(
                f"the state was not saved by {type(self).__name__}: its first parameter group has no 'shf'"
            )
        refuse_other_shapes(state_dict, self.param_groups)
        super().load_state_dict(state_dict)
        self.param_groups = [Group(group) for group in self.param_groups]
        self.param_groups[0]["shf"] = forget_switched_off(self.config, self.state, self._scalars)
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

    def _prepare(self, inputs: Any, targets: Any, ranks: Collective) -> Contribution:
        """What can be found wrong before anything is computed, and this process's part of the batch."""
        if callable(inputs) and targets is None and self._count is count_rows:
            raise TypeError("step takes (inputs, targets), not a closure: it evaluates model and loss by itself")
        if isinstance(inputs, Tensor) and inputs.ndim == 0 and targets is None and self._count is count_rows:
            raise TypeError("step takes the batch, step(inputs, targets), not its loss, which it evaluates by itself")
        batch = Batch.of(inputs, targets, self._select, self._count, may_be_empty=ranks.several)
        network = self._network()
        refuse_unsupported(network, ranks)
        with explained_pair(inputs, targets):
            layout = self._find_layout(network, batch)
        return self._contribution(network, [batch.rows], (batch, layout))

    def _find_layout(self, network: Network, batch: Batch) -> Layout:
        """What model and loss do with rows; the loss and the model's second derivatives are looked at until it is clear."""
        if not batch.rows:
            return NO_ROWS
        seed = self._scalars["seed"]
        layout = self._layouts.find(network, batch, seed)
        if not self._probed:
            clear = refuse_contradictions(self.loss, network, batch, layout, seed)
            refuse_single_derivatives_on(network, few_rows(batch, layout), seed)
            self._probed = clear
        return layout

    def _contribution(self, network: Network, counts: Sequence[int], data: Any) -> Contribution:
        """This process's part in a step, with all that the other processes must have in common with it."""
        scalars, names = self._scalars, {id(p): name for name, p in self.model.named_parameters()}
        decay = {names[id(p)]: group["weight_decay"] for group in self.param_groups for p in group["params"]}
        settings = {
            "optimizer": type(self).__name__,
            "option": {name: getattr(self.config, name) for name in self.config.names()},
            "loss": f"{self.loss.name}, {self.loss.reduction.value}",
            "state": {name: value for name, value in scalars.items() if name != "seed"},
            "weight_decay": decay,
            "has a last CG solution": self._last_solution.there(self.state),
        }
        return Contribution(network, counts, scalars["seed"], settings, self.state, data)

    def _adopt(self, seed: int) -> int:
        """Takes over the processes' common seed; returns this iteration's."""
        if seed != self._scalars["seed"]:
            self.param_groups[0]["shf"] = {**self._scalars, "seed": seed}
        return mix(seed, self._scalars["iteration"])

    @property
    def _settings(self) -> Settings:
        return Settings.of(self.config, self._scalars["iteration"])

    def _network(self) -> Network:
        """The parameters to train now, in the model's order."""
        if self._averaged_now:
            raise RuntimeError("step inside `with optimizer.averaged()`: what it did would be lost; step outside")
        return Network(self.model, trainable(self.model, self.param_groups), self._forward)

    def _decay(self, network: Network) -> Decay:
        return Decay(network.shapes, decay_weights(network.parameters, self.param_groups))

    def _summed(self, problem: _Problem) -> int:
        """By what an objective is divided before it is compared with that of other batches, which may have more rows."""
        return problem.represents if self.loss.reduction is Reduction.SUM else 1

    def _iterate(
        self,
        problem: _Problem,
        network: Network,
        ranks: Collective,
        batch: Batch,
        solver: Solver,
        extras: Extras,
    ) -> StepInfo:
        """A step on this process's part of the vectors, and the writes that follow it."""
        scalars, last, size = self._scalars, self._last_solution, network.shapes.total
        state = State(
            delta=last.read(network, self.state, ranks),
            damping=extras.damping,
            cg_decay=self.cg_decay,
            update_scale=self.update_scale,
        )
        try:
            moved, after, info = shf_step(problem, state, self.config, solver, ranks.dot, extras.rule)
        except NonFiniteError as error:
            return self._pass_over(error, batch)
        theta = network.theta()
        theta_next = theta if moved is None else ranks.whole(moved, size)
        if info.accepted and self.config.max_norm is not None:
            groups = input_major_groups(network.model, network.parameters)
            clip_norms_(theta_next, network.shapes, self.config.max_norm, groups)
        if info.accepted and torch.equal(theta_next, theta):  # too short a step for the precision of θ
            info = replace(info, accepted=False, step_size=0.0, loss_after=info.loss_before)
        scalars = {
            **scalars,
            "damping": after.damping,
            "iteration": scalars["iteration"] + 1,
            "epoch_loss": scalars["epoch_loss"] + info.loss_before / self._summed(problem),
            "epoch_steps": scalars["epoch_steps"] + 1,
            "rejections": self._count_rejections(info, batch),
        }
        with no_interrupts(), self._all_or_nothing(network, theta):
            _assign_(network, theta_next)
            network.assign_buffers_(problem.buffers)
            last.write(after.delta, network, self.state, ranks)
            self.param_groups[0]["shf"] = {**scalars, **extras.write(theta, theta_next, info)}
        return info

    def _pass_over(self, error: NonFiniteError, batch: Batch) -> StepInfo:
        """A batch that is not finite: raises, or passes over it, and the next step is as if it had not been there."""
        if self.config.nonfinite != "skip":
            raise error
        info = StepInfo.of_skipped(self.damping, str(error))
        self.param_groups[0]["shf"] = {**self._scalars, "rejections": self._count_rejections(info, batch)}
        return info

    def _count_rejections(self, info: StepInfo, batch: Batch) -> int:
        """Steps in a row that did not move the parameters, this one included; a warning when they are too many.

        It comes before anything is written: where warnings are errors, the step has not happened.
        """
        rejections = 0 if info.accepted else int(self._scalars["rejections"]) + 1
        if rejections == self.config.max_rejections:
            warn(diagnose(info, rejections, batch, self._described))
        return rejections

    @contextmanager
    def _all_or_nothing(self, network: Network, theta: Tensor) -> Iterator[None]:
        """The writes of a step; if anything interrupts them, what was written is taken back."""
        buffers, scalars, last = network.buffers(), self._scalars, copy.copy(self._last_solution)
        states: dict[Tensor, Any] = dict(self.state)
        try:
            yield
        except BaseException:
            _assign_(network, theta)
            network.assign_buffers_(buffers)
            self.state.clear()
            self.state.update(states)
            self._last_solution = last
            self.param_groups[0]["shf"] = scalars
            raise


@torch.no_grad()
def _assign_(network: Network, theta: Tensor) -> None:
    for p, value in zip(network.parameters, network.shapes.split(theta), strict=True):
        p.copy_(value)


def _communication(config: Config) -> Communication:
    dtype = torch.bfloat16 if config.message_dtype == "bfloat16" else None
    return Communication(dtype, config.check_every, config.rank_timeout, config.split_vectors)
