"""SHF as torch's users meet it: the first example, groups, hooks, modes, data of all kinds."""

import copy
import dataclasses
import itertools
import math
import warnings
from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shf
from helpers import FEATURES, ROWS, assert_close, identical, labelled, mlp, normalised, snapshot, theta, valued

CE = nn.CrossEntropyLoss()


def trained(model, steps=3, data=None, **options):
    """The optimizer after some steps."""
    optimizer = shf.SHF(model, options.pop("loss", CE), **options)
    for _ in range(steps):
        optimizer.step(*(data or labelled()))
    return optimizer


def copies(count=2, make=mlp):
    """The same network several times."""
    model = make()
    return [model, *(copy.deepcopy(model) for _ in range(count - 1))]


# --- a first example ----------------------------------------------------------------------------------------------------

EXAMPLE = """
import torch, shf

model = torch.nn.Sequential(torch.nn.Linear(784, 500), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Linear(500, 10))
optimizer = shf.SHF(model, torch.nn.CrossEntropyLoss(), cg_iterations=3, curvature_batch=100, weight_decay=2e-5)

for epoch in range(10):
    for inputs, targets in loader:                 # the gradient batch
        info = optimizer.step(inputs, targets)     # one iteration of Algorithm 1
    optimizer.next_epoch()                         # γ and β schedules, next curvature rows
"""


def test_the_example_runs_as_written():
    images, digits = torch.randn(120, 784), torch.randint(10, (120,))
    scope = {"loader": DataLoader(TensorDataset(images, digits), batch_size=120)}
    exec(EXAMPLE, scope)
    assert isinstance(scope["info"], shf.StepInfo)
    assert scope["info"].loss_before < 0.5 * torch.tensor(10.0).log()
    assert scope["optimizer"].epoch_index == 10


def test_epoch_passes_batches_through_and_advances_at_the_end():
    by_hand, by_epoch = (trained(model, 0, seed=1, curvature_batch=5) for model in copies())
    loader = [labelled(seed=1), labelled(seed=2)]
    for _ in range(3):
        for inputs, targets in loader:
            by_hand.step(inputs, targets)
        by_hand.next_epoch()
        for inputs, targets in by_epoch.epoch(loader):
            by_epoch.step(inputs, targets)
    assert by_epoch.epoch_index == 3
    assert identical(snapshot(by_hand), snapshot(by_epoch))


def test_an_epoch_that_is_left_early_does_not_count():
    optimizer = trained(mlp(), 0)
    for _ in optimizer.epoch([1, 2, 3]):
        break
    assert optimizer.epoch_index == 0


# --- what a step is -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preconditioner", ["empirical-fisher", "jacobi", None])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_linear_regression_is_solved_in_one_step(preconditioner, decay):
    """A strictly convex quadratic: enough CG iterations find its minimum, the ridge solution."""
    inputs, targets = valued(20)
    model = nn.Linear(FEATURES, 3, bias=False).double()
    optimizer = shf.SHF(
        model, nn.MSELoss(), damping=1e-14, cg_iterations=40, weight_decay=decay, preconditioner=preconditioner
    )
    info = optimizer.step(inputs, targets)
    curvature = 2 / targets.numel() * inputs.t() @ inputs + decay * torch.eye(FEATURES, dtype=torch.float64)
    solution = torch.linalg.solve(curvature, 2 / targets.numel() * inputs.t() @ targets).t()
    assert_close(model.weight.detach(), solution, 1e-7)
    assert info.step_size == 1
    assert info.reduction_ratio == pytest.approx(1)
    assert optimizer.step(inputs, targets).gradient_norm < 1e-6 * info.gradient_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_info_tells_what_happened(dtype):
    model, data = mlp(dtype=dtype), labelled(dtype=dtype)
    optimizer = shf.SHF(model, CE, weight_decay=0.1)
    penalty = 0.05 * sum(p.square().sum().item() for p in model.parameters() if p.ndim == 2)
    before = CE(model(data[0]), data[1])
    gradient = torch.autograd.grad(before, list(model.parameters()))
    decayed = [g + 0.1 * p if p.ndim == 2 else g for g, p in zip(gradient, model.parameters(), strict=True)]
    info = optimizer.step(*data)
    tight = 1e-12 if dtype == torch.float64 else 1e-5
    assert info.loss_before == pytest.approx(before.item() + penalty, rel=tight)
    assert info.gradient_norm == pytest.approx(torch.cat([g.flatten() for g in decayed]).norm().item(), rel=tight)
    penalty = 0.05 * sum(p.square().sum().item() for p in model.parameters() if p.ndim == 2)
    assert info.loss_after == pytest.approx(CE(model(data[0]), data[1]).item() + penalty, rel=tight)
    assert info.loss_after < info.loss_before
    assert (info.damping, optimizer.damping) == (1.0, pytest.approx(0.99))
    assert all(p.dtype == dtype for p in model.parameters())


