"""What a model and a loss do with rows, found by running them."""
