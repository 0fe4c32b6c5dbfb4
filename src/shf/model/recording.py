"""Which modules were called in a forward pass, with what, and what came out."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.utils.rnn import PackedSequence
from torch.utils.hooks import RemovableHandle


@dataclass(frozen=True)
class Call:
    """One call of a module that owns parameters: its input and output tensor, or None where they are not single tensors;
    where the output stands in the graph, also if it is overwritten; and whether the input was a packed sequence."""

    input: Tensor | None
    output: Tensor | None
    version: int
    edge: GradientEdge | None = None
    packed: bool = False

    @property
    def intact(self) -> bool:
        """Whether the output is still what the module returned (an in-place activation overwrites it)."""
        return self.output is not None and self.output._version == self.version


@dataclass
class Calls:
    """The calls of each module, in order."""

    of: dict[nn.Module, list[Call]] = field(default_factory=dict)

    @classmethod
    @contextmanager
    def recorded(cls, modules: Iterable[nn.Module]) -> Iterator["Calls"]:
        """Records the calls, made inside the block, of these modules."""
        calls = cls()

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            single = _lasting(args[0]) if len(args) == 1 and not kwargs else None
            result = _lasting(output)
            edge = get_gradient_edge(result) if result is not None and result.requires_grad else None
            version = result._version if result is not None else -1
            packed = any(isinstance(a, PackedSequence) for a in args)
            calls.of.setdefault(module, []).append(Call(single, result, version, edge, packed))

        handles: list[RemovableHandle] = []
        try:
            for module in modules:
                handles.append(module.register_forward_hook(hook, with_kwargs=True))
            yield calls
        finally:
            for handle in handles:
                handle.remove()


def _lasting(value: Any) -> Tensor | None:
    """A tensor that is one outside of torch.func's transformations too: those of vmap and grad die with them."""
    return value if isinstance(value, Tensor) and not is_functorch_wrapped_tensor(value) else None
