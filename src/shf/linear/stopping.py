"""When another CG iteration is not worth its price. Beyond the paper; off by default."""

from collections.abc import Callable, Sequence

GRADIENT, EVALUATION, PRODUCT = 1.0, 1 / 3, 4 / 3
"""What passes over the gradient batch cost, in gradients, by their matrix products."""


def marginal_value(fixed: float, each: float) -> Callable[[Sequence[float]], bool]:
    """Stop once an iteration gains less per cost than the step as a whole does (the marginal value rule).

    With q_j the model's value after j iterations, a step that ends there gains -q_j for fixed + j·each. That quotient is
    largest where (q_{j-1} - q_j) / each falls below it: from there on, a new step on a new batch gains more.

    Args:
        fixed: the price of a step besides CG: its gradient, the start's product, the evaluations around it.
        each: the price of an iteration, in the same unit.
    """

    def stop(values: Sequence[float]) -> bool:
        j = len(values) - 1
        gained, latest = -values[j], values[j - 1] - values[j]
        return gained > 0 and latest * (fixed + j * each) < gained * each

    return stop


def prices(curvature_share: float, *, compared: bool) -> tuple[float, float]:
    """What a step costs besides CG, and what an iteration does: the arguments of `marginal_value`, in gradients.

    Args:
        curvature_share: the part of the rows that products are over.
        compared: whether f is evaluated at every iterate.
    """
    return GRADIENT + EVALUATION + PRODUCT * curvature_share, PRODUCT * curvature_share + EVALUATION * compared
