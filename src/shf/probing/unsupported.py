"""Modules that a step cannot serve, refused with what to do instead: parameters or statistics that others have already
spread over processes, embeddings that have no second derivative or rewrite their weights whenever they run."""

import sys

import torch
from torch import nn

from shf.distributed.collective import Collective
from shf.model.network import Network


def refuse_unsupported(network: Network, ranks: Collective) -> None:
    """Refuses DTensor parameters, SyncBatchNorm in training mode, TorchScript, EmbeddingBag, Embedding with `max_norm`."""
    _refuse_spread(network.model, ranks)
    trained = {id(p) for p in network.parameters}
    for name, m in network.model.named_modules():
        if isinstance(m, torch.jit.ScriptModule):
            raise TypeError(
                f"{name or 'the model'} is TorchScript, into which a step cannot look; train the module that it was made "
                "from, and script it afterwards"
            )
        if isinstance(m, nn.EmbeddingBag) and id(m.weight) in trained:
            raise TypeError(
                f"{name or 'the model'} is an EmbeddingBag, which torch cannot differentiate twice; use nn.Embedding and "
                "the sum or mean of its outputs, or freeze it"
            )
        if isinstance(m, nn.Embedding) and m.max_norm is not None and id(m.weight) in trained:
            raise TypeError(
                f"{name or 'the model'} is an Embedding with max_norm={m.max_norm:g}: it rewrites its weights whenever it "
                "runs, and every evaluation in a step must see the same network; give SHF(max_norm=...), a bound on squared "
                "norms, instead"
            )


def _refuse_spread(model: nn.Module, ranks: Collective) -> None:
    """DTensor parameters (FSDP2's `fully_shard`, tensor parallelism) and SyncBatchNorm in training mode."""
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
