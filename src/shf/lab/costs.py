"""What a step costs, in gradients: so that methods of different kinds share an axis.

By the matrix products of a layer: a forward pass is one, a gradient three (forward, and two backward), a Gauss-Newton
product four (Jv and J'u, two each). Hence an evaluation counts 1/3 and a product 4/3 of a gradient; CG's last,
which makes no J'u, is counted as a whole one.
"""

from __future__ import annotations

from collections.abc import Mapping

from shf.linear.stopping import EVALUATION, PRODUCT


def gradient_equivalents(report: Mapping[str, float]) -> float:
    """The cost of a step, from the passes over one batch that its report counts by kind."""
    return (
        report.get("gradients", 0.0)
        + EVALUATION * report.get("evaluations", 0.0)
        + PRODUCT * report.get("products", 0.0)
    )
