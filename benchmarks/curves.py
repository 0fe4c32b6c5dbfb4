"""What linear codes leave of the generated CURVES, beside what is published of the original; and a picture of them.

`python benchmarks/curves.py measure` writes results/paper/curves.json, `… picture` draws docs/figures/curves.png.
All figures are the squared error ‖x - x̂‖² per test image. Published: Hinton & Salakhutdinov, Science 313 (2006), 504-507.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from scipy.interpolate import CubicSpline
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from shf.lab.data.curves import (
    IMAGE_SHAPE,
    SAMPLES,
    TEST,
    TRAIN,
    Images,
    Points,
    generate,
    painted,
    pca_left,
    streams,
)
from shf.lab.data.files import sha256
from shf.lab.files import write_atomically

RECORD, PICTURE = Path("results/paper/curves.json"), Path("docs/figures/curves.png")
PUBLISHED = {"PCA, 18": 5.90, "logistic PCA, 18": 2.45, "logistic PCA, 6": 7.64}
ROUND, TOLERANCE = 50, 1e-4
"""Iterations of L-BFGS between two looks at the loss, and the relative fall below which it has converged."""


def logistic_pca(train: Images, test: Images, components: int, most: int) -> dict[str, float]:
    """x̂ = sigmoid(V (W (x - mean)) + b), W and V of so many components, the cross-entropy minimised by L-BFGS.

    From the principal components; until 50 iterations lower the loss by less than a part in 10⁴, or `most` are made.
    """
    mean = train.mean(axis=0, dtype=np.float64)
    basis = np.linalg.eigh(np.cov(train.T, dtype=np.float64))[1][:, -components:].copy()
    inside = torch.from_numpy(mean.clip(1e-3, 1 - 1e-3)).float()
    encoder = torch.from_numpy(basis).float().requires_grad_()
    decoder = torch.from_numpy(4 * basis.T.copy()).float().requires_grad_()
    bias = torch.logit(inside).requires_grad_()
    images, centre = torch.from_numpy(train), torch.from_numpy(mean).float()
    optimizer = torch.optim.LBFGS(
        [encoder, decoder, bias], max_iter=ROUND, history_size=20, line_search_fn="strong_wolfe", tolerance_change=0.0
    )

    def logits(x: Tensor) -> Tensor:
        return (x - centre) @ encoder @ decoder + bias

    def loss() -> Tensor:
        optimizer.zero_grad()
        f = binary_cross_entropy_with_logits(logits(images), images) * images.shape[1]
        f.backward()
        return f

    iterations, before = 0, float("inf")
    while iterations < most:
        after = float(optimizer.step(loss).detach())  # the loss at the beginning of these iterations
        iterations += ROUND
        if before - after < TOLERANCE * after:
            break
        before = after
    with torch.no_grad():
        errors = {
            name: torch.sigmoid(logits(x)) - x for name, x in (("train", images), ("test", torch.from_numpy(test)))
        }
    found = {name: float((error**2).sum(dim=1).mean()) for name, error in errors.items()}
    return {**found, "iterations": iterations, "cross_entropy": after}


def first_version(train: int, test: int) -> tuple[Images, Images]:
    """Images of the generator before it was calibrated: natural cubic splines through three points in the order drawn by
    chance, at t = 0, ½, 1, with a softer pen."""

    def drawn(cases: int, stream: np.random.Generator) -> Images:
        points = stream.uniform(6.0, 21.0, size=(cases, 3, 2))
        return painted(spline(points), 0.25)

    of_train, of_test = streams(0)
    return drawn(train, of_train), drawn(test, of_test)


def spline(points: Points) -> Points:
    """Of each curve's points (cases, 3, 2) its samples (cases, 60, 2)."""
    through = CubicSpline([0.0, 0.5, 1.0], points, axis=1, bc_type="natural")
    return np.asarray(through(np.linspace(0.0, 1.0, SAMPLES)))


VERSIONS = {1: first_version, 2: generate}


def measured(version: int, train: int, test: int, most: int) -> dict[str, object]:
    images, others = VERSIONS[version](train, test)
    fits = {f"logistic PCA, {k}": logistic_pca(images, others, k, most) for k in (6, 18)}
    figures = {"PCA, 18": pca_left(images, others), **{name: fit["test"] for name, fit in fits.items()}}
    return {
        "cases": [train, test],
        "figures": figures,
        "published": PUBLISHED,
        "off_percent": {name: 100 * (figures[name] / published - 1) for name, published in PUBLISHED.items()},
        "fits": fits,
        "ink": float(others.mean()),
        "black": float((others > 0.95).mean()),
        "sha256": {"train": sha256(images.tobytes()), "test": sha256(others.tobytes())},
    }


def measure(version: int, train: int, test: int, most: int) -> None:
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    record[f"version {version}"] = measured(version, train, test, most)
    write_atomically(RECORD, (json.dumps(dict(sorted(record.items())), indent=1) + "\n").encode())
    print(json.dumps(record[f"version {version}"], indent=1))


def picture() -> None:
    """Fifty curves of each version, the first of the training images: above the first, below the second."""
    from matplotlib.image import imsave

    parts = [_tiled(generator(50, 1)[0]) for generator in VERSIONS.values()]
    gap = np.ones((6, parts[0].shape[1]), dtype=np.float32)
    imsave(PICTURE, np.concatenate([parts[0], gap, *parts[1:]]), cmap="gray_r", vmin=0, vmax=1)


def _tiled(images: Images) -> Images:
    """(n, 784) to rows of 25 images."""
    rows = images.reshape(-1, 25, *IMAGE_SHAPE).transpose(0, 2, 1, 3)
    return rows.reshape(-1, 25 * IMAGE_SHAPE[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["measure", "picture"])
    parser.add_argument("--version", type=int, default=2)
    parser.add_argument("--train", type=int, default=TRAIN)
    parser.add_argument("--test", type=int, default=TEST)
    parser.add_argument("--most", type=int, default=1000, help="iterations of L-BFGS")
    given = parser.parse_args()
    if given.what == "picture":
        picture()
    else:
        measure(given.version, given.train, given.test, given.most)


if __name__ == "__main__":
    main()
