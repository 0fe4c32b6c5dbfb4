"""Several processes that take a step together: what they exchange, and how one that is missing is noticed."""
