"""A module as a function of its parameters and buffers: nothing here writes to the module but `assign_buffers_`."""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from shf.data.tree import leaves, parts
from shf.linear.flat import Shapes
from shf.model.convolution import OwnConvolutions
from shf.model.evaluation import Evaluation
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


class _Bound(nn.Module):
    """The model together with how it is called, so that functional_call can replace parameters under any convention."""

    def __init__(self, model: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.model = model
        self._forward = forward

    def forward(self, inputs: Any) -> Any:
        return self._forward(self.model, inputs)


class _Around(nn.Module):
    """The model around something else that is run, so that functional_call can replace its parameters meanwhile."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[], Result]) -> Result:
        return run()


_PLAIN = {"sparse": False, "scale_grad_by_freq": False}


class _PlainGradients(TorchFunctionMode):
    """`F.embedding` as if neither `sparse` nor `scale_grad_by_freq` were set."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        return func(*args, **(kwargs | _PLAIN if func is F.embedding else kwargs))


def plain_gradients(module: nn.Module) -> AbstractContextManager[object]:
    """Inside, embeddings give their gradient as it is: a sparse one is no part of a flat vector, and one that is scaled by
    how often rows occur is not the objective's."""
    special = any(isinstance(m, nn.Embedding) and (m.sparse or m.scale_grad_by_freq) for m in module.modules())
    return _PlainGradients() if special else nullcontext()


def holders(model: nn.Module) -> dict[int, int]:
    """How many modules hold each parameter, by its identity: more than one where weights are tied."""
    return Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))


def _all_names(named: Iterable[tuple[str, Tensor]]) -> dict[int, list[str]]:
    """Every name that a tensor has in the model, by the tensor's identity: several for tied ones."""
    names: dict[int, list[str]] = {}
    for name, tensor in named:
        names.setdefault(id(tensor), []).append(name)
    return names


class Network:
    """F(x; θ): the outputs of a module at any values of some of its parameters.

    Args:
        model: the module; its training flags are respected as they are at each call.
        parameters: the parameters that make up θ, in the order of the flat vector.
        forward: how to call it.
        evaluation: how it is run, as far as that is known.
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
        names = _all_names(model.named_parameters(remove_duplicate=False))
        if foreign := [tuple(p.shape) for p in self.parameters if id(p) not in names]:
            raise ValueError(f"parameters of shape {foreign} do not belong to the model")
        self._names = [names[id(p)] for p in self.parameters]
        self.names = [first for first, *_ in self._names]
        self._all_names = names
        self._elsewhere: Mapping[nn.Parameter, Tensor] = {}  # values that stand for parameters', trained or not
        shared = _all_names(model.named_buffers(remove_duplicate=False))
        self._buffers = [(b, shared[id(b)]) for b in model.buffers()]
        self._bound = _Bound(model, forward)
        self._around = _Around(model)

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
        other._elsewhere = values
        return other

    def leaves(self) -> list[Tensor]:
        """The parameters' values (not copied) as fresh leaves to differentiate by."""
        return [self._elsewhere.get(p, p).detach().requires_grad_() for p in self.parameters]

    def buffers(self) -> dict[str, Tensor]:
        """A copy of the module's buffers, for a pass that may change them."""
        return {names[0]: buffer.detach().clone() for buffer, names in self._buffers}

    def __call__(self, values: Sequence[Tensor], inputs: Any, buffers: dict[str, Tensor] | None = None) -> Any:
        """The model's outputs with θ = `values`. Changes of buffers go into `buffers`, a copy of the module's own; without
        one they are dropped."""
        poll()
        if torch.is_grad_enabled():
            return self._run(values, inputs, self.buffers() if buffers is None else buffers)

        def run(values: Sequence[Tensor]) -> Any:
            fresh = self.buffers()
            outputs = self._run(values, inputs, fresh)
            if buffers is not None:
                buffers.update(fresh)
            return outputs

        return self.evaluation(run, values)

    def _run(self, values: Sequence[Tensor], inputs: Any, buffers: dict[str, Tensor]) -> Any:
        replaced = self._by_name(values, buffers)
        rules = OwnConvolutions() if self.evaluation.convolves and torch.is_grad_enabled() else nullcontext()
        with (
            plain_gradients(self.model),
            rules,
        ):  # tied weights have all their names there: torch need not look for them
            outputs = functional_call(self._bound, replaced, (inputs,), tie_weights=False)
        buffers.update({name: replaced[f"model.{name}"] for name in buffers})
        return outputs

    def around(self, run: Callable[[], Result], values: Sequence[Tensor], before: Mapping[str, Tensor]) -> Result:
        """Runs a backward pass, in which gradient checkpointing may run parts of the model again: they see θ and buffers as
        in their first run, and leave the module's buffers alone.

        Args:
            run: the backward pass.
            values: θ of the forward pass.
            before: the buffers that it changed, as they were; without any, nothing needs to be replaced.
        """
        with OwnConvolutions() if self.evaluation.convolves else nullcontext():  # what is run again is what it was
            if not before and not self._elsewhere:
                return run()
            copies = {name: buffer.clone() for name, buffer in before.items()}
            result: Result = functional_call(self._around, self._by_name(values, copies), (run,), tie_weights=False)
            return result

    def changed(self, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The module's own buffers, copied, of which a pass has left other values."""
        return {
            names[0]: buffer.detach().clone()
            for buffer, names in self._buffers
            if not _equal(buffer.detach(), buffers[names[0]])
        }

    def _by_name(self, values: Sequence[Tensor], buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What stands for the model's parameters and for these of its buffers, under all the names that they have in a
        module around the model."""
        found = {name: value for p, value in self._elsewhere.items() for name in self._all_names[id(p)]}
        found |= {name: value for names, value in zip(self._names, values, strict=True) for name in names}
        found |= {name: buffers[names[0]] for _, names in self._buffers if names[0] in buffers for name in names}
        return {f"model.{name}": value for name, value in found.items()}

    def spoiled(self, buffers: Mapping[str, Tensor]) -> list[str]:
        """The names of buffers that would become not finite where they are finite now (running statistics, by overflow)."""
        own, names = dict(self.model.named_buffers()), []
        for name, new in buffers.items():
            old = own[name]
            alike = old.shape == new.shape and old.layout == new.layout == torch.strided
            if alike and new.is_floating_point() and bool((new.isfinite() < old.isfinite()).any()):
                names.append(name)
        return names

    def refuse_reshaped(self, buffers: Mapping[str, Tensor]) -> None:
        """Refuses a pass that has changed a buffer's shape: it could not be written back in place."""
        own = dict(self.model.named_buffers())
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
        own = dict(self.model.named_buffers())
        for name, value in buffers.items():
            if not _equal(own[name], value):
                own[name].copy_(value)


def _equal(a: Tensor, b: Tensor) -> bool:
    """Bitwise, of sparse tensors too; NaN differs from itself."""
    return a.layout == b.layout and a.shape == b.shape and all(map(torch.equal, parts(a), parts(b)))
