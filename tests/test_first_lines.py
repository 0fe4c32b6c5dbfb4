"""First lines that go wrong, of people who come from other optimizers: each gets a message with the right line in it."""

import re
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import shf
from helpers import FEATURES, labelled, mlp, theta

CE = nn.CrossEntropyLoss()
x, t = labelled()


class Several(nn.Module):
    """Its outputs are what `wrap` makes of two tensors."""

    def __init__(self, wrap):
        super().__init__()
        self.layer, self.wrap = nn.Linear(FEATURES, 3).double(), wrap

    def forward(self, inputs):
        return self.wrap(self.layer(inputs), inputs)


@dataclass
class Output:
    logits: Any
    hidden: Any = None


def several(*fields):
    return Several(lambda z, h: dict(zip(fields, (z, h), strict=False)))


LINES = {
    "SHF(model.parameters(), lr=1e-3)": (
        lambda: shf.SHF(mlp().parameters(), lr=1e-3),
        "shf.SHF(model, torch.nn.CrossEntropyLoss())",
    ),
    "SHF(model, lr=1e-3)": (lambda: shf.SHF(mlp(), lr=1e-3), "shf.SHF(model, torch.nn.CrossEntropyLoss())"),
    "SHF(model, loss, lr=1e-3)": (lambda: shf.SHF(mlp(), CE, lr=1e-3), "no learning rate in this optimizer"),
    "SHF(model, nn.CrossEntropyLoss)": (lambda: shf.SHF(mlp(), nn.CrossEntropyLoss), "CrossEntropyLoss()"),
    "SHF(model, loss, shf.presets.fast)": (lambda: shf.SHF(mlp(), CE, shf.presets.fast), "**shf.presets.fast"),
    "step()": (lambda: shf.SHF(mlp(), CE).step(), "optimizer.step(inputs, targets)"),
    "step(loss)": (lambda: shf.SHF(mlp(), CE).step(torch.zeros(())), "optimizer.step(inputs, targets)"),
    "step(closure)": (
        lambda: shf.SHF(mlp(), CE).step(lambda: torch.zeros(())),
        "return shf.evaluate(model(inputs), targets)",
    ),
    "step(batch)": (lambda: shf.SHF(mlp(), CE).step([x, t]), "optimizer.step(*batch)"),
    "step(x)": (lambda: shf.SHF(mlp(), CE).step(x), "no targets"),
    "a loss without targets": (
        lambda: shf.SHF(mlp(), lambda z: z.square().mean()).step(x, t),
        "expected a callable loss(outputs, targets)",
    ),
    "step([x], t)": (lambda: shf.SHF(mlp(), CE).step([x], t), "optimizer.step(inputs[0], targets)"),
    "a model with several outputs": (
        lambda: shf.SHF(several("logits", "hidden"), CE).step(x, t),
        "forward=lambda model, inputs: model(inputs)['logits']",
    ),
    "HF.step([(x, t)], [(x, t)])": (lambda: shf.HF(mlp(), CE).step([(x, t)], [(x, t)]), "curvature=(x, y)"),
    "HF.step([(x, t)])": (lambda: shf.HF(mlp(), CE).step([(x, t)]), "curvature=(x, y)"),
    "HF.step(closure)": (lambda: shf.HF(mlp(), CE).step(lambda: 0), "curvature=(x, y)"),
    "HF(curvature_batch=100)": (lambda: shf.HF(mlp(), CE, curvature_batch=100), "step(batches, curvature=...)"),
    "a scheduler": (lambda: torch.optim.lr_scheduler.StepLR(shf.SHF(mlp(), CE), 1), "leave the learning rate"),
    "averaged() without averages": (lambda: shf.SHF(mlp(), CE).averaged().__enter__(), "averaging=0.95"),
    "GrowingLoader(shuffle=True)": (lambda: shf.GrowingLoader((x, t), 4, shuffle=True), "it shuffles all rows"),
}


@pytest.mark.parametrize(("call", "right"), LINES.values(), ids=LINES)
def test_a_first_line_that_goes_wrong_is_answered_by_the_right_one(call, right):
    with pytest.raises((TypeError, ValueError, RuntimeError, KeyError), match=re.escape(right)):
        call()


@pytest.mark.parametrize(
    "wrap",
    [
        lambda z, h: {"logits": z},
        lambda z, h: Output(z),
        lambda z, h: Output(z, hidden=h[:2]),
        lambda z, h: (z, 3),
        lambda z, h: {"logits": z, "classes": z.argmax(1), "scale": z.mean()},
    ],
)
def test_the_only_output_that_fits_is_taken(wrap):
    """As if the model returned it alone."""
    torch.manual_seed(0)
    model, alone = Several(wrap), Several(lambda z, h: z)
    alone.load_state_dict(model.state_dict())
    shared = getattr(model(x), "hidden", None) is not None  # of other rows: then squares are sampled by default
    options = {"preconditioner_squares": "exact"} if shared else {}
    for each in (model, alone):
        shf.SHF(each, CE, seed=0, **options).step(x, t)
    assert torch.equal(theta(model), theta(alone))


def test_a_loss_of_ones_own_gets_what_the_model_returns():
    model = several("logits", "hidden")
    optimizer = shf.SHF(model, lambda outputs, t: CE(outputs["logits"], t))
    assert optimizer.step(x, t).accepted


def test_other_options_than_the_saved_ones_are_named_once():
    saved = shf.SHF(mlp(), CE, cg_iterations=3, seed=0).state_dict()
    with pytest.warns(shf.SHFWarning) as found:
        shf.SHF(mlp(), CE, cg_iterations=5, damping=0.5, microbatch=3).load_state_dict(saved)
    (warning,) = found
    assert "damping=0.5 (saved with 1.0), cg_iterations=5 (saved with 3)" in str(warning.message)
    assert "microbatch" not in str(warning.message)  # no step depends on it
    shf.SHF(mlp(), CE, cg_iterations=3, microbatch=3).load_state_dict(saved)


def run(program):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=1200, check=True)


def test_importing_is_silent_where_there_is_only_torch():
    """Without numpy torch says so on import; fails if that is all one sees of shf's."""
    done = run("import sys; sys.modules['numpy'] = None; import shf; print(shf.__version__)")
    assert (done.stdout, done.stderr) == (f"{shf.__version__}\n", "")


def test_the_version_is_told_without_the_laboratory():
    program = (
        "import sys; sys.modules['typer'] = None; sys.argv = ['shf', '--version']; from shf import cli; cli.main()"
    )
    assert run(program).stdout == f"shf {shf.__version__}\n"


def test_a_loaders_workers_make_the_batches_that_it_makes_alone():
    """In the same order."""
    samples = list(zip(x, t, strict=True))
    alone, helped = shf.GrowingLoader((x, t), 4, seed=3), shf.GrowingLoader(samples, 4, seed=3, num_workers=2)
    for _ in range(2):
        for (a, b), (c, d) in zip(alone, helped, strict=True):
            assert torch.equal(a, c)
            assert torch.equal(b, d)


def test_a_generator_decides_the_order():
    before = torch.get_rng_state()
    first, second, third = (
        [i.tolist() for (i,) in shf.GrowingLoader((torch.arange(20),), 5, generator=torch.Generator().manual_seed(k))]
        for k in (1, 1, 2)
    )
    assert first == second != third
    assert torch.equal(torch.get_rng_state(), before)
