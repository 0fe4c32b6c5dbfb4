"""Several processes that take a step together."""
