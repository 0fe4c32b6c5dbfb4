"""An objective that is a sum of terms: what a user says of each, and what of it is refused."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shf.component import number, plain
from shf.composition import Config, HFConfig
from shf.data.batches import Batch, Count, Select
from shf.distributed.collective import Collective
from shf.losses import Loss
from shf.model.network import Forward
from shf.objective import Objective, in_words
from shf.preconditioners import Preconditioner
from shf.problems.batch import BatchProblem
from shf.problems.sum import TermsProblem, in_term
from shf.subject import Groups, Piece, Subject


@dataclass(frozen=True)
class Term:
    """One term w·L(F(x), t) of an objective, with inputs, targets and rows of its own (see [docs/using.md](using.md)).

    Attributes:
        loss: L, `loss(outputs, targets)`, as for `shf.SHF`.
        weight: w.
        forward: F, `forward(model, inputs)`: a differential operator on the model, say; None for the optimizer's own.
        reduction: "mean" or "sum" over this term's rows; None to read it from the loss object.

    Example:
        >>> terms = {"inside": Term(nn.MSELoss()), "boundary": Term(nn.MSELoss(), weight=100.0)}
        >>> optimizer = shf.SHF(nn.Linear(2, 1), terms)
        >>> inside, boundary = (torch.rand(30, 2), torch.rand(30, 1)), (torch.rand(8, 2), torch.zeros(8, 1))
        >>> info = optimizer.step({"inside": inside, "boundary": boundary})
        >>> list(info.terms)
        ['inside', 'boundary']
    """

    loss: Callable[[Any, Any], Tensor]
    weight: float = 1.0
    forward: Forward | None = None
    reduction: str | None = None

    def __post_init__(self) -> None:
        if expected := number(above=0.0)(self.weight):
            raise ValueError(f"Term(weight={self.weight!r}): must be {expected}")
        if self.forward is not None and not callable(self.forward):
            raise TypeError(f"Term(forward={self.forward!r}): expected a callable forward(model, inputs), or None")
        object.__setattr__(self, "weight", float(plain(self.weight)))
        Loss(self.loss, self.reduction)  # refuses what is none


class TermsObjective(Objective):
    """Σ_k w_k L_k(F_k(x_k), t_k), as an optimizer's steps meet it."""

    def __init__(self, subjects: Mapping[str, Subject], weights: Sequence[float]) -> None:
        super().__init__(next(iter(subjects.values())))
        self._subjects, self._weights = subjects, weights
        self.required = [f"term {name!r}" for name in subjects]
        self.call = f"optimizer.{_wanted(list(subjects))}"

    @property
    def subjects(self) -> Mapping[str, Subject]:
        return self._subjects

    @property
    def losses(self) -> Mapping[str, Loss]:
        return {name: subject.loss for name, subject in self._subjects.items()}

    def facts(self) -> Mapping[str, Any]:
        found = zip(self._subjects, self.losses.values(), self._weights, strict=True)
        return {
            "term": {
                name: f"number {k}: {in_words(loss)}, weight {weight!r}" for k, (name, loss, weight) in enumerate(found)
            }
        }

    def _pieces(self, inputs: Any, targets: Any, groups: Groups, ranks: Collective) -> list[Piece]:
        """One of each term, in their order."""
        pairs, found = _pairs(list(self._subjects), inputs, targets), []
        for (name, subject), pair in zip(self._subjects.items(), pairs, strict=True):
            with in_term(name):
                found.append(Piece.of(subject, pair, groups, ranks, may_be_empty=True))
            if not found[-1].batch.rows and not ranks.several:
                raise ValueError(
                    f"step: term {name!r} has no rows, expected at least 1; an optimizer made without it leaves it out"
                )
        return found

    def joined(self, parts: Sequence[BatchProblem]) -> TermsProblem:
        return TermsProblem(dict(zip(self._subjects, zip(parts, self._weights, strict=True), strict=True)))

    def whole(self, pieces: Sequence[Piece]) -> Batch:
        batches = [piece.batch for piece in pieces]
        return Batch([b.inputs for b in batches], [b.targets for b in batches], sum(b.rows for b in batches))


def make_objective(
    config: Config, model: nn.Module, loss: Any, reduction: str | None, forward: Forward, select: Select, count: Count
) -> Objective:
    """Of one loss, or of a mapping of terms."""
    if not isinstance(loss, Mapping):
        return Objective(Subject(model, loss, reduction, forward, select, count))
    _refuse_options(config, loss, reduction)
    terms = {name: term if isinstance(term, Term) else Term(term) for name, term in loss.items()}
    subjects = {
        name: Subject(model, term.loss, term.reduction, term.forward or forward, select, count)
        for name, term in terms.items()
    }
    return TermsObjective(subjects, [term.weight for term in terms.values()])


def _refuse_options(config: Config, terms: Mapping[Any, Any], reduction: str | None) -> None:
    """Refuses what is no term, and what does not go together with terms."""
    owner, preconditioner = config.owner, config.part(Preconditioner)
    if isinstance(config, HFConfig):
        raise TypeError(
            f"{owner}(loss=<{type(terms).__name__}>): an objective of several terms is for shf.SHF; {owner} takes one loss"
        )
    if not terms:
        raise ValueError(f"{owner}(loss={terms!r}): a mapping without terms; expected name → shf.Term, at least one")
    for name, term in terms.items():
        if not isinstance(name, str):
            raise TypeError(f"{owner}(loss=...): a term is named {name!r}: expected a string")
        if not isinstance(term, Term) and not callable(term):
            raise TypeError(
                f"{owner}(loss=...): term {name!r} is a {type(term).__name__}: expected a shf.Term, or a loss"
            )
    if reduction is not None:
        raise ValueError(
            f"{owner}(reduction={reduction!r}): each term has its own; give shf.Term(loss, reduction={reduction!r})"
        )
    if not preconditioner.batches:
        raise ValueError(
            f"{owner}(preconditioner={config.values['preconditioner']!r}): it is made in one pass over one batch, and each "
            "term has a pass of its own; use preconditioner='empirical-fisher', 'jacobi' or None"
        )


def _pairs(names: Sequence[str], inputs: Any, targets: Any) -> list[tuple[Any, Any]]:
    """Inputs and targets of each term, in the terms' order."""
    wanted = _wanted(names)
    if targets is not None:
        raise TypeError(f"step got inputs and targets, but the objective is a sum of terms: expected {wanted}")
    if not isinstance(inputs, Mapping):
        raise TypeError(f"step got a {type(inputs).__name__}, but the objective is a sum of terms: expected {wanted}")
    if set(inputs) != set(names):
        missing = [name for name in names if name not in inputs]
        foreign = [name for name in inputs if name not in names]
        found = [f"lacks {', '.join(map(repr, missing))}"] if missing else []
        found += [f"has {', '.join(map(repr, foreign))}, which is no term"] if foreign else []
        raise ValueError(
            f"step: the mapping {' and '.join(found)}: expected {wanted}; to leave a term out make another optimizer"
        )
    for name in names:
        pair = inputs[name]
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            given = f"{len(pair)} things" if isinstance(pair, tuple | list) else f"a {type(pair).__name__}"
            raise TypeError(
                f"step: term {name!r} is {given}: expected (inputs, targets); (inputs, None) where its loss takes no targets"
            )
    return [(inputs[name][0], inputs[name][1]) for name in names]


def _wanted(names: Sequence[str]) -> str:
    """How a step is called."""
    return "step({" + ", ".join(f"{name!r}: (inputs, targets)" for name in names) + "})"
