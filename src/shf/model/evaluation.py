"""Running a model where nobody wants its gradients; models that differentiate in their forward work there too."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from shf.data.tree import map_leaves

Result = TypeVar("Result")

_WORDS = ("does not require grad", "doesn't require gradient", "requires_grad=False")
"""What torch says where something is differentiated that has no graph."""


class Evaluation:
    """How a model is run without gradients, as far as it is known.

    Attributes:
        level: 0 without graphs, as nearly all models can be. 1 with graphs from the inputs on, for models that differentiate
            by them: those of trial parameters, which would cost as much again, are left out. 2 with all graphs, for models
            that differentiate by parameters.
        convolves: whether there are convolutions in the graphs of its gradients.
    """

    MOST = 2

    def __init__(self) -> None:
        self.level = 0
        self.convolves = False

    def __call__(self, run: Callable[[Sequence[Tensor]], Result], values: Sequence[Tensor]) -> Result:
        """`run` on these parameters (called under no_grad), without a graph behind what it returns.

        Where torch misses a graph, it runs again on a higher level, from the same random numbers, and so it does from then
        on. The error is the model's own if no level helps.
        """
        known, position = (
            self.level,
            torch.default_generator.initial_seed(),
        )  # draws follow from the seed, see data.draws
        while True:
            try:
                if self.level == 0:
                    return run(values)
                with torch.enable_grad():
                    found = run([v.detach().requires_grad_(self.level > 1) for v in values])
                return map_leaves(Tensor.detach, found)  # type: ignore[no-any-return]
            except RuntimeError as error:
                if self.level == self.MOST or not any(words in str(error) for words in _WORDS):
                    self.level = known
                    raise
                self.level += 1
                torch.default_generator.manual_seed(position)
