"""What an optimizer's steps are about: one loss on one batch, and what the parts of a step need to know of it."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from shf.data.batches import Batch, count_rows, explained_pair
from shf.distributed.collective import Collective
from shf.distributed.contribution import Contribution
from shf.groups import decay_weights
from shf.linear.decay import Decay
from shf.losses import Loss
from shf.model.network import Network, call_model
from shf.probing.layout import Layout
from shf.problems.batch import BatchProblem
from shf.problems.part import OwnPart
from shf.state import OptimizerState
from shf.subject import Groups, Subject


class Piece(NamedTuple):
    """A batch of a step with the loss and the network that it is for, and how that treats rows."""

    loss: Loss
    network: Network
    batch: Batch
    layout: Layout

    @classmethod
    def of(
        cls, subject: Subject, pair: tuple[Any, Any], groups: Groups, ranks: Collective, *, may_be_empty: bool
    ) -> "Piece":
        """Made of inputs and targets; before anything is computed, an error for what can be found wrong."""
        batch = subject.batch(*pair, may_be_empty=may_be_empty)
        network = subject.network(groups, ranks)
        with explained_pair(*pair):
            return cls(subject.loss, network, batch, subject.layout(network, batch, groups[0]["shf"]["seed"]))


class Objective:
    """L(F(x), t) of one loss and one way to call the model; `shf.terms` has the sum of several.

    Attributes:
        subject: the model and its loss.
        required: what a step must have rows of, in words.
    """

    required: Sequence[str] = ("the batch",)

    def __init__(self, subject: Subject) -> None:
        self.subject = subject

    @property
    def losses(self) -> Loss | Mapping[str, Loss]:
        """What `optimizer.loss` is."""
        return self.subject.loss

    def facts(self) -> Mapping[str, Any]:
        """What the other processes must have in common with this one."""
        return {"loss": in_words(self.subject.loss)}

    def pieces(self, inputs: Any, targets: Any, groups: Groups, ranks: Collective) -> list[Piece]:
        """The batches of a step."""
        subject = self.subject
        plain = targets is None and subject.count is count_rows
        if callable(inputs) and plain:
            raise TypeError("step takes (inputs, targets), not a closure: it evaluates model and loss by itself")
        if isinstance(inputs, Tensor) and inputs.ndim == 0 and plain:
            raise TypeError("step takes the batch, step(inputs, targets), not its loss, which it evaluates by itself")
        if plain and subject.forward is call_model and _is_of_pairs(inputs):
            raise TypeError(
                f"step got a mapping of pairs ({', '.join(map(repr, inputs))}), as for an objective of several terms, but "
                f"the optimizer has one loss, {subject.loss.name}: expected step(inputs, targets); for terms give the "
                "optimizer a mapping of them in place of the loss, name → shf.Term"
            )
        return [Piece.of(subject, (inputs, targets), groups, ranks, may_be_empty=ranks.several)]

    def joined(self, parts: Sequence[BatchProblem]) -> OwnPart:
        """The problem of a step from those of its pieces."""
        (part,) = parts
        return part

    def whole(self, pieces: Sequence[Piece]) -> Batch:
        """All rows of a step, to be described."""
        (piece,) = pieces
        return piece.batch

    def decay(self, network: Network, groups: Groups) -> Decay:
        """w for every parameter."""
        return Decay(network.shapes, decay_weights(network.parameters, groups))

    def contribution(
        self,
        network: Network,
        counts: Sequence[int],
        groups: Groups,
        settings: Mapping[str, Any],
        state: OptimizerState,
        data: Any,
    ) -> Contribution:
        """One process's part in a step, with all that the other processes must have in common with it."""
        names = {id(p): name for name, p in self.subject.model.named_parameters()}
        decay = {names[id(p)]: group["weight_decay"] for group in groups for p in group["params"]}
        facts = {**settings, **self.facts(), "weight_decay": decay}
        return Contribution(network, counts, groups[0]["shf"]["seed"], facts, state, data, self.required)


def in_words(loss: Loss) -> str:
    """Of a loss, for comparison with another's."""
    return f"{loss.name}, {loss.reduction.value}"


def _is_of_pairs(inputs: Any) -> bool:
    return (
        isinstance(inputs, Mapping)
        and bool(inputs)
        and all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in inputs.values())
    )