def test_info_is_frozen_and_made_of_python_numbers():
    info = shf.SHF(mlp(), CE).step(*labelled())
    kinds = {field.name: type(getattr(info, field.name)) for field in dataclasses.fields(info)}
    whole = dict.fromkeys(("chosen_iterate", "cg_steps", "evaluations", "failed_trials", "gradients", "products"), int)
    real = ("loss_before", "loss_after", "gradient_norm", "reduction_ratio", "damping", "step_size")
    absent = dict.fromkeys(("damping_bound", "skipped", "gradient_noise", "terms"), type(None))
    assert kinds == {**whole, **dict.fromkeys(real, float), "cg_stop": shf.CGStop, "accepted": bool, **absent}
    with pytest.raises(dataclasses.FrozenInstanceError):
        info.damping = 1.0


def test_the_same_seed_gives_the_same_trajectory_bit_by_bit():
    ends = [snapshot(trained(model, seed=7)) for model in copies(make=lambda: mlp(dropout=0.5))]
    assert identical(*ends)


def test_another_seed_gives_other_masks():
    a, b = copies(make=lambda: mlp(dropout=0.5))
    assert not torch.equal(theta(trained(a, seed=1).model), theta(trained(b, seed=2).model))


def test_every_step_draws_masks_of_its_own():
    optimizer = shf.SHF(mlp(dropout=0.5), CE, line_search_steps=0, damping=1e12)
    assert len({optimizer.step(*labelled()).loss_before for _ in range(5)}) == 5


# --- what a step leaves alone -------------------------------------------------------------------------------------------


def test_the_global_generator_is_neither_read_nor_moved():
    """Fails without `preserved_global_state`."""
    ends = []
    for model, seed in zip(copies(make=lambda: mlp(dropout=0.5)), (1, 2), strict=True):
        optimizer = shf.SHF(model, CE, seed=3)
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        optimizer.step(*labelled())
        assert torch.equal(torch.get_rng_state(), before)
        ends.append(theta(model))
    assert identical(*ends)


def test_the_seed_is_drawn_once_at_construction():
    ends = []
    for model in copies(make=lambda: mlp(dropout=0.5)):
        torch.manual_seed(5)
        before = torch.get_rng_state()
        optimizer = shf.SHF(model, CE)
        assert not torch.equal(torch.get_rng_state(), before)
        optimizer.step(*labelled())
        ends.append(theta(model))
    assert identical(*ends)
    before = torch.get_rng_state()
    shf.SHF(mlp(), CE, seed=1)
    mlp_draws = torch.get_rng_state()
    torch.set_rng_state(before)
    mlp()
    assert torch.equal(torch.get_rng_state(), mlp_draws)


