"""A batch whose loss or gradient is not finite before the step: the error that says so."""

from typing import Self


class NonFiniteError(ValueError):
    """Loss or gradient are not finite at the present parameters: there is nothing to step from."""

    @classmethod
    def of_sum(cls, value: float, gradient_norm: float) -> Self:
        """For an objective whose parts are finite, and their sum is not: over processes, or with the weight decay."""
        return cls(
            f"the objective is {value} and its gradient's norm {gradient_norm} at the present parameters, before the step: "
            "the batch's own are finite, with weight decay or summed over the processes they are not"
        )

    @classmethod
    def elsewhere(cls) -> Self:
        """For a process whose own rows are fine."""
        return cls("loss or gradient of another process's rows are not finite at the present parameters")
