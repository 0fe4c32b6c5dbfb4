"""A training to copy: nothing to set, batches that grow, validation with averaged weights, early stopping, exact resume.

python examples/training.py --epochs 30 --checkpoint training.pt        (again, with more epochs: it goes on where it was)
"""

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shf

PATIENCE = 5  # epochs without a better validation error
Data = tuple[Tensor, Tensor]


def spirals(rows: int, seed: int) -> Data:
    """Points on three arms of a spiral, with noise; the class is the arm."""
    source = torch.Generator().manual_seed(seed)
    arm, radius = torch.randint(3, (rows,), generator=source), torch.rand(rows, generator=source)
    angle = 5 * radius + arm * (2 * torch.pi / 3) + 0.4 * torch.randn(rows, generator=source)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1), arm


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))


@torch.no_grad()
def validate(model: nn.Module, optimizer: shf.SHF, data: Data) -> dict[str, Any]:
    """Loss and weights of the averaged model, which is the one to keep."""
    model.eval()
    with optimizer.averaged():
        loss = nn.functional.cross_entropy(model(data[0]), data[1]).item()
        weights = {name: value.clone() for name, value in model.state_dict().items()}
    model.train()
    return {"epoch": optimizer.epoch_index, "loss": loss, "weights": weights}


def main(epochs: int, checkpoint: Path) -> nn.Module:
    torch.manual_seed(0)
    model, held_out = network(), spirals(500, seed=1)
    loader = shf.GrowingLoader(spirals(1500, seed=0), batch_size=250)
    optimizer = shf.SHF(model, nn.CrossEntropyLoss(), **shf.presets.fast)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader}
    best: dict[str, Any] = {"epoch": 0, "loss": math.inf, "weights": model.state_dict()}
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        best = saved["best"]
        for name, part in parts.items():
            part.load_state_dict(saved[name])

    while optimizer.epoch_index < min(epochs, best["epoch"] + PATIENCE):
        for inputs, targets in optimizer.epoch(loader):  # begins the next epoch at its end
            loader.hear(optimizer.step(inputs, targets))  # batches grow once gradients become noisy
        found = validate(model, optimizer, held_out)
        print(f"epoch {found['epoch']}: validation loss {found['loss']:.4f}, batches of {loader.batch_size}")
        best = min(best, found, key=lambda tried: tried["loss"])
        states = {name: part.state_dict() for name, part in parts.items()}
        torch.save({**states, "best": best}, checkpoint.with_suffix(".new"))
        checkpoint.with_suffix(".new").replace(checkpoint)  # whole, or not at all

    model.load_state_dict(best["weights"])
    return model.eval()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--checkpoint", type=Path, default=Path("training.pt"))
    options = parser.parse_args()
    trained, (inputs, targets) = main(options.epochs, options.checkpoint), spirals(1000, seed=2)
    print(f"{(trained(inputs).argmax(1) != targets).sum()} of 1000 new points are wrong")