def test_grad_is_neither_read_nor_written():
    plain, marked = copies()
    marks = [torch.full_like(p, float("nan")) for p in marked.parameters()]
    for p, mark in zip(marked.parameters(), marks, strict=True):
        p.grad = mark
    trained(plain, seed=1)
    trained(marked, seed=1)
    assert all(p.grad is mark and mark.isnan().all() for p, mark in zip(marked.parameters(), marks, strict=True))
    assert all(p.grad is None for p in plain.parameters())
    assert identical(theta(plain), theta(marked))


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad(to_none):
    optimizer = trained(mlp(), 0)
    for p in optimizer.model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.zero_grad(set_to_none=to_none)
    assert all(p.grad is None if to_none else not p.grad.any() for p in optimizer.model.parameters())


@pytest.mark.parametrize("loaded", [False, True])
def test_learning_rate_schedulers_are_told_that_there_is_nothing_to_schedule(loaded):
    optimizer = trained(mlp(), 0)
    if loaded:
        optimizer.load_state_dict(trained(mlp(), 1).state_dict())
    assert not any("lr" in group for group in optimizer.param_groups)
    with pytest.raises(KeyError, match="no learning rate in this optimizer"):
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(KeyError, match=r"^'rate'$"):
        optimizer.param_groups[0]["rate"]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"lr": 1e-3}, r"SHF: parameter group with lr=0.001: there is no learning rate"),
        ({"damping": 3.0}, r"SHF: parameter group with damping=3.0: one value holds for all parameters"),
    ],
)
def test_settings_that_a_group_cannot_have_are_refused(setting, words):
    model = mlp()
    group = {"params": list(model[0].parameters()), **setting}
    with pytest.raises(ValueError, match=words):
        shf.SHF(model, CE, [group])
    optimizer = shf.SHF(model, CE, [{"params": list(model[2].parameters()), "name": "a label"}])
    with pytest.raises(ValueError, match=words):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1


def test_a_plateau_is_crossed_in_single_precision():
    """There f changes by rounding alone. Fails if that counts against the model: λ rises, steps become shorter still, and
    training ends at log 2 with λ at its ceiling."""
    torch.manual_seed(0)
    inputs = torch.randn(500, 8)
    targets = (inputs[:, 0] * inputs[:, 1] > 0).long()
    sizes = [8, *[10] * 5]
    layers = [m for a, b in itertools.pairwise(sizes) for m in (nn.Linear(a, b), nn.Sigmoid())]
    optimizer = shf.SHF(nn.Sequential(*layers, nn.Linear(10, 2)), CE, seed=0, **shf.presets.fast)
    infos = [optimizer.step(inputs, targets) for _ in range(120)]
    assert infos[-1].loss_after < 0.1
    assert max(info.damping for info in infos) < 1e6


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_is_kept(training):
    model = mlp(dropout=0.5).train(training)
    model[0].train(not training)
    trained(model, 1)
    assert [m.training for m in model.modules()] == [training, not training, training, training, training]


def test_in_eval_mode_there_are_no_masks():
    model, (inputs, targets) = mlp(dropout=0.5).eval(), labelled()
    expected = CE(model(inputs), targets).item()
    assert shf.SHF(model, CE).step(inputs, targets).loss_before == pytest.approx(expected, rel=1e-14)


def test_in_train_mode_there_are():
    model, (inputs, targets) = mlp(dropout=0.5).train(), labelled()
    without = CE(copy.deepcopy(model).eval()(inputs), targets).item()
    found = shf.SHF(model, CE, seed=1).step(inputs, targets).loss_before
    assert found != pytest.approx(without, rel=1e-6)


@pytest.mark.parametrize("training", [True, False])
def test_buffers_change_once_per_step_by_a_pass_at_the_old_parameters(training):
    model, (inputs, targets) = normalised().train(training), labelled()
    reference = copy.deepcopy(model)
    optimizer = shf.SHF(model, CE, cg_iterations=4, curvature_batch=6)
    for passes in (1, 2):
        reference.load_state_dict(dict(reference.state_dict()) | dict(model.named_parameters()))
        reference(inputs)
        assert optimizer.step(inputs, targets).evaluations >= 4
        assert model[1].num_batches_tracked.item() == (passes if training else 0)
        assert_close(model[1].running_mean, reference[1].running_mean, 1e-13)
        assert_close(model[1].running_var, reference[1].running_var, 1e-13)


