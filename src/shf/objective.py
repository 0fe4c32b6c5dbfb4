"""What an optimizer's steps are about: one loss on one batch, and what the parts of a step need to know of it."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from shf.closure import STEP, Given, explain_batch, is_closure, of_closure, pair_of, refuse_missing, tried
from shf.data.batches import Batch, count_rows
from shf.distributed.collective import Collective
from shf.distributed.contribution import Contribution
from shf.groups import decay_weights
from shf.linear.decay import Decay
from shf.losses import Loss
from shf.model.network import Network, call_model
from shf.problems.batch import BatchProblem
from shf.problems.part import OwnPart
from shf.state import OptimizerState
from shf.subject import Groups, Piece, Subject


class Objective:
    """L(F(x), t) of one loss and one way to call the model; `shf.terms` has the sum of several.

    Attributes:
        subject: the model and its loss.
        required: what a step must have rows of, in words.
        call: how a step is called, in words.
    """

    required: Sequence[str] = ("the batch",)
    call = STEP

    def __init__(self, subject: Subject) -> None:
        self.subject = subject

    @property
    def subjects(self) -> Mapping[Any, Subject]:
        """Of each term, by name; of one loss, by none."""
        return {None: self.subject}

    @cached_property
    def _of_closures(self) -> Mapping[Any, Subject]:
        return {name: of_closure(subject, name) for name, subject in self.subjects.items()}

    @property
    def losses(self) -> Loss | Mapping[str, Loss]:
        """What `optimizer.loss` is."""
        return self.subject.loss

    def facts(self) -> Mapping[str, Any]:
        """What the other processes must have in common with this one."""
        return {"loss": in_words(self.subject.loss)}

    def pieces(self, inputs: Any, targets: Any, groups: Groups, ranks: Collective) -> list[Piece]:
        """The batches of a step."""
        if targets is None:
            plain = self.subject.count is count_rows
            if is_closure(inputs, rows=plain):
                return self._pieces_of_closure(inputs, groups, ranks)
            if plain:
                refuse_missing(inputs, self.call)
        return self._pieces(inputs, targets, groups, ranks)

    def _pieces(self, inputs: Any, targets: Any, groups: Groups, ranks: Collective) -> list[Piece]:
        subject = self.subject
        own = subject.count is not count_rows or subject.forward is not call_model
        if targets is None and not own and _is_of_pairs(inputs):
            raise TypeError(
                f"step got a mapping of pairs ({', '.join(map(repr, inputs))}), as for an objective of several terms, but "
                f"the optimizer has one loss, {subject.loss.name}: expected step(inputs, targets); for terms give the "
                "optimizer a mapping of them in place of the loss, name → shf.Term"
            )
        try:
            return [Piece.of(subject, (inputs, targets), groups, ranks, may_be_empty=ranks.several)]
        except Exception as error:
            if not own:
                explain_batch(inputs, targets, error)
            raise

    def _pieces_of_closure(self, closure: Callable[[], Any], groups: Groups, ranks: Collective) -> list[Piece]:
        """Of each term one, for which the closure is run by itself."""
        found, several = [], len(self.subjects) > 1
        for number, (name, subject) in enumerate(self._of_closures.items()):
            result = tried(closure, subject, groups, number if several else None)
            if isinstance(result, Given):
                return self._pieces(result.inputs, result.targets, groups, ranks)
            if ranks.several:
                raise ValueError(
                    f"step got a closure on one of several processes, whose rows are unknown: give {self.call}"
                )
            found.append(Piece.of(subject, pair_of(closure, result, name), groups, ranks, may_be_empty=False))
        return found

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
        settings: Callable[[], Mapping[str, Any]],
        state: OptimizerState,
        data: Any,
    ) -> Contribution:
        """One process's part in a step, with all that the other processes must have in common with it."""

        def facts() -> Mapping[str, Any]:
            names = {id(p): name for name, p in self.subject.model.named_parameters()}
            decay = {names[id(p)]: group["weight_decay"] for group in groups for p in group["params"]}
            return {**settings(), **self.facts(), "weight_decay": decay}

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
