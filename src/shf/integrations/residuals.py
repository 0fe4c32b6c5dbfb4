"""Sums of squares of residuals, as physics-informed frameworks make them: one vector, of which the loss is the square."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def joined(residuals: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """All residuals as one vector z with ‖z‖² = Σ_k w_k mean(r_k²)."""
    return torch.cat([r.reshape(-1) * math.sqrt(w / r.numel()) for r, w in zip(residuals, weights, strict=True)])


def square(z: Tensor, _: None) -> Tensor:
    """‖z‖²."""
    return z.square().sum()