@pytest.mark.parametrize("context", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_step_enables_grad_by_itself(context):
    inside, outside = copies()
    data = labelled()
    with context():
        before = torch.is_grad_enabled()
        trained(inside, seed=1, data=data)
        assert torch.is_grad_enabled() == before
    trained(outside, seed=1, data=data)
    assert identical(theta(inside), theta(outside))


def test_autocast_is_switched_off_with_one_warning():
    inside, outside = copies(make=lambda: mlp(dtype=torch.float32))
    data = labelled(dtype=torch.float32)
    with warnings.catch_warnings(record=True) as caught, torch.autocast("cpu", torch.bfloat16):
        warnings.simplefilter("always")
        trained(inside, seed=1, data=data)
        assert torch.is_autocast_enabled("cpu")
    trained(outside, seed=1, data=data)
    assert identical(theta(inside), theta(outside))
    (warning,) = [w for w in caught if issubclass(w.category, shf.SHFWarning)]
    assert "autocast" in str(warning.message)
    assert warning.filename == __file__


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile, lambda m: nn.DataParallel(torch.compile(m))])
def test_wrappers_are_looked_through(wrap):
    plain, inner = copies()
    wrapped = wrap(inner)
    optimizer = trained(wrapped, seed=1)
    trained(plain, seed=1)
    assert optimizer.model is inner
    assert identical(theta(plain), theta(inner))


# --- parameters and groups ----------------------------------------------------------------------------------------------


def decays(optimizer):
    """w of every parameter, by name."""
    of = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    return {name: of.get(id(p)) for name, p in optimizer.model.named_parameters()}


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        pytest.param(lambda m: None, (0.1, 0.0, 0.1, 0.0), id="all: weights only"),
        pytest.param(lambda m: m.parameters(), (0.1, 0.0, 0.1, 0.0), id="a generator of parameters: weights only"),
        pytest.param(lambda m: m.named_parameters(), (0.1, 0.0, 0.1, 0.0), id="with their names: weights only"),
        pytest.param(lambda m: list(m[0].parameters()), (0.1, 0.0, None, None), id="some parameters: weights only"),
        pytest.param(lambda m: [m[0].bias], (None, 0.0, None, None), id="a bias alone"),
        pytest.param(lambda m: [{"params": m.parameters()}], (0.1,) * 4, id="a group: all of its members"),
        pytest.param(
            lambda m: [{"params": m[0].parameters(), "weight_decay": 0.5}, {"params": m[2].bias}],
            (0.5, 0.5, None, 0.1),
            id="groups: their own value, or the default",
        ),
    ],
)
def test_weight_decay_by_group(params, expected):
    model, (inputs, targets) = mlp(), labelled()
    optimizer = shf.SHF(model, CE, params(model), weight_decay=0.1)
    assert tuple(decays(optimizer).values()) == expected
    penalty = sum(0.5 * (w or 0) * p.square().sum().item() for w, p in zip(expected, model.parameters(), strict=True))
    plain, untouched = CE(model(inputs), targets).item(), [p.detach().clone() for p in model.parameters()]
    assert optimizer.step(inputs, targets).loss_before == pytest.approx(plain + penalty, rel=1e-13)
    for w, p, before in zip(expected, model.parameters(), untouched, strict=True):
        assert torch.equal(p, before) == (w is None)


def test_convolutions_decay_and_norms_do_not():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2))
    assert tuple(decays(shf.SHF(model, CE, weight_decay=0.1)).values()) == (0.1, 0.0, 0.0, 0.0, 0.1, 0.0)


