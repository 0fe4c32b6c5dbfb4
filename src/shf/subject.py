"""What is trained: the model, how it is called, its loss, and what was found out about them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

from torch import Tensor, nn

from shf.data.batches import Batch, Count, Select
from shf.distributed.collective import Collective
from shf.groups import trainable
from shf.losses import Loss
from shf.model.evaluation import Evaluation
from shf.model.fingerprint import Fingerprint
from shf.model.network import Forward, Network, call_for_tensor, call_model, unwrap
from shf.probing.derivatives import refuse_single_derivatives_on
from shf.probing.layout import NO_ROWS, Layout, LayoutMemory, few_rows
from shf.probing.losses import explained_dtypes, refuse_contradictions
from shf.probing.unsupported import refuse_unsupported

Groups = Sequence[Mapping[str, Any]]


class Subject:
    """A model, taken out of its wrappers, and a loss, as an optimizer's steps meet them."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Tensor],
        reduction: str | None,
        forward: Forward,
        select: Select,
        count: Count,
    ) -> None:
        self.model, self.loss = unwrap(model), Loss(loss, reduction)
        self.select, self.count = select, count
        self.forward = forward
        self._call = call_for_tensor if forward is call_model and self.loss.takes_one_tensor else forward
        self._layouts, self._evaluation = LayoutMemory(), Evaluation()
        self._known: tuple[Fingerprint, bool, Network] | None = None
        self._probed = False  # whether loss and second derivatives were looked at

    def network(self, groups: Groups, ranks: Collective) -> Network:
        """The parameters to train now, in the model's order; models that a step cannot do with are refused. The same network
        as in the step before, where nothing of the model has changed."""
        now = Fingerprint.of(self.model, groups)
        if self._known is None or not now.equals(self._known[0]) or self._known[1] != ranks.several:
            network = Network(self.model, trainable(self.model, groups), self._call, self._evaluation)
            refuse_unsupported(network, ranks)
            self._known = now, ranks.several, network
        return self._known[2]

    def batch(self, inputs: Any, targets: Any, *, may_be_empty: bool = False) -> Batch:
        return Batch.of(inputs, targets, self.select, self.count, may_be_empty=may_be_empty)

    def layout(self, network: Network, batch: Batch, seed: int) -> Layout:
        """What model and loss do with rows; the loss and the model's second derivatives are looked at until it is clear."""
        if not batch.rows:
            return NO_ROWS
        layout = self._layouts.find(network, batch, seed)
        if not self._probed:
            clear = refuse_contradictions(self.loss, network, batch, layout, seed)
            refuse_single_derivatives_on(network, few_rows(batch, layout), seed)
            self._probed = clear
        return layout

    def layout_of_part(self, network: Network, batch: Batch, seed: int) -> Layout:
        """What the model does with the rows of one batch of several."""
        return self._layouts.find(network, batch, seed)


class Piece(NamedTuple):
    """A batch of a step with the loss and the network that it is for, and how that treats rows."""

    loss: Loss
    network: Network
    batch: Batch
    layout: Layout

    @classmethod
    def of(
        cls, subject: Subject, pair: tuple[Any, Any], groups: Groups, ranks: Collective, *, may_be_empty: bool
    ) -> Self:
        """Made of inputs and targets; before anything is computed, an error for what can be found wrong."""
        batch = subject.batch(*pair, may_be_empty=may_be_empty)
        network = subject.network(groups, ranks)
        with explained_dtypes(network, batch):
            return cls(subject.loss, network, batch, subject.layout(network, batch, groups[0]["shf"]["seed"]))
