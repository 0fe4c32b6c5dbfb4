"""What can go wrong around a step: batches that are not finite, memory that runs out, Ctrl-C, steps that are rejected."""
