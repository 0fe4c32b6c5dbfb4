"""f at and around θ: on one batch, on many, on rows that are spread over processes."""
