"""Every stage of an iteration against numbers recorded from the author's own program, iteration by iteration.

The two files hold, for each iteration, its own starting state and what each stage made of it. Tolerance: 1e-10 relative to
the largest entry of each array.
"""

import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import shf
from helpers import Objective, assert_close
from shf.damping.levenberg import adapt_damping, reduction_ratio
from shf.data.batches import Batch, curvature_rows
from shf.linear.cg import conjugate_gradient
from shf.linear.decay import Decay
from shf.losses import Loss
from shf.model.network import Network
from shf.preconditioners import EmpiricalFisher, Identity, Preconditioner
from shf.preconditioners.diagonal import inverse_diagonal_
from shf.probing.layout import find_layout
from shf.selection import backtrack, line_search
from shf.update import clip_norms_

FOLDER = Path(__file__).parent / "golden"


class Trace:
    """One recorded run, and the same network and loss built with torch."""

    def __init__(self, name: str) -> None:
        arrays = np.load(FOLDER / f"{name}.npz", allow_pickle=False)
        self.name = name
        self.meta = json.loads(str(arrays["meta"]))
        self.of = SimpleNamespace(**{k: torch.from_numpy(arrays[k]) for k in arrays.files if k != "meta"})
        self.iterations = len(self.of.theta)
        self.model = _network(self.meta)
        self.loss = _loss(self.meta)
        self.decay = float(self.meta["weight_decay"])

    def network_at(self, k: int) -> Network:
        network = Network(self.model, list(self.model.parameters()))
        with torch.no_grad():
            for p, value in zip(network.parameters, network.shapes.split(self.of.theta[k]), strict=True):
                p.copy_(value)
        return network

    def objective_at(self, k: int, preconditioner: Preconditioner | None = None) -> Objective:
        network = self.network_at(k)
        batch = Batch.of(self.of.inputs[k], self.of.targets[k])
        size, subset = self.meta["curvature_batch"], int(self.of.curvature_subset[k])
        rows = curvature_rows(batch.rows, size, subset)
        decay = Decay(network.shapes, tuple(self.decay if p.ndim > 1 else 0.0 for p in network.parameters))
        return Objective(
            network,
            Loss(self.loss),
            batch,
            find_layout(network, batch, 0),
            curvature_rows=rows,
            decay=decay,
            preconditioner=preconditioner or EmpiricalFisher(),
        )

    def start_at(self, k: int) -> torch.Tensor | None:
        return None if k == 0 else self.of.cg_decay[k] * self.of.cg_iterates[k - 1][-1]


def _network(meta: dict) -> nn.Module:
    activation = {"relu": nn.ReLU, "logistic": nn.Sigmoid, "sigmoid": nn.Sigmoid, "linear": nn.Identity}
    sizes, layers = meta["layers"], []
    for i, (n_in, n_out) in enumerate(itertools.pairwise(sizes)):
        layers.append(nn.Linear(n_in, n_out))
        if i < len(sizes) - 2:
            layers.append(activation[meta["activations"][i]]())
    return nn.Sequential(*layers).double()


def _loss(meta: dict):
    if meta["loss"].startswith("softmax"):
        return nn.CrossEntropyLoss()
    return shf.losses.per_case(nn.BCEWithLogitsLoss())


@pytest.fixture(scope="module", params=["classifier", "autoencoder"])
def trace(request) -> Trace:
    return Trace(request.param)


def test_the_traces_are_whole(trace):
    assert trace.iterations >= 30
    assert trace.of.cg_iterates.shape == (trace.iterations, trace.meta["cg_iterations"], trace.of.theta.shape[1])


def test_objective_and_gradient(trace):
    for k in range(trace.iterations):
        expansion = trace.objective_at(k, Identity()).expand(float(trace.of.damping[k]))
        assert_close(expansion.value, trace.of.loss_before[k])
        assert_close(expansion.gradient, trace.of.gradient[k])


def test_preconditioner(trace):
    for k in range(trace.iterations):
        objective = trace.objective_at(k)
        _, _, diagonal = objective.data_terms()
        P_inverse = inverse_diagonal_(diagonal, float(trace.of.damping[k]), objective.problem._decay, trace.meta["xi"])
        assert_close(1 / P_inverse, trace.of.preconditioner[k])