def test_weight_decay_shrinks_what_it_is_on():
    """A loss that is flat in θ: the step solves (w + λ) δ = -wθ where w > 0, and leaves the rest."""
    model, (inputs, targets) = mlp(), valued()
    before = theta(model)
    optimizer = shf.SHF(model, lambda z, t: 0 * z.sum(), weight_decay=0.5, damping=0.5, preconditioner=None)
    optimizer.step(inputs, targets)
    weights = torch.cat([torch.full_like(p, p.ndim == 2).detach().reshape(-1) for p in model.parameters()])
    assert_close(theta(model), before * (1 - 0.5 * weights), 1e-12)


def test_a_parameter_that_was_frozen_for_a_while_begins_without_its_old_solution():
    model = mlp()
    optimizer = shf.SHF(model, CE, seed=1)
    optimizer.step(*labelled())
    assert "delta" in optimizer.state[model[0].weight]
    model[0].requires_grad_(False)
    optimizer.step(*labelled())
    assert "delta" not in optimizer.state[model[0].weight]
    assert "delta" in optimizer.state[model[2].weight]
    model[0].requires_grad_(True)
    assert optimizer.step(*labelled()).accepted


def test_frozen_parameters_are_left_alone():
    whole, frozen = copies()
    frozen[0].requires_grad_(False)
    part = shf.SHF(frozen, CE, seed=1)
    part.step(*labelled())
    assert identical([p.detach() for p in frozen[0].parameters()], [p.detach() for p in whole[0].parameters()])
    assert set(part.state) == set(frozen[2].parameters())
    # The same as if they had not been given.
    shf.SHF(whole, CE, whole[2].parameters(), seed=1).step(*labelled())
    assert identical(theta(whole), theta(frozen))


def test_parameters_may_be_frozen_and_freed_between_steps():
    model = mlp()
    optimizer = trained(model, 1)
    model[0].requires_grad_(False)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step(*labelled())
    assert [torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)] == [True, True, False, False]
    model[0].requires_grad_(True)
    optimizer.step(*labelled())
    assert not any(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("preconditioner", ["empirical-fisher", "jacobi", "kronecker"])
def test_a_parameter_may_be_empty(preconditioner):
    model = mlp()
    model.nothing = nn.Parameter(torch.empty(0, dtype=torch.float64))
    model.register_forward_hook(lambda module, args, output: output + module.nothing.sum())
    assert shf.SHF(model, CE, preconditioner=preconditioner).step(*labelled()).accepted


def test_a_group_can_be_added():
    model = mlp()
    optimizer = shf.SHF(model, CE, model[2].parameters(), weight_decay=0.1)
    optimizer.step(*labelled())
    first = theta(model[0])
    optimizer.add_param_group({"params": model[0].parameters(), "weight_decay": 0.3})
    optimizer.step(*labelled())
    assert decays(optimizer) == {"0.weight": 0.3, "0.bias": 0.3, "2.weight": 0.1, "2.bias": 0.0}
    assert not torch.equal(theta(model[0]), first)
    assert all(optimizer.state[p]["delta"].shape == p.shape for p in model.parameters())


def test_groups_may_hold_named_parameters_or_nothing():
    model = mlp()
    groups = [{"params": []}, {"params": list(model[2].named_parameters()), "weight_decay": 0.2}]
    optimizer = shf.SHF(model, CE, groups)
    optimizer.add_param_group({"params": model[0].named_parameters(), "weight_decay": 0.3})
    assert optimizer.step(*labelled()).accepted
    assert decays(optimizer) == {"0.weight": 0.3, "0.bias": 0.3, "2.weight": 0.2, "2.bias": 0.2}


@pytest.mark.parametrize(
    "give",
    [
        pytest.param(lambda o, foreign: o.add_param_group({"params": foreign.parameters()}), id="adding"),
        pytest.param(lambda o, foreign: shf.SHF(o.model, CE, foreign.parameters()), id="constructing"),
        pytest.param(
            lambda o, foreign: shf.SHF(o.model, CE, [*o.model.parameters(), *foreign.parameters()]), id="both"
        ),
    ],
)
def test_parameters_of_another_model_are_refused(give):
    optimizer, foreign = trained(mlp(), 1), nn.Linear(7, 5, bias=False)
    before = snapshot(optimizer)
    with pytest.raises(
        ValueError, match=r"parameters of shape \[\(5, 7\)\] do not belong to the model that SHF was given"
    ):
        give(optimizer, foreign)
    assert identical(snapshot(optimizer), before)


def test_parameters_cannot_be_in_two_groups():
    optimizer = trained(mlp(), 1)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": optimizer.model[0].weight})
    assert identical(snapshot(optimizer), before)


def test_hooks_run_around_a_step():
    optimizer, seen, data = trained(mlp(), 0), [], labelled()
    handles = [
        optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append(("before", o.damping, args[1:]))),
        optimizer.register_step_post_hook(lambda o, args, kwargs: seen.append(("after", o.damping, args[1:]))),
    ]
    info = optimizer.step(*data)
    assert info.damping != optimizer.damping
    assert identical(seen, [("before", info.damping, data), ("after", optimizer.damping, data)])
    for handle in handles:
        handle.remove()
    optimizer.step(*data)
    assert len(seen) == 2


