"""step(closure): the step on the rows that it has inside; and one answer to every call that gives no batch."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import shf
from helpers import identical, labelled, mlp, normalised, snapshot, theta

CE = nn.CrossEntropyLoss()
x, t = labelled()


def copies(make):
    model = make()
    return model, copy.deepcopy(model)


def pair(make=mlp, loss=CE, **options):
    """Two optimizers of two equal models, the first for batches, the second for closures."""
    return [shf.SHF(model, loss, seed=1, **options) for model in copies(make)]


@pytest.mark.parametrize("make", [mlp, lambda: mlp(dropout=0.5), normalised], ids=["plain", "dropout", "batch norm"])
@pytest.mark.parametrize("options", [{}, shf.presets.fast, shf.presets.residual], ids=["paper", "fast", "residual"])
def test_a_step_on_a_closure_is_the_step_on_its_rows(make, options):
    """λ, ρ, masks, statistics and parameters. Fails if the closure sees other draws, or other parameters, anywhere."""
    if make is normalised and not options:  # by default rows that mix are sampled, and a closure's are not
        options = {"preconditioner_squares": "exact"}
    plain, closed = pair(make, **options)
    for _ in range(3):
        expected, info = plain.step(x, t), closed.step(lambda: shf.evaluate(closed.model(x), t))
        assert info.loss_before == pytest.approx(expected.loss_before, rel=1e-12)
        assert info.loss_after == pytest.approx(expected.loss_after, rel=1e-8)
    assert torch.allclose(theta(closed.model), theta(plain.model), rtol=1e-6, atol=1e-8)
    for ours, theirs in zip(closed.model.buffers(), plain.model.buffers(), strict=True):
        assert torch.allclose(ours, theirs)


def test_rows_that_a_closure_draws_are_those_of_the_whole_step():
    """Collocation points from torch.rand, and targets that follow from them: fails if outputs and targets are of other
    draws, for then no step could bring the loss to where it comes."""
    model = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1)).double()
    optimizer = shf.SHF(model, nn.MSELoss(), seed=0, **shf.presets.residual)
    seen = set()

    def closure():
        points = torch.rand(60, 1, dtype=torch.float64)
        seen.add(points[0].item())
        return shf.evaluate(model(points), torch.sin(6 * points))

    closure()
    for _ in range(30):
        info = optimizer.step(closure)
    assert info.loss_after < 1e-6
    assert len(seen) >= 30  # new ones in each step


def test_terms_by_name():
    terms = {"inside": shf.Term(nn.MSELoss()), "edge": shf.Term(nn.MSELoss(), weight=10.0)}
    a, b = torch.rand(9, 4).double(), torch.rand(5, 4).double()
    u, v = torch.rand(9, 3).double(), torch.rand(5, 3).double()
    plain, closed = pair(loss=terms)
    for _ in range(3):
        expected = plain.step({"inside": (a, u), "edge": (b, v)})
        info = closed.step(
            lambda: shf.evaluate({"inside": closed.model(a), "edge": closed.model(b)}, {"inside": u, "edge": v})
        )
        assert info.terms == pytest.approx(expected.terms)
    assert torch.allclose(theta(closed.model), theta(plain.model), rtol=1e-8)
    with pytest.raises(ValueError, match="its outputs lack 'edge'"):
        closed.step(lambda: shf.evaluate({"inside": closed.model(a)}, {"inside": u}))


def test_a_model_that_is_differentiated_by_its_inputs():
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    optimizer = shf.SHF(model, nn.MSELoss(), **shf.presets.residual)
    points = torch.linspace(0, 1, 30, dtype=torch.float64)[:, None]

    def slope_and_start():
        z = points.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(z).sum(), z, create_graph=True)
        start = model(points[:1] * 0)
        return shf.evaluate(torch.cat([slope - torch.cos(points), start]), torch.zeros(31, 1, dtype=torch.float64))

    for _ in range(20):
        optimizer.step(slope_and_start)
    assert (model(points) - torch.sin(points)).abs().max() < 1e-4


@pytest.mark.parametrize("option", ["curvature_batch", "microbatch"])
def test_rows_of_a_closure_are_not_taken_apart(option):
    """All of them count for curvature; fewer are refused, and nothing has changed."""
    optimizer = shf.SHF(mlp(), CE, **{option: 5})
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=rf"{option}.*a closure runs all the rows that it has inside"):
        optimizer.step(lambda: shf.evaluate(optimizer.model(x), t))
    assert identical(snapshot(optimizer), before)
    assert shf.SHF(model := mlp(), CE, **{option: len(x)}).step(lambda: shf.evaluate(model(x), t)).accepted


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_batch_in_a_closures_place_is_that_batch(wrapped):
    """With all that a batch can do; wrappers, which make a function of it, included."""
    plain, closed = pair(curvature_batch=5, microbatch=4)
    given = shf.batch(x, t)
    expected, info = plain.step(x, t), closed.step(closure=partial(lambda c: c(), given) if wrapped else given)
    assert info == expected
    assert closed.info is info
    assert torch.equal(theta(closed.model), theta(plain.model))


def scaled(optimizer):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(CE(optimizer.model(x), t)).backward()
    scaler.step(optimizer)


def with_backward(optimizer):
    def closure():
        optimizer.zero_grad()
        loss = CE(optimizer.model(x), t)
        loss.backward()
        return loss

    optimizer.step(closure)


WRONG = {
    "step()": lambda o: o.step(),
    "step(None)": lambda o: o.step(None),
    "a closure as for L-BFGS": with_backward,
    "step(closure=...)": lambda o: o.step(closure=lambda: CE(o.model(x), t)),
    "a closure that returns a number": lambda o: o.step(lambda: CE(o.model(x), t).item()),
    "a closure that returns nothing": lambda o: o.step(lambda: None),
    "step(loss)": lambda o: o.step(CE(o.model(x), t)),
    "step([x], t), from a dataset of 1-tuples": lambda o: o.step([x], t),
    "step(batch), a list": lambda o: o.step([x, t]),
    "step(batch), a tuple": lambda o: o.step((x, t)),
    "GradScaler": scaled,
    "a batch and a closure": lambda o: o.step(x, t, closure=lambda: shf.evaluate(o.model(x), t)),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_calls_without_a_batch_get_one_answer_and_change_nothing(call):
    optimizer = shf.SHF(mlp(), CE)
    before = snapshot(optimizer)
    with pytest.raises(TypeError, match=r"^step got ") as error:
        call(optimizer)
    assert "return shf.evaluate(model(inputs), targets) in place of the loss" in str(error.value)
    assert "docs/integrations.md" in str(error.value)
    after = snapshot(optimizer)
    if call is scaled:  # its backward pass has left gradients
        before["gradients"] = after["gradients"]
    assert identical(after, before)


def test_a_loss_for_outputs_is_refused():
    optimizer = shf.SHF(mlp(), CE)
    with pytest.raises(ValueError, match="expected the model's outputs, not their loss"):
        optimizer.step(lambda: shf.evaluate(cross_entropy(optimizer.model(x), t)))


def test_the_page_is_that_of_the_framework_that_called(monkeypatch):
    caller: dict = {"__name__": "lightning.pytorch.loops"}
    exec("def call(optimizer):\n    optimizer.step()", caller)
    with pytest.raises(TypeError, match=r"docs/integrations\.md#lightning$"):
        caller["call"](shf.SHF(mlp(), CE))
