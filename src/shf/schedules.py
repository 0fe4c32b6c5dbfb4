"""λ, γ, β and counters: the numbers that the optimizer carries from step to step, and what the end of an epoch makes of
them. Plain data, as torch saves and loads it."""

import math
from collections.abc import Mapping
from typing import Any

from shf.config import Config


def first_scalars(config: Config, seed: int) -> dict[str, Any]:
    """Those before the first step; λ is nan where that is yet to choose it."""
    return {
        "damping": math.nan if config.damping == "auto" else float(config.damping),
        "cg_decay": float(config.cg_decay),
        "update_scale": 1.0,
        "momentum": True,
        "epoch": 0,
        "iteration": 0,
        "seed": seed,
        "epoch_loss": 0.0,
        "epoch_steps": 0,
        "last_mean_loss": None,
        "rises": 0,
        "rejections": 0,
    }


def at_next_epoch(scalars: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """γ ← min(1.01 γ, 0.99), β ← cβ, the next curvature rows; γ ends for good once the epochs' mean objective has risen
    twice running, where that is asked for (§5.2)."""
    s = dict(scalars)
    s["epoch"] += 1
    s["cg_decay"] = min(config.cg_decay_growth * s["cg_decay"], config.cg_decay_max)
    s["update_scale"] *= config.update_decay
    if s["epoch_steps"]:
        mean = s["epoch_loss"] / s["epoch_steps"]
        rose = s["last_mean_loss"] is not None and mean > s["last_mean_loss"]
        s["rises"] = s["rises"] + 1 if rose else 0
        s["last_mean_loss"], s["epoch_loss"], s["epoch_steps"] = mean, 0.0, 0
        if config.momentum_off_on_divergence and s["rises"] >= 2:
            s["momentum"] = False
    return s
