"""A module as a function of its parameters and buffers: nothing here writes to the module."""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from shf.flat import Shapes
from shf.interruption import poll
from shf.tree import parts

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


_PREFIX = "model."


def _all_names(named: Iterable[tuple[str, Tensor]]) -> dict[int, list[str]]:
    """Every name that a tensor has inside `_Bound`, by the tensor's identity: several for tied ones."""
    names: dict[int, list[str]] = {}
    for name, tensor in named:
        names.setdefault(id(tensor), []).append(_PREFIX + name)
    return names


class Network:
    """F(x; θ): the outputs of a module at any values of some of its parameters.

    Args:
        model: the module; its training flags are respected as they are at each call.
        parameters: the parameters that make up θ, in the order of the flat vector.
        forward: how to call it.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter], forward: Forward = call_model) -> None:
        self.model = model
        self.parameters = list(parameters)
        self.shapes = Shapes.of(self.parameters)
        names = _all_names(model.named_parameters(remove_duplicate=False))
        if foreign := [tuple(p.shape) for p in self.parameters if id(p) not in names]:
            raise ValueError(f"parameters of shape {foreign} do not belong to the model")
        self.names = [names[id(p)][0].removeprefix(_PREFIX) for p in self.parameters]
        self._keys = [names[id(p)] for p in self.parameters]
        self._all_keys = names
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
        return {keys[0]: buffer.detach().clone() for buffer, keys in self._buffers}

    def __call__(self, values: Sequence[Tensor], inputs: Any, buffers: dict[str, Tensor] | None = None) -> Any:
        """The model's outputs with θ = `values`. Changes of buffers go into `buffers` (by default: are dropped)."""
        poll()
        buffers = self.buffers() if buffers is None else buffers
        replaced = self._by_name(values, buffers)
        try:
            with plain_gradients(self.model):
                outputs = functional_call(
                    self._bound, replaced, (inputs,), tie_weights=False
                )  # all names are there: faster
        except RuntimeError as error:
            if torch.is_grad_enabled() or "does not require grad" not in str(error):
                raise
            raise RuntimeError(
                "the model differentiates in its forward, and a step evaluates it without gradients too: put "
                "`with torch.enable_grad():` around what is differentiated there"
            ) from error
        buffers.update({key: replaced[key] for key in buffers})
        return outputs

    def around(self, run: Callable[[], Result], values: Sequence[Tensor], before: Mapping[str, Tensor]) -> Result:
        """Runs a backward pass, in which gradient checkpointing may run parts of the model again: they see θ and buffers as
        in their first run, and leave the module's buffers alone.

        Args:
            run: the backward pass.
            values: θ of the forward pass.
            before: the buffers that it changed, as they were; without any, nothing needs to be replaced.
        """
        if not before and not self._elsewhere:
            return run()
        copies = {key: buffer.clone() for key, buffer in before.items()}
        result: Result = functional_call(self._around, self._by_name(values, copies), (run,), tie_weights=False)
        return result

    def changed(self, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The module's own buffers, copied, of which a pass has left other values."""
        return {
            keys[0]: buffer.detach().clone()
            for buffer, keys in self._buffers
            if not _equal(buffer.detach(), buffers[keys[0]])
        }

    def _by_name(self, values: Sequence[Tensor], buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What stands for the model's parameters and for these of its buffers, under all of their names."""
        replaced = {key: value for p, value in self._elsewhere.items() for key in self._all_keys[id(p)]}
        replaced |= {key: value for keys, value in zip(self._keys, values, strict=True) for key in keys}
        return replaced | {key: buffers[keys[0]] for _, keys in self._buffers if keys[0] in buffers for key in keys}

    def spoiled(self, buffers: Mapping[str, Tensor]) -> list[str]:
        """The names of buffers that would become not finite where they are finite now (running statistics, by overflow)."""
        own, names = dict(self.model.named_buffers()), []
        for key, new in buffers.items():
            old = own[key.removeprefix(_PREFIX)]
            alike = old.shape == new.shape and old.layout == new.layout == torch.strided
            if alike and new.is_floating_point() and bool((new.isfinite() < old.isfinite()).any()):
                names.append(key.removeprefix(_PREFIX))
        return names

    def refuse_reshaped(self, buffers: Mapping[str, Tensor]) -> None:
        """Refuses a pass that has changed a buffer's shape: it could not be written back in place."""
        own = {_PREFIX + name: buffer.shape for name, buffer in self.model.named_buffers()}
        for key, new in buffers.items():
            if new.shape != own[key]:
                raise ValueError(
                    f"buffer {key.removeprefix(_PREFIX)} has shape {tuple(own[key])}, and {tuple(new.shape)} after a pass: "
                    "expected one shape; register it with its final one, or keep such things outside of buffers"
                )

    @torch.no_grad()
    def assign_buffers_(self, buffers: Mapping[str, Tensor]) -> None:
        """Writes those buffers (as `buffers()` names them) into the module that differ from its own: into expanded and some
        sparse ones, which models do not change, torch cannot write."""
        own = dict(self.model.named_buffers())
        for key, value in buffers.items():
            if not _equal(buffer := own[key.removeprefix(_PREFIX)], value):
                buffer.copy_(value)


def _equal(a: Tensor, b: Tensor) -> bool:
    """Bitwise, of sparse tensors too; NaN differs from itself."""
    return a.layout == b.layout and a.shape == b.shape and all(map(torch.equal, parts(a), parts(b)))


@contextmanager
def twice_differentiable_kernels(device: torch.device, *, recurrent: bool = True) -> Iterator[None]:
    """Kernels whose backward can itself be differentiated, inside this block only.

    Fused attention and cuDNN's recurrent kernels have no second derivative: attention uses its mathematical form here,
    and cuDNN is set aside if there are recurrent layers. The fast path of transformer layers in eval mode, which torch
    takes only where no gradient is wanted, is shut: with a padding mask it computes another function. Autocast is off:
    curvature in half precision is noise.
    """
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with (
            sdpa_kernel(SDPBackend.MATH),
            torch.backends.cudnn.flags(enabled=False) if recurrent else nullcontext(),
            torch.autocast(device.type, enabled=False),
        ):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


def is_recurrent(model: nn.Module) -> bool:
    """Whether it has layers for which torch would take cuDNN's recurrent kernels."""
    return any(isinstance(m, nn.RNNBase) for m in model.modules())


def set_aside(model: nn.Module, device: torch.device) -> list[str]:
    """What the user has switched on and a step will not use, in words."""
    found = []
    if torch.is_autocast_enabled(device.type):
        found.append("autocast is on: SHF switches it off inside step, where half precision would drown the curvature")
    if device.type == "cuda" and torch.backends.cudnn.enabled and is_recurrent(model):
        found.append(
            "cuDNN's recurrent kernels cannot be differentiated twice: SHF uses torch's own, slower ones inside step, and "
            "cuDNN everywhere else"
        )
    return found
