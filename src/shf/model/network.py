"""A module as a function of its parameters and buffers: nothing here writes to the module but `assign_buffers_`."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shf.data.tree import leaves, parts
from shf.linear.flat import Shapes, read
from shf.model.convolution import OwnConvolutions
from shf.model.evaluation import Evaluation
from shf.model.fingerprint import plain_attributes
from shf.model.zeros import Zeros
from shf.runtime.interrupts import poll

Result = TypeVar("Result")
Forward = Callable[[nn.Module, Any], Any]

REFUSALS = (RuntimeError, ValueError, IndexError, TypeError, AssertionError, ZeroDivisionError)
"""What models and losses raise that cannot do with a few rows."""


def call_model(model: nn.Module, inputs: Any) -> Any:
    """The convention for inputs: a tuple is `model(*inputs)`, a dict `model(**inputs)`, all else `model(inputs)`."""
    if isinstance(inputs, tuple) and not hasattr(inputs, "_fields"):
        return model(*inputs)
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(inputs)


def call_for_tensor(model: nn.Module, inputs: Any) -> Any:
    """The convention where the loss takes one tensor: of several outputs the only one of floating-point numbers with the
    inputs' rows."""
    outputs = model(inputs) if isinstance(inputs, Tensor) else call_model(model, inputs)
    if isinstance(outputs, Tensor):
        return outputs
    named = _named(outputs)
    rows = {len(z) for z in leaves(inputs) if z.ndim}
    fits = [z for z in named.values() if isinstance(z, Tensor) and z.is_floating_point() and z.ndim and len(z) in rows]
    if len(fits) == 1:
        return fits[0]
    call = "model(**inputs)" if isinstance(inputs, Mapping) else f"model({'*' * isinstance(inputs, tuple)}inputs)"
    name = "logits" if "logits" in named or not named else next(iter(named))
    which = f"[{name!r}]" if isinstance(outputs, Mapping | tuple | list) else f".{name}"
    raise TypeError(
        f"{type(model).__name__} returns a {type(outputs).__name__} ({', '.join(map(str, named))}), of which {len(fits)} "
        "are floating-point tensors with the batch's rows, and the loss takes one tensor: say which it is, "
        f"shf.SHF(model, loss, forward=lambda model, inputs: {call}{which})"
    )


def _named(outputs: Any) -> dict[Any, Any]:
    """The parts of what a model returns, by name or number."""
    if isinstance(outputs, Mapping):
        return dict(outputs)
    if is_dataclass(outputs):
        return {field.name: getattr(outputs, field.name) for field in fields(outputs)}
    return dict(enumerate(outputs)) if isinstance(outputs, tuple | list) else {}


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside DataParallel, DistributedDataParallel and torch.compile.

    Their wrappers cannot be differentiated twice; the module inside can, and shares all parameters with them.
    """
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


_PLAIN = {"sparse": False, "scale_grad_by_freq": False}


class _PlainGradients(TorchFunctionMode):
    """`F.embedding` as if neither `sparse` nor `scale_grad_by_freq` were set."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        return func(*args, **(kwargs | _PLAIN if func is F.embedding else kwargs))


def plain_gradients(modules: Iterable[nn.Module]) -> AbstractContextManager[object]:
    """Inside, embeddings give their gradient as it is: a sparse one is no part of a flat vector, and one that is scaled by
    how often rows occur is not the objective's."""
    special = any(isinstance(m, nn.Embedding) and (m.sparse or m.scale_grad_by_freq) for m in modules)
    return _PlainGradients() if special else nullcontext()


Slot = tuple[nn.Module, str]
"""Where a module holds a tensor, and under which name."""


def _slots(modules: Iterable[nn.Module], kind: str) -> dict[int, list[Slot]]:
    """Every place that holds a tensor, by the tensor's identity: several where it is shared."""
    found: dict[int, list[Slot]] = {}
    for module in modules:
        for name, tensor in () if isinstance(module, torch.jit.ScriptModule) else getattr(module, kind).items():
            if tensor is not None:
                found.setdefault(id(tensor), []).append((module, name))
    return found