def test_a_hook_may_replace_the_batch():
    plain, hooked = (shf.SHF(model, CE, seed=1) for model in copies())
    hooked.register_step_pre_hook(lambda o, args, kwargs: ((o, *labelled(seed=2)), kwargs))
    plain.step(*labelled(seed=2))
    hooked.step(*labelled(seed=1))
    assert identical(snapshot(plain), snapshot(hooked))


def test_repr_shows_settings_state_and_groups():
    optimizer = shf.SHF(mlp(), CE, weight_decay=2e-5, cg_iterations=7)
    optimizer.next_epoch()
    text = repr(optimizer)
    assert text.startswith("SHF(cg_iterations=7; ")  # what is not as it is by default
    assert text.endswith("; λ=1, epoch 1; parameters: 42 with weight_decay=2e-05, 9 with weight_decay=0; one process)")


def test_a_deep_copy_continues_on_its_own_model():
    optimizer = trained(mlp(dropout=0.5), 2)
    twin = copy.deepcopy(optimizer)
    before = theta(optimizer.model)
    twin.step(*labelled())
    assert identical(theta(optimizer.model), before)
    optimizer.step(*labelled())
    assert identical(snapshot(optimizer), snapshot(twin))


# --- data of all kinds --------------------------------------------------------------------------------------------------


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(dropout=0.3)

    def forward(self, a, b):
        return self.net(a + b)


Both = namedtuple("Both", "a b")


@pytest.mark.parametrize(
    ("pack", "unpack"),
    [
        (lambda a, b: (a, b), None),
        (lambda a, b: {"b": b, "a": a}, None),
        pytest.param(lambda a, b: [a, b], lambda model, x: model(*x), id="a list is one argument: own forward"),
        pytest.param(Both, lambda model, x: model(x.a, x.b), id="a namedtuple is one argument: own forward"),
    ],
)
def test_inputs_in_any_packing(pack, unpack):
    reference, model = copies(make=TwoInputs)
    inputs, targets = labelled()
    trained(reference.net, seed=1, curvature_batch=5)
    options = {} if unpack is None else {"forward": unpack}
    halves = pack(0.25 * inputs, 0.75 * inputs)
    trained(model, data=(halves, targets), seed=1, curvature_batch=5, **options)
    assert_close(theta(model), theta(reference), 1e-9)


def test_targets_may_be_none():
    def energy(outputs, targets):
        assert targets is None
        return outputs.square().mean()

    optimizer = shf.SHF(mlp(), energy, curvature_batch=5)
    assert optimizer.step(labelled()[0]).accepted
    assert optimizer.step(labelled()[0], None).accepted


