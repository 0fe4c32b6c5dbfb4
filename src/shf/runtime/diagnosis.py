"""After many steps in a row that did not move the parameters: what λ, ρ, gradient and batch look like, and what to try."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from shf.data.batches import Batch
from shf.data.tree import entries, leaves
from shf.errors import NonFiniteError
from shf.info import DampingBound, StepInfo
from shf.linear.cg import CGStop

_NEGLIGIBLE = 1e-7
"""A gradient that is this small beside the loss: single precision cannot tell what a step along it changes."""


def diagnose(info: StepInfo, rejections: int, batch: Batch, kind: str = "batch") -> str:
    """A diagnosis in words of the last of `rejections` steps in a row that were rejected or skipped, and of its batch."""
    return (
        f"{rejections} steps in a row did not move the parameters. The last one: λ = {info.damping:.3g}"
        f"{f' ({info.damping_bound.value})' if info.damping_bound else ''}, ρ = {info.reduction_ratio:.3g}, loss "
        f"{info.loss_before:.6g}, gradient norm {info.gradient_norm:.3g}, {info.cg_steps} CG iterations "
        f"({info.cg_stop.value}), {info.failed_trials} of {info.evaluations} trials not finite. The {kind}: {batch.rows} "
        f"rows; inputs {describe(batch.inputs)}; targets {describe(batch.targets)}. To try: {'; '.join(_advice(info))}."
    )


def diagnose_held(info: StepInfo, steps: int) -> str:
    """Of so many steps in a row that were as good as promised while λ stood at its floor."""
    return (
        f"λ stands at its floor, {info.damping:.3g}, and ρ has been near 1 for {steps} steps (now "
        f"{info.reduction_ratio:.3g}, loss {info.loss_after:.3g}): on its batches the model could be trusted further. "
        "If each step sees all rows, this holds training back: use shf.SHF(model, loss, **shf.presets.residual) for a sum "
        f"of squares, else damping={info.damping:.3g} in place of 'auto'. If batches are samples, it may be as well"
    )


def _advice(info: StepInfo) -> Iterator[str]:
    """What to do, the likeliest first."""
    if info.skipped is not None:
        yield f"look at the data ({info.skipped})"
        return
    if info.gradient_norm == 0:
        yield "the gradient is zero: training is done, or all units of a layer are dead or saturated (initialise anew)"
        return
    if info.gradient_norm < _NEGLIGIBLE * max(1.0, abs(info.loss_before)):
        yield "the gradient is lost in rounding beside the loss: training is done, or needs model.double()"
    if info.failed_trials:
        yield "trial points overflow: scale inputs and targets to about 1, or begin with a larger damping"
    if info.cg_stop is CGStop.NON_FINITE:
        yield "a curvature product overflows: scale inputs and targets to about 1, or use model.double()"
    if info.cg_stop is CGStop.NON_POSITIVE_CURVATURE:
        yield "the curvature is not positive: the loss must be convex in the outputs"
    if info.damping_bound is DampingBound.CEILING:
        yield "no step is short enough at damping_max: the loss must be the same function at every evaluation"
    if info.reduction_ratio > 0.75:
        yield "steps are too short for the precision of the parameters: scale inputs to about 1, or use model.double()"
        return
    yield f"damping={10 * info.damping:.3g}"
    yield "more curvature rows, a larger batch, model.double()"


def describe(data: Any) -> str:
    """Shape, type and range of every tensor in a structure, and what is odd about it."""
    found = [_describe_tensor(t) for t in leaves(data)]
    return ", ".join(found) if found else "none"


def _describe_tensor(tensor: Tensor) -> str:
    shape = "×".join(str(n) for n in tensor.shape) or "one number"
    kind = f"{shape} {str(tensor.dtype).removeprefix('torch.')}"
    values = entries(tensor).reshape(-1)
    if values.numel() == 0 or values.is_complex():
        return kind
    finite = values[values.isfinite()]
    missing = f", {values.numel() - finite.numel()} not finite" if finite.numel() < values.numel() else ""
    if finite.numel() == 0:
        return kind + missing
    low, high = finite.min().item(), finite.max().item()
    return f"{kind} {f'all {low:.3g}' if low == high else f'from {low:.3g} to {high:.3g}'}{missing}"


def bad_batch(words: str, batch: Batch, parameters: Sequence[Tensor]) -> NonFiniteError:
    """The error of a batch whose numbers are not finite, with what in it or in the parameters is to blame."""
    suspects = (
        ("inputs", leaves(batch.inputs)),
        ("targets", leaves(batch.targets)),
        ("parameters", parameters),
    )
    found = [
        what
        for what, tensors in suspects
        if any(not bool(entries(t).isfinite().all()) for t in tensors if t.is_floating_point())
    ]
    if found:
        return NonFiniteError(f"{words} (not finite: {', '.join(found)})")
    return NonFiniteError(f"{words} (inputs, targets and parameters are finite)")
