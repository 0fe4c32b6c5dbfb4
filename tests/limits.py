"""The other half of the declared list: what falls back inside a step, and what is refused.

Each line can be tried: `tests/test_limits.py` does, and the tables in docs/architectures.md are written from here.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils.rnn import PackedSequence
from torch.utils.checkpoint import checkpoint

import shf
from cases import ROWS, Packed, packed, trees
from trees import Tree, TreeLSTM, select_trees

CE = nn.CrossEntropyLoss()


class Probe(nn.Module):
    """A linear layer behind a function of a test; what `look` sees during each pass is kept."""

    def __init__(
        self, function: Callable[[Tensor], Tensor] = lambda x: x, look: Callable[[], Any] = lambda: None
    ) -> None:
        super().__init__()
        self.layer, self.function, self.look = nn.Linear(4, 3), function, look
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.look())
        return self.layer(self.function(x))


def vectors() -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, 4), torch.randint(3, (ROWS,))


def step(model: nn.Module, data: tuple[Any, Any] | None = None, loss: Any = CE, **options: Any) -> shf.SHF:
    optimizer = shf.SHF(model, loss, seed=0, **options)
    optimizer.step(*(data or vectors()))
    return optimizer


# --- what falls back ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FallsBack:
    """Inside a step `look` sees `inside`; before and after it sees `outside`; `words` is in the one warning, if any.

    Attributes:
        what: the user's side, in the words of the docs.
        instead: what a step uses.
        model: whose passes look; by default a `Probe`.
        around: what the user has switched on.
    """

    what: str
    instead: str
    look: Callable[[], Any]
    inside: Any
    outside: Any
    model: Callable[[Callable[[], Any]], nn.Module] = lambda look: Probe(look=look)
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    words: str | None = None


class Looking(nn.Module):
    """Layers on sequences of four numbers, beside a look."""

    def __init__(self, layer: nn.Module, look: Callable[[], Any]) -> None:
        super().__init__()
        self.inner, self.probe = layer, Probe(look=look)

    def forward(self, x: Tensor) -> Tensor:
        z = self.inner(x[:, :, None])
        return self.probe((z[0] if isinstance(z, tuple) else z).sum(2))

    @property
    def seen(self) -> list[Any]:
        return self.probe.seen


class Symbols(nn.Module):
    """An embedding with sparse gradients; it looks at the kind that it would get."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(5, 3, sparse=True), nn.Linear(3, 3)
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            weight = self.embedding.weight.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(F.embedding(torch.tensor([1]), weight, sparse=True).sum(), weight)
        self.seen.append(gradient.is_sparse)
        return self.out(self.embedding(x.abs().long().clamp(max=4)).sum(1))


def attention_kernels() -> tuple[bool, bool]:
    return torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()


FALLS_BACK = [
    FallsBack(
        "fused attention (`F.scaled_dot_product_attention`, `nn.MultiheadAttention`)",
        "its mathematical form: the fused kernels have no second derivative",
        attention_kernels, inside=(False, True), outside=(True, True),
    ),
    FallsBack(
        "the fast path of `nn.TransformerEncoder` in eval mode",
        "the layers themselves: with a padding mask the fast path, which torch takes only without gradients, is another function",
        torch.backends.mha.get_fastpath_enabled, inside=False, outside=True,
    ),
    FallsBack(
        "cuDNN's recurrent layers, on a GPU", "torch's own, with one warning; without recurrent layers cuDNN stays",
        lambda: torch.backends.cudnn.enabled, inside=False, outside=True,
        model=lambda look: Looking(nn.GRU(1, 2, batch_first=True), look),
    ),
    FallsBack(
        "autocast", "off, with one warning", lambda: torch.is_autocast_enabled("cpu"), inside=False, outside=True,
        around=lambda: torch.autocast("cpu", torch.bfloat16), words="autocast is on",
    ),
    FallsBack(
        "`torch.no_grad`, `torch.inference_mode` around the step", "gradients on, as a step needs them",
        torch.is_inference_mode_enabled, inside=False, outside=True, around=torch.inference_mode,
    ),
    FallsBack(
        "`nn.Embedding(sparse=True)`, `scale_grad_by_freq=True`",
        "dense gradients and products as they are: sparse ones are no part of a flat vector, scaled ones not those of the objective",
        lambda: True, inside=False, outside=True, model=lambda look: Symbols(),
    ),
]  # fmt: skip