def test_targets_may_be_any_structure():
    def loss(outputs, targets):
        return CE(outputs, targets["class"][0]) + (outputs - targets["values"]).square().mean()

    (inputs, classes), (_, values) = labelled(), valued()
    data = inputs, {"class": (classes,), "values": values}
    optimizer = trained(mlp(), data=data, loss=loss, curvature_batch=5)
    assert optimizer.step(*data).accepted


@dataclasses.dataclass
class Tree:
    """A binary tree of numbers: nothing that torch knows."""

    value: float
    children: tuple = ()


class TreeNet(nn.Module):
    """A recursive network: the code of a node from its value and its children's codes."""

    def __init__(self):
        super().__init__()
        self.node, self.output = nn.Linear(1 + 4, 4).double(), nn.Linear(4, 2).double()

    def code(self, tree):
        below = sum((self.code(child) for child in tree.children), torch.zeros(4, dtype=torch.float64))
        return torch.tanh(self.node(torch.cat([torch.tensor([tree.value], dtype=torch.float64), below])))

    def forward(self, trees):
        return self.output(torch.stack([self.code(tree) for tree in trees]))


def forest(count):
    """Trees of different shapes, and the signs of their sums."""
    leaves = [Tree(float(v)) for v in torch.randn(3 * count).tolist()]
    trees = [Tree(leaves[3 * i].value, tuple(leaves[3 * i + 1 : 3 * i + 1 + i % 3])) for i in range(count)]
    sums = torch.tensor([t.value + sum(c.value for c in t.children) for t in trees])
    return trees, (sums > 0).long()


@pytest.mark.parametrize("options", [{}, {"curvature_batch": 4}, {"curvature_batch": 4, "microbatch": 3}])
def test_lists_of_trees(options):
    trees, signs = forest(10)
    optimizer = shf.SHF(
        TreeNet(),
        CE,
        count=len,
        select=lambda data, rows: data[rows] if isinstance(data, torch.Tensor) else [data[i] for i in rows],
        **options,
    )
    infos = [optimizer.step(trees, signs) for _ in range(15)]
    assert infos[-1].loss_after < 0.5 * infos[0].loss_before


def test_rows_of_tensors_through_own_functions_change_nothing():
    plain, own = copies(make=lambda: mlp(dropout=0.5))
    inputs, targets = labelled()
    trained(plain, data=(inputs, targets), seed=1, curvature_batch=5)
    trained(
        own,
        data=(list(inputs), targets.tolist()),
        loss=lambda z, t: CE(z, torch.tensor(t)),
        seed=1,
        curvature_batch=5,
        forward=lambda model, x: model(torch.stack(x)),
        select=lambda data, rows: [data[i] for i in rows],
        count=len,
    )
    assert_close(theta(own), theta(plain), 1e-9)


def test_other_errors_of_a_model_get_no_note():
    with pytest.raises(RuntimeError) as error:
        trained(mlp(), 0).step(torch.randn(5, FEATURES + 1).double(), torch.zeros(5).long())
    assert not hasattr(error.value, "__notes__")


def test_batches_of_changing_sizes():
    optimizer = shf.SHF(mlp(dropout=0.3), CE, curvature_batch=4)
    assert all(optimizer.step(*labelled(rows)).accepted for rows in (ROWS, 5, 4, 3, 2, 1, ROWS))


def test_a_printed_step_is_a_line():
    optimizer = shf.SHF(mlp(), CE)
    info = optimizer.step(*labelled())
    f, rest = f"f {info.loss_before:.6g} → {info.loss_after:.6g}", f"α {info.step_size:g}, 3 CG iterations"
    assert str(info) == f"{f}, ρ {info.reduction_ratio:.2f}, λ 1, {rest}"
    stays = dataclasses.replace(info, accepted=False, step_size=0.0, reduction_ratio=-math.inf, cg_steps=1)
    assert str(stays) == f"f {info.loss_before:.6g} stays, ρ -inf, λ 1, α 0, 1 CG iteration"
    assert str(shf.StepInfo.of_skipped(1.0, "inputs are nan")) == "skipped: inputs are nan"