class Network:
    """F(x; θ): the outputs of a module at any values of some of its parameters.

    Args:
        model: the module; its training flags are respected as they are at each call.
        parameters: the parameters that make up θ, in the order of the flat vector.
        forward: how to call it.
        evaluation: how it is run, as far as that is known.

    Attributes:
        shapes: of the parameters.
        names: of the parameters, the first where there are several.
        modules: all of the model's, itself included.
        holders: those of them that own parameters directly.
        attributes: plain ones of the modules, and their modes.
        zeros: of its second graphs.
        draws_nothing: whether its last pass drew no random numbers.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        forward: Forward = call_model,
        evaluation: Evaluation | None = None,
    ) -> None:
        self.model = model
        self.evaluation = evaluation or Evaluation()
        self.parameters = list(parameters)
        self.shapes = Shapes.of(self.parameters)
        self.modules = list(model.modules())
        names = {id(p): name for name, p in model.named_parameters()}
        if foreign := [tuple(p.shape) for p in self.parameters if id(p) not in names]:
            raise ValueError(f"parameters of shape {foreign} do not belong to the model")
        self.names = [names[id(p)] for p in self.parameters]
        self._forward = forward
        self._elsewhere: Mapping[nn.Parameter, Tensor] = {}  # values that stand for parameters', trained or not
        self._places = _slots(self.modules, "_parameters")
        self._slots = [self._places.get(id(p), []) for p in self.parameters]  # none inside of TorchScript
        buffers = _slots(self.modules, "_buffers")
        self._buffers = [(name, b, buffers.get(id(b), [])) for name, b in model.named_buffers()]
        self.holders = [m for m in self.modules if next(m.parameters(recurse=False), None) is not None]
        self.attributes = tuple(map(plain_attributes, self.modules))
        self.zeros, self.draws_nothing = Zeros(), False
        self._embeddings = [m for m in self.modules if isinstance(m, nn.Embedding)]
        self._found: dict[Callable[[Network], Any], Any] = {}

    def once(self, find: Callable[["Network"], Result]) -> Result:
        """What a function finds in the model, found once: where the model changes, there is another network."""
        if find not in self._found:
            self._found[find] = find(self)
        found: Result = self._found[find]
        return found

    def is_held_once(self, parameter: Tensor) -> bool:
        """Whether one module holds a parameter under one name; more do where weights are tied."""
        return len(self._places.get(id(parameter), ())) == 1

    @property
    def device(self) -> torch.device:
        return self.parameters[0].device

    def theta(self) -> Tensor:
        """A flat copy of the parameters as they are now."""
        with torch.no_grad():
            return self.shapes.flatten([p.detach() for p in self.parameters], self.parameters[0])

    def at(self, values: Mapping[nn.Parameter, Tensor]) -> "Network":
        """The same network with other values for some of the model's parameters, which may be frozen ones."""
        other = copy.copy(self)
        other._elsewhere, other._found = values, {}
        return other

    def leaves(self) -> list[Tensor]:
        """The parameters' values (not copied) as fresh leaves to differentiate by."""
        values = [self._elsewhere.get(p, p) for p in self.parameters] if self._elsewhere else self.parameters
        return [value.detach().requires_grad_() for value in values]

    def buffers(self) -> dict[str, Tensor]:
        """A copy of the module's buffers, for a pass that may change them."""
        return {name: buffer.detach().clone() for name, buffer, _ in self._buffers}

    def __call__(self, values: Sequence[Tensor], inputs: Any, buffers: dict[str, Tensor] | None = None) -> Any:
        """The model's outputs with θ = `values`. Changes of buffers go into `buffers`, a copy of the module's own; without
        one they are dropped."""
        poll()
        if torch.is_grad_enabled():
            return self._run(values, inputs, self.buffers() if buffers is None else buffers)

        return self.evaluation(partial(self._evaluate, inputs, buffers), values)

    def _evaluate(self, inputs: Any, buffers: dict[str, Tensor] | None, values: Sequence[Tensor]) -> Any:
        fresh = self.buffers()
        outputs = self._run(values, inputs, fresh)
        if buffers is not None:
            buffers.update(fresh)
        return outputs

    def _run(self, values: Sequence[Tensor], inputs: Any, buffers: dict[str, Tensor]) -> Any:
        convolves = self.evaluation.convolves and torch.is_grad_enabled()
        if not self._embeddings and not convolves:
            with self._holding(values, buffers):
                return self._forward(self.model, inputs)
        rules = OwnConvolutions() if convolves else nullcontext()
        with self._holding(values, buffers), plain_gradients(self._embeddings), rules:
            return self._forward(self.model, inputs)

    @property
    def needs_nothing_around(self) -> bool:
        """Whether backward passes are what they are, unless buffers changed."""
        return not self._elsewhere and not self.evaluation.convolves

    @contextmanager
    def around(self, values: Sequence[Tensor], before: Mapping[str, Tensor]) -> Iterator[None]:
        """Around a backward pass, in which gradient checkpointing may run parts of the model again: they see θ and buffers
        as in their first run, and leave the module's buffers alone.

        Args:
            values: θ of the forward pass.
            before: the buffers that it changed, as they were; without any, nothing needs to be replaced.
        """
        with OwnConvolutions() if self.evaluation.convolves else nullcontext():  # what is run again is what it was
            if not before and not self._elsewhere:
                yield
                return
            with self._holding(values, {name: buffer.clone() for name, buffer in before.items()}):
                yield

    @contextmanager
    def _holding(self, values: Sequence[Tensor], buffers: dict[str, Tensor]) -> Iterator[None]:
        """Inside, the modules hold these values in place of their parameters and of these buffers; what has become of the
        buffers is in `buffers` afterwards."""
        others = [(self._places[id(p)], value) for p, value in self._elsewhere.items()]
        held: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for slots, value in (*others, *zip(self._slots, values, strict=True)):
                for module, name in slots:
                    held.append((module._parameters, name, module._parameters[name]))
                    module._parameters[name] = value  # type: ignore[assignment]
            for full, _, slots in self._buffers if buffers else ():
                for module, name in slots if full in buffers else ():
                    held.append((module._buffers, name, module._buffers[name]))
                    module._buffers[name] = buffers[full]
            yield
            for full, _, slots in self._buffers if buffers else ():
                if full in buffers:
                    module, name = slots[0]
                    buffers[full] = module._buffers[name]  # type: ignore[assignment]
        finally:
            for place, name, tensor in reversed(held):
                place[name] = tensor

    def changed(self, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The module's own buffers, copied, of which a pass has left other values."""
        if not self._buffers:
            return {}
        differ = _differ([(buffer.detach(), buffers[name]) for name, buffer, _ in self._buffers])
        own = zip(self._buffers, differ, strict=True)
        return {name: buffer.detach().clone() for (name, buffer, _), other in own if other}

    def spoiled(self, buffers: Mapping[str, Tensor]) -> list[str]:
        """The names of buffers that would become not finite where they are finite now (running statistics, by overflow)."""
        if not buffers:
            return []
        own, lost = dict(self.model.named_buffers()), {}
        for name, new in buffers.items():
            old = own[name]
            if _dense_alike(old, new) and new.is_floating_point():
                lost[name] = (new.isfinite() < old.isfinite()).any()
        return [name for name, some in zip(lost, _told(list(lost.values())), strict=True) if some]

    def refuse_reshaped(self, buffers: Mapping[str, Tensor]) -> None:
        """Refuses a pass that has changed a buffer's shape: it could not be written back in place."""
        own = dict(self.model.named_buffers()) if buffers else {}
        for name, new in buffers.items():
            if new.shape != own[name].shape:
                raise ValueError(
                    f"buffer {name} has shape {tuple(own[name].shape)}, and {tuple(new.shape)} after a pass: "
                    "expected one shape; register it with its final one, or keep such things outside of buffers"
                )

    @torch.no_grad()
    def assign_buffers_(self, buffers: Mapping[str, Tensor]) -> None:
        """Writes those buffers (as `buffers()` names them) into the module that differ from its own: into expanded and some
        sparse ones, which models do not change, torch cannot write."""
        if not buffers:
            return
        own = dict(self.model.named_buffers())
        pairs = [(own[name], value) for name, value in buffers.items()]
        for (buffer, value), other in zip(pairs, _differ(pairs), strict=True):
            if other:
                buffer.copy_(value)


def _differ(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[bool]:
    """Whether two tensors differ, sparse ones too, for each pair; NaN differs from itself."""
    dense = [_dense_alike(a, b) for a, b in pairs]
    told = iter(_told([a.ne(b).any() for (a, b), alike in zip(pairs, dense, strict=True) if alike]))
    return [next(told) if alike else not _equal(a, b) for (a, b), alike in zip(pairs, dense, strict=True)]


def _dense_alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.layout == b.layout == torch.strided


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.layout == b.layout and a.shape == b.shape and all(map(torch.equal, parts(a), parts(b)))


def _told(flags: Sequence[Tensor]) -> list[bool]:
    """What they are, of buffers that may lie on several devices; the first one's is asked once."""
    return [bool(flag) for flag in read(*[flag.to(flags[0].device) for flag in flags])]
