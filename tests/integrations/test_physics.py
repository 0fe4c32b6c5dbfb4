"""Poisson's equation in DeepXDE and in PINA, by the residual solvers."""

import os
import warnings

import pytest
import torch

import shf


@pytest.fixture
def dde(monkeypatch):
    monkeypatch.setitem(os.environ, "DDE_BACKEND", "pytorch")
    import deepxde

    deepxde.config.set_default_float("float64")
    deepxde.config.set_random_seed(0)
    yield deepxde
    deepxde.config.set_default_float("float32")
    torch.set_default_dtype(torch.float32)


def poisson(dde):
    """-u'' = π² sin πx on [0, 1], u = 0 at both ends."""
    import numpy as np

    interval = dde.geometry.Interval(0, 1)
    ends = dde.icbc.DirichletBC(interval, lambda x: 0, lambda x, on_boundary: on_boundary)

    def equation(x, u):
        return dde.grad.hessian(u, x) + torch.pi**2 * torch.sin(torch.pi * x)

    data = dde.data.PDE(interval, equation, ends, 30, 2, solution=lambda x: np.sin(np.pi * x), num_test=50)
    return dde.Model(data, dde.nn.FNN([1, 20, 20, 1], "tanh", "Glorot normal"))


def test_deepxde(dde):
    """Its own loss and metric fall to where first-order methods take thousands of steps; weights are those of its loss."""
    from shf.integrations import deepxde as adapter

    model = poisson(dde)
    optimizer = adapter.compile(model, metrics=["l2 relative error"], loss_weights=[1, 10])
    history, _ = model.train(iterations=30, display_every=10, verbose=0)
    assert sum(history.loss_train[-1]) < 1e-7
    assert sum(history.loss_train[-1]) == pytest.approx(optimizer.info.loss_after, rel=1e-6)
    assert history.metrics_test[-1][0] < 1e-4


def test_deepxde_compiled_as_ever_gets_the_page(dde):
    model = poisson(dde)
    model.compile(shf.SHF(model.net, torch.nn.MSELoss()))
    with pytest.raises(TypeError, match=r"closure that returns its loss: .*docs/integrations\.md#deepxde"):
        model.train(iterations=1, verbose=0)


def test_pina(tmp_path):
    """Counted once a step; the numbers of steps are logged."""
    from pina import Trainer
    from pina.model import FeedForward
    from pina.problem.zoo import Poisson2DSquareProblem

    from shf.integrations.pina import SHFSolver

    problem = Poisson2DSquareProblem()
    problem.discretise_domain(8, "grid")
    solver = SHFSolver(problem, FeedForward(2, 1, layers=[12, 12]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
        trainer = Trainer(solver, max_epochs=30, accelerator="cpu", default_root_dir=tmp_path, logger=False, **settings)
        trainer.train()
    assert trainer.global_step == 30
    assert trainer.callback_metrics["train_loss"] < 0.05
    assert trainer.callback_metrics["shf/damping"] > 0


def test_pina_with_its_own_solvers_gets_the_page():
    from pina.optim import TorchOptimizer

    with pytest.raises(TypeError, match=r"docs/integrations\.md#pina"):
        TorchOptimizer(shf.SHF).hook(torch.nn.Linear(1, 1).parameters())