WRAPPERS = (
    "`torch.compile`, `DataParallel`, `DistributedDataParallel` around the model, `torch.compile` around the loss",
    "what is inside; a module shares its parameters with the wrapper",
)
"""Tried in tests/test_optimizer.py, processes/test_distributed.py and test_models_in_the_wild.py: what falls back there is no setting."""


# --- what is refused ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refused:
    """`attempt` ends with `error`, whose words match `says`."""

    what: str
    why: str
    attempt: Callable[[], object]
    error: type[Exception]
    says: str


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.block, x.clone().requires_grad_(), use_reentrant=True))


class SquareOnce(nn.Module):
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.square()

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return 2 * ctx.saved_tensors[0] * g

    def forward(self, x: Tensor) -> Tensor:
        return self.Function.apply(x)


class Captured(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.weights = [self.weight]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[0], self.bias)


class HalfInside(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(nn.Linear(inputs, outputs))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


class DropsSteps(Packed):
    """Dropout over the steps of packed sequences."""

    def forward(self, x: PackedSequence) -> Tensor:
        return super().forward(x._replace(data=F.dropout(x.data)))


class DropsNodes(TreeLSTM):
    """Dropout over the nodes of trees."""

    def forward(self, batch: list[Tree]) -> Tensor:
        nodes = sum(len(list(_nodes(tree))) for tree in batch)
        return super().forward(batch) * F.dropout(torch.ones(nodes)).mean()


def _nodes(tree: Tree) -> Iterator[Tree]:
    yield tree
    for child in tree.children or ():
        yield from _nodes(child)


class Overwritten(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return shf.hold_steady(super().forward(x)).relu_()


def reseeded(x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return F.dropout(x)


def compared(z: Tensor, t: Tensor) -> Tensor:
    """Every row with every other, on the sphere."""
    z = F.normalize(z, dim=1)
    return F.cross_entropy(z @ z.roll(1, 0).T, torch.arange(len(z)))


def penalised() -> object:
    model = nn.Linear(4, 3)
    return step(model, loss=lambda z, t: F.cross_entropy(z, t) + model.weight.square().sum())


class Complex(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(x)


class Halved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.bfloat16()


def square_draw(x: Tensor) -> Tensor:
    return x + 0.01 * torch.randn(len(x), len(x)).mean()


def symbols() -> tuple[Tensor, Tensor]:
    return torch.randint(5, (ROWS, 2)), torch.randint(3, (ROWS,))


def on_symbols(layer: Callable[[], nn.Module], features: int) -> Callable[[], object]:
    return lambda: step(nn.Sequential(layer(), nn.Flatten(), nn.Linear(features, 3)), symbols())


REFUSED = [
    Refused(
        "`torch.bernoulli(x)` of the network's own values", "the draw would change with every trial step",
        lambda: step(Probe(lambda x: x * torch.bernoulli(x.sigmoid()))), RuntimeError, r"aten\.bernoulli\.default",
    ),
    Refused(
        "`torch.multinomial(x)` of the network's own values", "the draw would change with every trial step",
        lambda: step(Probe(lambda x: x * torch.multinomial(x.softmax(1), 1))), RuntimeError, r"aten\.multinomial",
    ),
    Refused(
        "randomness from `random` or `numpy` inside `forward`", "it cannot be frozen; the module is named",
        lambda: step(Probe(lambda x: x * random.random())), RuntimeError, "different outputs",
    ),
    Refused(
        "seeding torch inside `forward`", "the draws of a step could not be told apart",
        lambda: step(Probe(reseeded)), RuntimeError, "global generator",
    ),
    Refused(
        "a random draw in which no single axis grows in proportion to the rows, with `curvature_batch` or `microbatch`",
        "which numbers belong to which row is unknown",
        lambda: step(Probe(square_draw), curvature_batch=2), ValueError, "random draw number 0",
    ),
    Refused(
        "`microbatch` with batch statistics", "outputs on a chunk are not those on the batch",
        lambda: step(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)), microbatch=2), ValueError, "batch statistics",
    ),
    Refused(
        "complex outputs", "a step differentiates by real outputs; return `torch.view_as_real`",
        lambda: step(nn.Sequential(nn.Linear(4, 3), Complex()), loss=lambda z, t: z.abs().square().mean()), ValueError, "view_as_real",
    ),
    Refused(
        "outputs in half precision", "curvature would be noise",
        lambda: step(nn.Sequential(nn.Linear(4, 3), Halved())), ValueError, "full precision",
    ),
    Refused(
        "losses that are not convex in the outputs and compare rows (InfoNCE on embeddings), with more than 1024 outputs in the batch",
        "the rows are one block of L'', too large to take its positive part: return the table of similarities from `forward`, with cross-entropy on it",
        lambda: step(nn.Linear(4, 3), (torch.randn(400, 4), torch.zeros(400)), compared), ValueError, "all rows together have 1200 outputs",
    ),
    Refused(
        "random draws inside the loss", "only the model's are frozen: draw in `forward`",
        lambda: step(nn.Linear(4, 3), loss=lambda z, t: F.cross_entropy(F.dropout(z), t)), RuntimeError, "draws random numbers",
    ),
    Refused(
        "a loss that uses parameters, or what `forward` left in an attribute, besides the outputs",
        "that part would have no gradient: return it from `forward`; for a penalty on weights there is `weight_decay`",
        penalised, ValueError, r"depends on parameters \(weight\) otherwise than through the model's outputs",
    ),
    Refused(
        "a callable that adds up rows, without `reduction=\"sum\"`", "it would be taken for a mean, and its curvature be wrong",
        lambda: step(nn.Linear(4, 3), loss=lambda z, t: F.cross_entropy(z, t, reduction="sum")), ValueError, "give reduction='sum'",
    ),
    Refused(
        "dropout over the steps of packed sequences, with `curvature_batch` or `microbatch`", "which numbers belong to which row is unknown",
        lambda: step(DropsSteps(), packed(), curvature_batch=2), ValueError, "parts of rows that differ in size",
    ),
    Refused(
        "dropout over the nodes of trees, with `curvature_batch` or `microbatch`", "which numbers belong to which row is unknown",
        lambda: step(DropsNodes(6, 3, 3), trees(), curvature_batch=2, count=len, select=select_trees),
        ValueError, "random draw|parts of rows",
    ),
    Refused(
        "`structural_damping` > 0 with a model that names no tensor by `shf.hold_steady`", "there would be nothing to hold steady",
        lambda: step(nn.Linear(4, 3), structural_damping=0.1), ValueError, "named no tensor to hold steady",
    ),
    Refused(
        "`shf.hold_steady(h)` with an `h` that is then overwritten in place", "its values, and so its change, are lost",
        lambda: step(Overwritten(4, 3), structural_damping=0.1), RuntimeError, "was overwritten in place",
    ),
    Refused(
        "a `torch.autograd.Function` whose backward pass torch cannot differentiate (`once_differentiable`, numpy inside)",
        "its part of the curvature would be missing; write it with torch's operations",
        lambda: step(nn.Sequential(nn.Linear(4, 4), SquareOnce(), nn.Linear(4, 3))), RuntimeError,
        r"gradient by 0\.weight cannot be differentiated again",
    ),
    Refused(
        "reentrant gradient checkpointing", "it cannot be differentiated by `autograd.grad`; use `use_reentrant=False`",
        lambda: step(Checkpointed()), RuntimeError, "use_reentrant=False",
    ),
    Refused(
        "a parameter that `forward` uses by another reference than its module's own", "trial values could not be put there",
        lambda: step(Captured(4, 3)), RuntimeError, "uses parameter weight by a reference of its own",
    ),
    Refused(
        "autocast inside `forward` (Accelerate's `mixed_precision`, too)", "curvature in half precision is mostly rounding",
        lambda: step(HalfInside(4, 3)), RuntimeError, "runs under autocast",
    ),
    Refused(
        "TorchScript", "a step cannot look inside; train the module, and script it afterwards",
        lambda: step(torch.jit.script(nn.Linear(4, 3))), TypeError, "is TorchScript",
    ),
    Refused(
        "half-precision parameters", "products would be mostly rounding",
        lambda: step(nn.Linear(4, 3).half()), ValueError, "float16",
    ),
    Refused(
        "`nn.EmbeddingBag`", "torch cannot differentiate it twice; use `nn.Embedding` and a sum or mean",
        on_symbols(lambda: nn.EmbeddingBag(5, 4), 4), TypeError, "use nn.Embedding and the sum or mean",
    ),
    Refused(
        "`nn.Embedding(max_norm=...)`", "it rewrites its weights whenever it runs; use `SHF(max_norm=...)`",
        on_symbols(lambda: nn.Embedding(5, 4, max_norm=0.1), 8), TypeError, "rewrites its weights",
    ),
    Refused(
        "`nn.SyncBatchNorm` in training mode", "torch cannot differentiate it twice, and has none on CPU",
        lambda: step(nn.Sequential(nn.SyncBatchNorm(4), nn.Linear(4, 3))), TypeError, "SyncBatchNorm",
    ),
]  # fmt: skip
