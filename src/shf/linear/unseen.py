"""What share η of a batch's solution to take: as much as rows that have not seen it bear out. Floats only.

Where every batch is drawn anew, its solution δ fits the draw as well as the objective. To second order the batch's own f
falls along ηδ by (η - ½η²)(S + N), and that of all rows by ηS - ½η²(S + N), where N is the draw's part. This is most for

    η = S / (S + N).

Of N the next batch tells: on average it finds f by ηN higher than the step left it on its own batch. Both this gap and what
steps gained are averaged over about ten steps, in units of f. If the batch is the same again there is no gap, and η is 1;
so it is as long as steps gain more than draws differ by.
"""

from shf.linear.solver import Run

_SHARE, _LEFT, _GAINED, _GAP, _GAIN = NUMBERS = ("share", "share_left", "share_gained", "share_gap", "share_gain")
_MEMORY = 0.9
"""What a step keeps of the averages."""
_LEAST = 0.25
"""Less than this share makes way too slowly where the solution is right."""
_UNITS = 8.0
"""Units in the last place by which f differs from itself when it is evaluated in another way."""


def share(run: Run, eps: float) -> float:
    """η, by what the batch of this step says of the last one.

    Args:
        run: of this step.
        eps: of the precision in which f is evaluated.
    """
    eta, left, gained = (float(run.recall(*known)) for known in ((_SHARE, 1.0), (_LEFT, 0.0), (_GAINED, 0.0)))
    if not gained > 0:
        return eta
    gap, unit = run.value - left, abs(left) + gained
    if abs(gap) <= _UNITS * eps * unit:
        gap = 0.0
    gap = _MEMORY * float(run.recall(_GAP, 0.0)) + (1 - 0.5 * eta) * gap / unit
    gain = _MEMORY * float(run.recall(_GAIN, 0.0)) + gained / unit
    eta = min(max(1 - gap / gain, _LEAST), 1.0)
    for name, number in ((_SHARE, eta), (_GAP, gap), (_GAIN, gain)):
        run.remember(name, number)
    return eta


def stepped(run: Run, fall: float) -> None:
    """The step is made: f fell by so much on its own batch."""
    run.remember(_LEFT, run.value - fall)
    run.remember(_GAINED, fall)
