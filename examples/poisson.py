"""-Δu = 2π² sin(πx) sin(πy) on the unit square, u = 0 on its edge, by a network of 257 numbers: to an error of about 1e-7.

    python examples/poisson.py --steps 100
    python examples/poisson.py --steps 100 --picture poisson.svg     u and its error

Two terms, the equation inside and the value on the edge, each with points of its own; derivatives by the inputs are torch's.
Steps see all points, and nothing is set but the preset.
"""

import argparse
import math

import torch
from torch import Tensor, nn

import shf


def exact(x: Tensor) -> Tensor:
    return (math.pi * x).sin().prod(1, keepdim=True)


def laplacian(model: nn.Module, x: Tensor) -> Tensor:
    x.requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    bends = [torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(x.shape[1])]
    return sum(bends)[:, None]


def error(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x) - exact(x)


def edge(rows: int) -> Tensor:
    """Points with one coordinate 0 or 1."""
    x = torch.rand(rows, 2, dtype=torch.float64)
    x[torch.arange(rows), torch.randint(2, (rows,))] = torch.randint(2, (rows,)).double()
    return x


def picture(model: nn.Module, path: str) -> None:
    from matplotlib import pyplot as plt  # in the extra "lab"

    line = torch.linspace(0, 1, 101, dtype=torch.float64)
    grid = torch.cartesian_prod(line, line)
    with torch.no_grad():
        shown = {"u": model(grid), "u - sin(πx) sin(πy)": error(model, grid)}
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    for place, (title, values) in zip(axes, shown.items(), strict=True):
        image = place.imshow(
            values.view(101, 101).t().numpy(), origin="lower", extent=(0, 1, 0, 1), interpolation="none"
        )
        place.set(title=title, xlabel="x", ylabel="y")
        figure.colorbar(image, ax=place)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--picture", help="a file for u and its error")
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1)).double()
    terms = {"inside": shf.Term(nn.MSELoss(), forward=laplacian), "edge": shf.Term(nn.MSELoss())}
    optimizer = shf.SHF(model, terms, **shf.presets.residual)

    x, y, unseen = torch.rand(900, 2, dtype=torch.float64), edge(120), torch.rand(9000, 2, dtype=torch.float64)
    points = {"inside": (x, -2 * math.pi**2 * exact(x)), "edge": (y, torch.zeros(120, 1, dtype=torch.float64))}
    for step in range(1, options.steps + 1):
        info = optimizer.step(points)
        if step % 25 == 0 or step == options.steps:
            found = error(model, unseen).square().mean().sqrt().item()
            print(f"step {step}: loss {info.loss_after:.1e}, error on unseen points {found:.1e}", flush=True)
    if options.picture:
        picture(model, options.picture)


if __name__ == "__main__":
    main()
