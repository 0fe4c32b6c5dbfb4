"""Modules whose parameters or statistics others have already spread over processes: refused, with what to do instead."""

import sys

from torch import nn

from shf.ranks import Ranks


def refuse_unsupported(model: nn.Module, ranks: Ranks) -> None:
    """Refuses DTensor parameters (FSDP2's `fully_shard`, tensor parallelism) and SyncBatchNorm in training mode."""
    loaded = sys.modules.get("torch.distributed.tensor")  # no DTensor exists where this was never imported
    for name, p in model.named_parameters():
        if loaded is not None and isinstance(p, loaded.DTensor):
            raise TypeError(
                f"parameter {name} is a DTensor (fully_shard, tensor parallelism): curvature products differentiate twice "
                "by whole parameters, which DTensor does not support; keep the model whole on every rank, and use "
                "split_vectors=True for the optimizer's own"
            )
    for name, m in model.named_modules():
        if isinstance(m, nn.SyncBatchNorm) and m.training and (ranks.several or _on_cpu(m)):
            raise TypeError(
                f"{name or 'the model'} is a SyncBatchNorm in training mode: torch has none on CPU, and none that can be "
                "differentiated twice; use BatchNorm (statistics of each rank's own rows), GroupNorm, or eval mode"
            )


def _on_cpu(module: nn.Module) -> bool:
    return all(t.device.type == "cpu" for t in [*module.parameters(), *module.buffers()])
