"""What the second graph keeps: nothing of the cotangents that passed when it was made.

The backward pass from a cotangent u, recorded, is a graph that is linear in u: to differentiate it by u it needs what the
forward pass made, and not a number of what came from u. autograd would keep that too, for derivatives by θ that nobody
takes, and it is as large as the first graph.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter

from torch import Tensor
from torch.autograd.graph import Node, saved_tensors_hooks


def graph_nodes(ends: Sequence[Tensor]) -> list[Node]:
    """The nodes of the graph behind some tensors, each once."""
    found = list(dict.fromkeys(z.grad_fn for z in ends if z.grad_fn is not None))
    seen = set(found)
    for node in found:
        for parent, _ in node.next_functions:
            if parent is not None and parent not in seen:
                seen.add(parent)
                found.append(parent)
    return found


@contextmanager
def without_cotangents(ends: Sequence[Tensor], tell: Callable[[Tensor], object]) -> Iterator[None]:
    """Inside, a backward pass from these ends that is recorded keeps the shapes alone of what nodes are handed; `tell` is
    told of each."""
    handed: list[int] = []

    def note(gradients: Sequence[Tensor | None]) -> None:
        handed.clear()
        handed.extend(_place(g) for g in gradients if g is not None)

    def keep(tensor: Tensor) -> tuple[Tensor]:
        if tensor.numel() > 1 and (place := _place(tensor)) and place in handed:
            tell(tensor)
            return (tensor.new_zeros(()).expand(tensor.shape),)
        return (tensor.detach(),)

    notes = [node.register_prehook(note) for node in graph_nodes(ends) if node.next_functions]
    try:
        with saved_tensors_hooks(keep, itemgetter(0)):
            yield
    finally:
        for each in notes:
            each.remove()


def cotangent(u: Tensor, z: Tensor) -> Tensor:
    """u as an end to differentiate by; where it lies in z's own memory, which is to be kept, elsewhere."""
    leaf = u.detach()
    shared = (place := _place(u)) and place == _place(z)
    return (leaf.clone() if shared else leaf).requires_grad_()


def _place(tensor: Tensor) -> int:
    """Where its numbers begin in memory; 0 for what has none of its own: sparse ones, those of torch.func."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0