def test_cg_iterates_and_quadratic_model(trace):
    for k in range(trace.iterations):
        objective = trace.objective_at(k)
        lam = float(trace.of.damping[k])
        expansion = objective.expand(lam)
        cg = conjugate_gradient(
            objective.curvature(lam).product,
            -expansion.gradient,
            start=trace.start_at(k),
            iterations=trace.meta["cg_iterations"],
            precondition=expansion.precondition,
        )
        assert_close(torch.stack(list(cg.iterates)), trace.of.cg_iterates[k])
        chosen = int(trace.of.first_worse_choice[k])
        delta = cg.iterates[chosen]
        assert_close(cg.values[chosen] - 0.5 * lam * delta.dot(delta), trace.of.model_change_at_choice[k])


def test_objective_at_the_iterates(trace):
    for k in range(trace.iterations):
        objective = trace.objective_at(k)
        objective.expand(float(trace.of.damping[k]))
        found = [objective.value(trace.of.theta[k] + delta) for delta in trace.of.cg_iterates[k]]
        assert_close(found, trace.of.loss_at_iterates[k])


def test_backtracking_stops_at_the_first_worse(trace):
    compared = 0
    for k in range(trace.iterations):
        losses = trace.of.loss_at_iterates[k]
        choice = backtrack(lambda j, losses=losses: losses[j].item(), len(losses))
        assert_close(choice.value, trace.of.loss_at_choice[k])
        visited = losses[max(int(trace.of.first_worse_choice[k]) - 1, 0) :]
        if visited.diff().abs().min() > 1e-12:  # otherwise they tie to rounding, and the choice between them is noise
            compared += 1
            assert choice.index == trace.of.first_worse_choice[k]
    assert compared == {"classifier": 36, "autoencoder": 0}[trace.name]


def test_reduction_ratio_and_damping(trace):
    of = trace.of
    for k in range(trace.iterations):
        rho = reduction_ratio(
            of.loss_at_choice[k].item(), of.loss_before[k].item(), of.model_change_at_choice[k].item()
        )
        expected = of.rho_at_choice[k].item()
        if math.isinf(expected):
            assert rho == expected
        else:
            assert_close(rho, expected)
        if k + 1 < trace.iterations:
            assert_close(adapt_damping(of.damping[k].item(), rho, 0.99), of.damping[k + 1])


def test_update_and_weight_clipping(trace):
    of, shapes = trace.of, trace.network_at(0).shapes
    compared = 0
    for k in range(trace.iterations):
        delta = of.cg_iterates[k][of.first_worse_choice[k]]
        rate = line_search(
            lambda alpha: math.inf,
            of.loss_before[k].item(),
            of.loss_at_choice[k].item(),
            of.slope_at_choice[k].item(),
            steps=0,
        )
        if of.rate[k] != 1 or rate.alpha != 1:
            continue  # the recorded test has the slope's sign reversed: only α = 1 in both is comparable
        compared += 1
        theta = of.theta[k] + of.update_decay[k] * delta
        clips = trace.name == "classifier"  # the author's autoencoder program has no clipping
        clipped = clip_norms_(theta.clone(), shapes, "fan-in") if clips else theta
        assert_close(clipped, of.theta_next[k])
        assert (not torch.allclose(clipped, theta, rtol=0, atol=1e-14)) == bool(of.maxnorm_clipped[k])
    assert compared >= 25


def test_the_whole_trajectory_from_the_first_state(trace):
    """SHF with "first-worse", stepped from the first recorded state until the first clipping or rate other than 1."""
    of, meta = trace.of, trace.meta
    trace.network_at(0)
    optimizer = shf.SHF(
        trace.model,
        trace.loss,
        damping=float(of.damping[0]),
        cg_iterations=meta["cg_iterations"],
        curvature_batch=meta["curvature_batch"],
        weight_decay=meta["weight_decay"],
        update_decay=0.998,
        backtracking="first-worse",
    )
    comparable = ~of.maxnorm_clipped & (of.rate == 1)
    end = trace.iterations if comparable.all() else int(comparable.int().argmin())
    for k in range(end):
        if k and k % meta["batches"] == 0:
            optimizer.next_epoch()
        assert_close(optimizer.damping, of.damping[k])
        assert_close(optimizer.cg_decay, of.cg_decay[k])
        assert_close(optimizer.update_scale, of.update_decay[k])
        info = optimizer.step(of.inputs[k], of.targets[k])
        assert_close(info.loss_before, of.loss_before[k])
        assert info.accepted
        theta = torch.cat([p.detach().reshape(-1) for p in trace.model.parameters()])
        assert_close(theta, of.theta_next[k])
    assert end >= 14
