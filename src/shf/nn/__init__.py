"""Layers for what torch has none: a first layer and dropout for sparse CSR batches."""

from shf.nn.sparse import SparseDropout, SparseLinear

__all__ = ["SparseDropout", "SparseLinear"]
