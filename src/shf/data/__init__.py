"""Rows, batches, frozen draws, nested structures of tensors."""
