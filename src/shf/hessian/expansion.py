"""The loss at given outputs: its value, its derivative by the outputs, and its output Hessian L''.

L'' comes from differentiation, with closed forms for the common losses. Where the loss is not convex in the outputs, the
positive part of L'' stands for L'', or a Fisher information.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from shf.data.tree import map_leaves
from shf.hessian.blocks import Arrangement, PositivePart, Product, is_indefinite, positive_part, random_like, rows_of
from shf.hessian.fisher import GaussianFisher
from shf.losses import KNOWN_FUNCTIONS, Loss, PerCase, Reduction

Cotangents = Sequence[Tensor]
"""One tensor per output that carries a gradient, of that output's shape."""
HessianMap = Callable[[Cotangents], list[Tensor]]
Signs = Callable[[Tensor, int, int], Tensor]
"""Independent ±1 in the shape of a tensor, which is that of the output with this number; the second number tells draws for
several outputs apart."""


class LossExpansion:
    """L at outputs z: value, gradient by z, and products with L''. Only tensors of the outputs' size are involved.

    Attributes:
        value: L as the loss returned it.
        gradient: ∂L/∂z for each output that is a floating-point tensor.
    """

    def __init__(self, loss: Loss, outputs: Any, targets: Any) -> None:
        self._loss = loss
        self._targets = targets
        self._leaves: list[Tensor] = []
        complex_ones: list[Tensor] = []

        def leaf(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point() and not tensor.is_complex():
                return tensor
            kind = complex_ones if tensor.is_complex() else self._leaves
            kind.append(tensor.detach().requires_grad_())
            return kind[-1]

        self._outputs = map_leaves(leaf, outputs)
        if not self._leaves and not complex_ones:
            raise ValueError(
                f"the model's output holds no floating-point tensor (got {type(outputs).__name__}): expected a tensor, or a "
                "tuple, list or mapping of tensors"
            )
        with torch.enable_grad():
            total = loss(self._outputs, targets)
            if not total.requires_grad:
                raise ValueError(f"loss {loss.name} does not depend on the model's outputs: nothing to optimise")
            # A graph of L alone, kept for second derivatives where no closed form is at hand.
            both = [*self._leaves, *complex_ones]
            gradient = torch.autograd.grad(total, both, create_graph=True, allow_unused=True)
        for z, g in zip(both, gradient, strict=True):
            _refuse_dtype(z.dtype, used=g is not None)
        gradient = gradient[: len(self._leaves)]
        if all(g is None for g in gradient):
            raise ValueError(f"loss {loss.name} does not depend on the model's outputs: nothing to optimise")
        self.value = total.detach()
        self._used = [i for i, g in enumerate(gradient) if g is not None]
        self._slope = [torch.zeros_like(z) if g is None else g for g, z in zip(gradient, self._leaves, strict=True)]
        self.gradient = [g.detach() for g in self._slope]

    def hessian(self) -> HessianMap:
        """u ↦ L''u; with the positive part of L'' where L is not convex here."""
        if (diagonal := self._diagonal) is not None:
            return lambda u: [diagonal * u[0]]
        if (softmax := self._softmax()) is not None:
            p, scale = softmax
            return lambda u: [scale * p * (u[0] - (p * u[0]).sum(1, keepdim=True))]
        self._tell()
        return self._curve

    def hessian_root(self, signs: Signs) -> list[Tensor]:
        """A sample S ξ with S S' = L'', or its positive part, and ξ independent ±1 in z's shape: E[(Sξ)(Sξ)'] = L''."""
        if (diagonal := self._diagonal) is not None:
            return [diagonal.clamp_min(0).sqrt() * signs(diagonal, 0, 0)]
        if (softmax := self._softmax()) is not None:
            p, scale = softmax
            weighted = p.sqrt() * signs(p, 0, 0)
            return [scale.sqrt() * (weighted - p * weighted.sum(1, keepdim=True))]
        self._tell()
        if (positive := self._positive) is not None:
            xi = [signs(self._leaves[i], i, k) for k, i in enumerate(self._used)]
            return self._filled(self._used, positive.sample(xi))
        parts = {i: u for group in self._groups() for i, u in self._group_root(group, signs).items()}
        return [parts[i].reshape(z.shape) if i in parts else torch.zeros_like(z) for i, z in enumerate(self._leaves)]

    def is_flat(self) -> bool:
        """Whether L'', or its positive part, is zero here while ∂L/∂z is not; no loss with a closed form is, however
        saturated."""
        if self._diagonal is not None or self._softmax() is not None or not self.value.isfinite():
            return False
        probe = [torch.randn_like(g) for g in self.gradient]
        return any(bool(g.any()) for g in self.gradient) and not any(bool(h.any()) for h in self._curve(probe))

    def _curve(self, u: Cotangents) -> list[Tensor]:
        """The product with L'', or its positive part."""
        if (positive := self._positive) is None:
            return self._product(u)
        return self._filled(self._used, positive([u[i] for i in self._used]))

    @cached_property
    def _indefinite(self) -> bool:
        """Whether L'' is found to be; never of a closed form."""
        if self._diagonal is not None or self._softmax() is not None:
            return False
        return is_indefinite(self._within(self._used, self._slope), self._detached(self._used))

    @cached_property
    def _curved(self) -> Sequence[Tensor]:
        """What L'' is the derivative of: ∂L/∂z, or where L'' is indefinite and there is a Fisher information, that of which
        it is one."""
        if not self._indefinite:
            return self._slope
        with torch.enable_grad(), GaussianFisher() as fisher:
            total = self._loss(self._outputs, self._targets)
        return self._differentiated(total) if fisher.met else self._slope

    @cached_property
    def _positive(self) -> PositivePart | None:
        """The positive part of L''; None where it needs none."""
        if not self._indefinite:
            return None
        product, tensors = self._within(self._used), self._detached(self._used)
        if self._curved is not self._slope and not is_indefinite(product, tensors):
            return None
        return positive_part(product, tensors, self._loss.name)

    def _differentiated(self, total: Tensor) -> list[Tensor]:
        """∂total/∂z as a graph, zeros where there is none."""
        gradient = torch.autograd.grad(total, self._leaves, create_graph=True, allow_unused=True)
        return [torch.zeros_like(z) if g is None else g for g, z in zip(gradient, self._leaves, strict=True)]

    def _tell(self) -> None:
        """Says what stands for L''."""
        if not self._indefinite:
            return
        known = "L''" if self._curved is self._slope else "the Fisher information of its Gaussian"
        blocks = None if self._positive is None else self._positive.arrangement.in_words
        self._loss.tell(known if blocks is None else f"the positive part of {known} ({blocks})")

    def _product(self, u: Cotangents, of: Sequence[Tensor] | None = None) -> list[Tensor]:
        """L''u by differentiating ∂L/∂z once more."""
        graph = self._curved if of is None else of
        if not any(g.requires_grad for g in graph):
            return [torch.zeros_like(z) for z in self._leaves]
        try:
            found = torch.autograd.grad(
                [g for g in graph if g.requires_grad],
                self._leaves,
                [v for v, g in zip(u, graph, strict=True) if g.requires_grad],
                retain_graph=True,
                allow_unused=True,
            )
        except RuntimeError as error:
            if "is not implemented" not in str(error):
                raise
            raise ValueError(
                f"loss {self._loss.name} cannot be differentiated twice by torch ({error}): write it with functions that can"
            ) from error
        return [torch.zeros_like(z) if h is None else h for h, z in zip(found, self._leaves, strict=True)]

    def _elementary(self) -> tuple[nn.Module | None, float]:
        """The torch loss behind this one and the factor that stands before it."""
        function = self._loss.function
        if isinstance(function, PerCase):
            return function.total, 1.0 / len(self._leaves[0])
        for known, module in KNOWN_FUNCTIONS:
            if function is known and self._loss.reduction is Reduction.MEAN:
                return module(), 1.0
        return (function, 1.0) if isinstance(function, nn.Module) else (None, 1.0)

    @cached_property
    def _diagonal(self) -> Tensor | None:
        """diag L'' of a loss that is a sum over elements: then L''·1 is the diagonal."""
        elementary, _ = self._elementary()
        if type(elementary) not in _ELEMENTWISE or len(self._leaves) != 1:
            return None
        diagonal = self._product([torch.ones_like(self._leaves[0])], self._slope)[0]
        return None if bool((diagonal < 0).any()) else diagonal

    def _softmax(self) -> tuple[Tensor, Tensor] | None:
        """(p, s) with L'' = s (diag p - pp') for each case or position, for cross-entropy."""
        elementary, factor = self._elementary()
        if type(elementary) is not nn.CrossEntropyLoss or len(self._leaves) != 1:
            return None
        z, targets = self._leaves[0], self._targets
        if not isinstance(targets, Tensor) or z.ndim < 2:
            return None
        if targets.is_floating_point():
            weights = _soft_weights(elementary, targets.to(z.dtype)) * factor
            return (z.detach().softmax(1), weights) if bool((weights >= 0).all()) else None
        if elementary.weight is not None and elementary.label_smoothing:
            return None  # then all classes' weights take part in a case's
        targets = targets.long()  # of bytes, which the loss takes too, an index is a mask
        valid = targets != elementary.ignore_index
        weights = valid.to(z.dtype) if elementary.weight is None else valid * elementary.weight[targets.where(valid, 0)]
        total = weights.sum().clamp_min(torch.finfo(z.dtype).tiny)
        scale = weights * factor if elementary.reduction == "sum" else weights / total
        return z.detach().softmax(1), scale.unsqueeze(1)

    def _groups(self) -> list[list[int]]:
        """The outputs in which L has curvature: each by itself where L'' proves to have no blocks between them, L''u = 0
        elsewhere for a random u in one; otherwise all that L depends on together."""
        if len(self._used) == 1:
            return [self._used]
        curved = []
        for i in self._used:
            found = self._product(self._probe(0, [i]))
            sizes = [h.square().sum().item() for h in found]
            if sum(sizes[:i] + sizes[i + 1 :]) > torch.finfo(found[i].dtype).eps * sizes[i]:
                return [self._used]
            curved += [[i]] if bool(found[i].any()) else []
        return curved

    def _group_root(self, group: Sequence[int], signs: Signs) -> dict[int, Tensor]:
        """The sample of outputs that L'' does not couple with others."""
        if (diagonals := self._seen_diagonal(group)) is not None:
            return {i: d.clamp_min(0).sqrt() * signs(d, i, self._used.index(i)) for i, d in diagonals.items()}
        if (seen := self._seen_softmax(group)) is not None:
            p, scale, axis = seen
            weighted = p.sqrt() * signs(p, group[0], self._used.index(group[0]))
            return {group[0]: scale.sqrt() * (weighted - p * weighted.sum(axis, keepdim=True))}
        return self._dense_root(group, signs)

    def _seen_diagonal(self, group: Sequence[int]) -> dict[int, Tensor] | None:
        """diag L'' of some outputs where it proves to be diagonal, L''u = (L''·1) ∘ u for a random u: so it is for every
        loss that is a sum over elements, on however many outputs."""
        u = self._probe(0, group)
        ones = self._filled(group, [torch.ones_like(self._leaves[i]) for i in group])
        diagonal, found = self._product(ones), self._product(u)
        off = sum((found[i] - diagonal[i] * u[i]).square().sum().item() for i in group)
        size = sum(found[i].square().sum().item() for i in group)
        return {i: diagonal[i] for i in group} if size > 0 and off <= torch.finfo(u[0].dtype).eps * size else None

    def _seen_softmax(self, group: Sequence[int]) -> tuple[Tensor, Tensor, int] | None:
        """(p, s, axis) where L'' proves to be s (diag p - pp') along the second or the last axis of one output, for two
        random u: so it is for every weighted sum of cross-entropies, however it is written."""
        if len(group) != 1 or self._leaves[group[0]].ndim < 2:
            return None
        (i,) = group
        z = self._leaves[i].detach()
        eps, probes = torch.finfo(z.dtype).eps, [self._probe(k, group) for k in (0, 1)]
        found = [self._product(u)[i] for u in probes]
        for axis in dict.fromkeys((1, z.ndim - 1)):
            p = z.softmax(axis)
            centred = [p * (u[i] - (p * u[i]).sum(axis, keepdim=True)) for u in probes]
            squares = centred[0].square().sum(axis, keepdim=True)
            told = squares > eps * (p * probes[0][i]).square().sum(axis, keepdim=True)  # else p is all but one class
            if not bool(told.any()):
                continue
            ratio = (found[0] * centred[0]).sum(axis, keepdim=True) / squares
            scale = ratio.nan_to_num(0.0, 0.0, 0.0).clamp(0.0, ratio[told].max().clamp_min(0.0).item())
            off = sum((h - scale * r).square().sum().item() for h, r in zip(found, centred, strict=True))
            if off <= eps * sum(h.square().sum().item() for h in found):
                return p, scale, axis
        return None

    def _probe(self, seed: int, group: Sequence[int]) -> list[Tensor]:
        """A u without structure within some outputs."""
        u = random_like(self._leaves, seed)
        return self._filled(group, [u[i] for i in group])

    def _filled(self, group: Sequence[int], parts: Cotangents) -> list[Tensor]:
        """Parts of some outputs, with zeros for all others."""
        known = dict(zip(group, parts, strict=True))
        return [known[i] if i in known else torch.zeros_like(z) for i, z in enumerate(self._leaves)]

    def _detached(self, group: Sequence[int]) -> list[Tensor]:
        return [self._leaves[i].detach() for i in group]

    def _within(self, group: Sequence[int], of: Sequence[Tensor] | None = None) -> Product:
        """u ↦ L''u within some outputs."""

        def product(u: Cotangents) -> list[Tensor]:
            found = self._product(self._filled(group, u), of)
            return [found[i] for i in group]

        return product

    def _dense_root(self, group: Sequence[int], signs: Signs) -> dict[int, Tensor]:
        """Root of L'' case by case through its dense blocks, of some outputs together; for losses that do not mix rows."""
        used = {i: self._leaves[i] for i in group}
        rows = rows_of(list(used.values()))
        if not rows or sum(z.numel() for z in used.values()) > _DENSE_OUTPUTS * rows:
            shapes = [tuple(z.shape) for z in used.values()]
            raise ValueError(
                f"preconditioner='jacobi' and 'kronecker' need a root of L'', and loss {self._loss.name} on outputs "
                f"{shapes} has no closed form for it: expected a torch loss, a sum over elements, or outputs with the rows "
                f"along axis 0 and at most {_DENSE_OUTPUTS} numbers a row; use preconditioner='empirical-fisher'"
            )
        sample = self._by_case(group).sample([signs(z, i, self._used.index(i)) for i, z in used.items()])
        return dict(zip(used, sample, strict=True))

    def _by_case(self, group: Sequence[int], *, joined: bool = False) -> PositivePart:
        """Of L'' within some outputs by cases, or of all cases joined."""
        tensors = self._detached(group)
        arrangement = Arrangement([z.shape for z in tensors], rows_of(tensors), joined=joined)
        return PositivePart.of(arrangement, arrangement.blocks(self._within(group), tensors[0]))

    def row_roots(self) -> Tensor:
        """S of each case: (rows, K) where it is diagonal, else (rows, K, K); K numbers a row of all outputs, in their order,
        rows along axis 0. Where L is not convex and compares rows it is one of all cases, (1, rows · K, rows · K)."""
        self._tell()
        rows = len(self._leaves[0])
        diagonal = self._diagonal
        diagonals = {0: diagonal} if diagonal is not None else self._seen_diagonal(self._used)
        if diagonals is not None:
            pieces = [diagonals.get(i, torch.zeros_like(z)).reshape(rows, -1) for i, z in enumerate(self._leaves)]
            return torch.cat(pieces, 1).clamp_min(0).sqrt()
        joined = self._positive is not None and self._positive.arrangement.joined
        return self._by_case(range(len(self._leaves)), joined=joined).roots


def _refuse_dtype(dtype: torch.dtype, *, used: bool) -> None:
    """Refuses outputs that the loss depends on and that a step cannot differentiate by, or only in noise."""
    if used and dtype.is_complex:
        raise ValueError(
            f"the model returns {dtype}: SHF differentiates by real outputs; return torch.view_as_real(z), and let the loss "
            "take that"
        )
    if used and dtype in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"the model returns {dtype}: SHF needs full precision, where curvature is not noise; return outputs in the "
            "parameters' own"
        )


def _soft_weights(loss: nn.CrossEntropyLoss, targets: Tensor) -> Tensor:
    """s of targets that are probabilities: Σ_k w_k q_k of each case or position, smoothed, over their number in a mean."""
    classes = targets.shape[1]
    smoothed = (1 - loss.label_smoothing) * targets + loss.label_smoothing / classes
    if loss.weight is not None:
        smoothed = smoothed * loss.weight.view(-1, *[1] * (targets.ndim - 2))
    total = smoothed.sum(1, keepdim=True)
    return total if loss.reduction == "sum" else total * (classes / targets.numel())


_DENSE_OUTPUTS = 1024
_ELEMENTWISE = (nn.BCEWithLogitsLoss, nn.MSELoss, nn.HuberLoss, nn.SmoothL1Loss, nn.PoissonNLLLoss, nn.SoftMarginLoss)
