"""SHF in a plain training loop. In frameworks that own the loop: docs/integrations.md.

python examples/plain_loop.py --epochs 5
"""

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shf

LOSS = nn.CrossEntropyLoss()
OPTIONS = {"damping": 0.01, "cg_iterations": 10, "curvature_batch": 100, "seed": 0}


def spirals(rows: int = 1500, arms: int = 3) -> TensorDataset:
    """Points on the arms of a spiral, with noise; the class is the arm."""
    source = torch.Generator().manual_seed(0)
    arm = torch.randint(arms, (rows,), generator=source)
    radius = torch.rand(rows, generator=source)
    angle = 5 * radius + arm * (2 * torch.pi / arms) + 0.2 * torch.randn(rows, generator=source)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], 1), arm)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))


def batches() -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(spirals(), batch_size=500)


def errors(model: nn.Module) -> int:
    inputs, targets = spirals().tensors
    with torch.no_grad():
        return int((model(inputs).argmax(1) != targets).sum())


def epochs(description: str | None) -> int:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--epochs", type=int, default=20)
    return int(parser.parse_args().epochs)


def main(count: int) -> nn.Module:
    model = network()
    optimizer = shf.SHF(model, LOSS, **OPTIONS)
    for _ in range(count):
        for inputs, targets in optimizer.epoch(batches()):  # calls next_epoch at the end
            optimizer.step(inputs, targets)
    return model


if __name__ == "__main__":
    print(f"{errors(main(epochs(__doc__)))} of 1500 points are wrong")
