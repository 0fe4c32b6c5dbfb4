"""The Fisher information in place of L'', where L is the negative log-likelihood of a Gaussian that the model predicts."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class GaussianFisher(TorchFunctionMode):
    """Inside, `F.gaussian_nll_loss` of mean μ and variance v, which `nn.GaussianNLLLoss` calls, is

        ½ (μ - μ₀)²/v₀ + ¼ (v - v₀)²/v₀²

    with μ₀ and v₀ their present values: its second derivative, by whatever μ and v are made of, is the Fisher information of
    N(μ, v). That of the likelihood itself has a negative eigenvalue wherever μ is not the target. `met` says whether there
    was one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.met = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not F.gaussian_nll_loss:
            return func(*args, **(kwargs or {}))
        self.met = True
        return _quadratic(*args, **(kwargs or {}))


def _quadratic(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    mean, _ = torch.broadcast_tensors(input, target)
    v = var.to(mean) if isinstance(var, Tensor) else mean.new_tensor(var)
    if v.shape == mean.shape[:-1] and v.shape != mean.shape:
        v = v.unsqueeze(-1)
    now = v.detach().clamp_min(eps)
    each = (mean - mean.detach()).square() / (2 * now) + ((v - v.detach()) / now).square() / 4
    reduced: Tensor = each.mean() if reduction == "mean" else each.sum() if reduction == "sum" else each
    return reduced
