"""P of preconditioned CG: diagonal, or two factors for each layer."""
