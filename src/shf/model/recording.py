"""Which modules were called in a forward pass, with what, and what came out."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Call:
    """One call of a module that owns parameters: its input and output tensor, or None where they are not single tensors."""

    input: Tensor | None
    output: Tensor | None
    version: int

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
    def recorded(cls, model: nn.Module, *, enabled: bool = True) -> Iterator["Calls"]:
        """Records the calls, made inside the block, of every module that owns parameters directly."""
        calls = cls()

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            single = args[0] if len(args) == 1 and not kwargs and isinstance(args[0], Tensor) else None
            result = output if isinstance(output, Tensor) else None
            calls.of.setdefault(module, []).append(Call(single, result, result._version if result is not None else -1))

        with ExitStack() as stack:
            if enabled:
                for module in model.modules():
                    if next(module.parameters(recurse=False), None) is not None:
                        stack.enter_context(module.register_forward_hook(hook, with_kwargs=True))
            yield calls
