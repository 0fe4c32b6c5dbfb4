"""Bad input: an error that names the thing, its value and what is expected; and nothing has changed."""

import copy
import math
import re

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import shf
from helpers import CLASSES, FEATURES, ROWS, identical, labelled, mlp, normalised, snapshot, valued

CE = nn.CrossEntropyLoss()
NAN, INF = math.nan, math.inf


def assert_refused(optimizer, data, error, says):
    """The step raises, and everything is as before: parameters, buffers, state, generator."""
    before = snapshot(optimizer)
    with pytest.raises(error, match=says):
        optimizer.step(*data)
    assert identical(snapshot(optimizer), before)


def at(data, value, row=7):
    """The data with one entry replaced."""
    data = data.clone()
    data[row, 2] = value
    return data


x, t = labelled()
_, v = valued()


# --- the model ----------------------------------------------------------------------------------------------------------


class Unpadded(nn.Module):
    """An output for every step of packed sequences, in their packed order."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(2, CLASSES, batch_first=True)

    def forward(self, packed):
        return self.rnn(packed)[0].data


def packed(lengths):
    steps = pack_sequence([torch.randn(n, 2) for n in lengths], enforce_sorted=False)
    return steps, steps._replace(data=torch.randint(CLASSES, (len(steps.data),)))


@pytest.mark.parametrize("lengths", [(3, 3, 4, 2), (2, 3, 4, 3)], ids=str)  # the first two rows alike, or not
def test_outputs_that_are_parts_of_rows_are_refused_where_rows_are_needed(lengths):
    def loss(outputs, targets):
        return CE(outputs, targets.data)

    data = packed(lengths)
    assert_refused(shf.SHF(Unpadded(), loss), data, ValueError, r"which of 4 cases; .* use preconditioner=None")
    for options in ({"curvature_batch": 2}, {"microbatch": 2}):
        optimizer = shf.SHF(Unpadded(), loss, preconditioner=None, **options)
        assert_refused(optimizer, data, ValueError, r"its (4 )?rows(:| \() ?its (outputs|shape)")
    assert shf.SHF(Unpadded(), loss, preconditioner=None).step(*data).accepted


# --- the batch ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("curvature_batch", [None, 5])
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize(
    ("loss", "data", "error", "says"),
    [
        pytest.param(CE, (x[:, :3], t), (RuntimeError, ValueError), "x3 and 4x6", id="inputs of another width"),
        pytest.param(CE, (x.float(), t), (RuntimeError, ValueError), "Float", id="inputs of another dtype"),
        pytest.param(
            CE, (x, t[:-1]), ValueError, "inputs have 12 rows but targets have 11: they must agree", id="rows"
        ),
        pytest.param(
            CE, ((x, x[1:]), t), ValueError, r"number of rows \(axis 0\), got \[12, 11\]", id="rows of inputs"
        ),
        pytest.param(CE, (x, t + 1), IndexError, "Target 3 is out of bounds", id="classes"),
        pytest.param(CE, (x[:0], t[:0]), ValueError, "batch is empty: 0 rows, expected at least 1", id="no rows"),
        pytest.param(CE, (x[0, 0], t), ValueError, "no rows", id="a number"),
        pytest.param(CE, (None, t), TypeError, "no tensors in NoneType: expected a tensor", id="nothing"),
        pytest.param(CE, (at(x, NAN), t), ValueError, r"CrossEntropyLoss is nan .*\(not finite: inputs\)", id="nan"),
        pytest.param(CE, (at(x, INF), t), ValueError, r"CrossEntropyLoss is nan .*\(not finite: inputs\)", id="inf"),
        pytest.param(
            nn.MSELoss(), (x, at(v, -INF)), ValueError, r"MSELoss is inf .*\(not finite: targets\)", id="inf in targets"
        ),
    ],
)
def test_batches(loss, data, error, says, warm, curvature_batch):
    """Fails if `Objective` does not look at the loss and its gradient before the step."""
    optimizer = shf.SHF(normalised(), loss, curvature_batch=curvature_batch)
    if warm:
        optimizer.step(x, t if loss is CE else v)
    assert_refused(optimizer, data, error, says)


@pytest.mark.parametrize("bad", [NAN, INF])
def test_inputs_that_are_not_finite_but_saturate(bad):
    """tanh(inf) is 1, and the loss is finite; its gradient is not."""
    optimizer = shf.SHF(mlp(), CE)
    assert_refused(optimizer, (at(x, bad), t), ValueError, r"not finite: inputs\)$")


@pytest.mark.parametrize("bad", [NAN, INF])
def test_inputs_that_are_not_finite_in_the_first_rows(bad):
    optimizer = shf.SHF(normalised(), CE)
    assert_refused(optimizer, (at(x, bad, row=1), t), ValueError, r"CrossEntropyLoss is nan .*\(not finite: inputs\)")


def test_parameters_that_are_not_finite():
    optimizer = shf.SHF(mlp(), CE)
    optimizer.step(x, t)
    with torch.no_grad():
        optimizer.model[0].weight[0, 0] = NAN
    before = [p.detach().nan_to_num(7.0).clone() for p in optimizer.model.parameters()]
    state = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"CrossEntropyLoss is nan .*\(not finite: parameters\)"):
        optimizer.step(x, t)
    assert identical([p.detach().nan_to_num(7.0) for p in optimizer.model.parameters()], before)
    assert identical(optimizer.state_dict(), state)


def test_a_gradient_that_is_not_finite_where_the_loss_is():
    def loss(outputs, targets):
        return (outputs - outputs.detach()).abs().sqrt().sum()

    optimizer = shf.SHF(mlp(), loss, preconditioner=None)
    assert_refused(optimizer, (x, v), ValueError, "gradient is not finite at the present parameters, before the step")


# --- the loss -----------------------------------------------------------------------------------------------------------


def to_a_row(outputs, targets):
    return (outputs - targets).square().mean(1)


def to_a_number(outputs, targets):
    return 1.0


def constant(outputs, targets):
    return targets.mean()


def detached(outputs, targets):
    return outputs.detach().mean()


def nan(outputs, targets):
    return outputs.mean() * NAN


@pytest.mark.parametrize("curvature_batch", [None, 5])
@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (to_a_row, r"loss to_a_row returned a tensor of shape \(12,\): expected a tensor of one number"),
        (to_a_number, "loss to_a_number returned 1.0: expected a tensor of one number"),
        (constant, "loss constant does not depend on the model's outputs"),
        (detached, "loss detached does not depend on the model's outputs"),
        (nan, "loss nan is nan at the present parameters, before the step .inputs, targets and parameters are finite"),
    ],
)
def test_losses(loss, says, curvature_batch):
    optimizer = shf.SHF(normalised(), loss, curvature_batch=curvature_batch)
    assert_refused(optimizer, (x, v), ValueError, says)


def test_a_loss_of_other_tensors_than_the_outputs():
    model = mlp()
    optimizer = shf.SHF(model, lambda outputs, targets: model[0].weight.square().sum())
    assert_refused(optimizer, (x, v), ValueError, "depends on parameters .0.weight. otherwise than through")


@pytest.mark.parametrize(
    ("loss", "options", "error", "says"),
    [
        (
            nn.CrossEntropyLoss(reduction="none"),
            {},
            ValueError,
            "CrossEntropyLoss has reduction='none': expected 'mean' or",
        ),
        (lambda z, t: z.mean(), {"reduction": "average"}, ValueError, "reduction='average': expected 'mean' or 'sum'"),
        (CE, {"reduction": "sum"}, ValueError, "reduction='sum' contradicts the loss object's own reduction='mean'"),
        (None, {}, TypeError, r"without a loss: .* give both"),
        ("mse", {}, TypeError, "loss='mse': expected a callable"),
        (nn.MSELoss, {}, TypeError, r"loss=MSELoss is a class: expected one of its objects, MSELoss\(\)"),
    ],
)
def test_losses_that_cannot_be_used_at_all(loss, options, error, says):
    with pytest.raises(error, match=says):
        shf.SHF(mlp(), loss, **options)


# --- the model ----------------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Two layers of different kinds."""

    def __init__(self, **kind):
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 6), nn.Linear(6, CLASSES, **kind)

    def forward(self, x):
        return self.second(self.first(x).to(self.second.weight))


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (
            {"dtype": torch.float64},
            "torch.float32 on cpu and torch.float64 on cpu: they must share one dtype and one dev",
        ),
        (
            {"device": "meta"},
            "torch.float32 on cpu and torch.float32 on meta: they must share one dtype and one device",
        ),
    ],
)
def test_parameters_of_several_kinds(kind, says):
    optimizer = shf.SHF(Mixed(**kind), CE)
    before = [p.clone() for p in optimizer.model.first.parameters()]
    with pytest.raises(ValueError, match=says):
        optimizer.step(x.float(), t)
    assert identical(list(map(torch.detach, optimizer.model.first.parameters())), list(map(torch.detach, before)))
    assert optimizer.state_dict()["state"] == {}


def test_parameters_of_several_kinds_may_be_there_if_only_one_is_trained():
    model = Mixed(dtype=torch.float64)
    model.first.requires_grad_(False)
    assert shf.SHF(model, CE).step(x.float(), t).accepted


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64])
def test_parameters_of_unsupported_dtypes(dtype):
    optimizer = shf.SHF(nn.Linear(FEATURES, CLASSES, dtype=dtype), nn.MSELoss())
    says = f"parameters are {dtype}: expected torch.float32 or torch.float64"
    assert_refused(optimizer, (x.to(dtype), v.to(dtype)), ValueError, says)


def replace_a_layer(model):
    model[0] = nn.Linear(FEATURES, 6, dtype=torch.float64)


def load_by_assignment(model):
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)


@pytest.mark.parametrize("change", [replace_a_layer, load_by_assignment])
def test_parameters_that_are_no_longer_the_models(change):
    optimizer = shf.SHF(mlp(), CE)
    change(optimizer.model)
    assert_refused(optimizer, (x, t), ValueError, r"\(6, 4\).*\] are no longer the model's: .* make a new optimizer")


def test_products_by_foreign_parameters():
    with pytest.raises(ValueError, match=r"parameters of shape \[\(2, 2\)\] do not belong to the model"):
        shf.gauss_newton_product(mlp(), CE, x, t, params=[nn.Parameter(torch.ones(2, 2))])


def test_models_without_trainable_parameters():
    with pytest.raises(ValueError, match="the model has no parameters"):
        shf.SHF(nn.ReLU(), CE)
    with pytest.raises(ValueError, match="params is empty"):
        shf.SHF(mlp(), CE, [])
    optimizer = shf.SHF(mlp().requires_grad_(False), CE)
    assert_refused(
        optimizer, (x, t), ValueError, "no parameter of the model is trainable: requires_grad is False for all"
    )


@pytest.mark.parametrize(
    ("params", "says"),
    [
        (["0.weight"], r"params: expected parameters or dicts of them, got \['str'\]"),
        ([("0.weight", mlp()[0].weight, 1)], r"expected parameters or dicts of them, got \['tuple'\]"),
        (set(mlp().parameters()), "params is a set: expected a list of parameters"),
        (mlp()[0].weight, "params is a Parameter: expected a list of parameters"),
        ({"params": list(mlp().parameters())}, "params is a dict: expected a list of parameters, or of dicts"),
        (0.01, "params is a float: expected a list of parameters"),
        (shf.presets.fast, r"params is a mappingproxy with 'damping', .*: .* unpack it, as in \*\*shf.presets.fast"),
        (dict(mlp().named_parameters()), "params is a dict: expected a list of parameters"),
        ({}, "params is a dict: expected a list of parameters"),
    ],
)
def test_params_that_are_none(params, says):
    with pytest.raises(TypeError, match=says):
        shf.SHF(mlp(), CE, params)


@pytest.mark.parametrize(
    ("model", "params", "says"),
    [
        (mlp, lambda model: [{"params": []}], "params is empty: none of its groups has a parameter"),
        (lambda: nn.LazyLinear(3), lambda model: [{"params": model.parameters()}], "have no shape yet"),
    ],
)
def test_groups_of_parameters_that_are_none(model, params, says):
    model = model()
    with pytest.raises(ValueError, match=says):
        shf.SHF(model, CE, params(model))


def test_a_generator_of_parameters_in_a_group_is_taken_once():
    model = mlp()
    assert shf.SHF(model, CE, [{"params": (p for p in model.parameters())}]).step(*labelled()).accepted


def test_sparse_inputs_that_are_not_finite():
    """Fails if the entries are asked for by `values()`, which a tensor that is not coalesced refuses."""
    index = torch.tensor([[0, 0, 1], [1, 1, 2]])
    inputs = torch.sparse_coo_tensor(
        index, torch.tensor([1.0, math.nan, 1.0]).double(), (ROWS, FEATURES), check_invariants=True
    )
    assert not inputs.is_coalesced()
    with pytest.raises(shf.NonFiniteError, match="not finite: inputs"):
        shf.SHF(Sparse(), CE).step(inputs, labelled()[1])


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES, 3, dtype=torch.float64))

    def forward(self, x):
        return torch.sparse.mm(x, self.weight)


class Words(nn.Module):
    """Returns no tensor."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return ["no", "tensor"]


def test_outputs_without_tensors():
    assert_refused(shf.SHF(Words(), CE), (x, t), TypeError, "returns a list .*, of which 0 are floating-point")
    assert_refused(
        shf.SHF(Words(), lambda z, t: t.double().mean()), (x, t), ValueError, "output holds no floating-point tensor"
    )


class ReturnsLoss(nn.Linear):
    """One number for the whole batch, as models that are given their labels return it."""

    def forward(self, x, labels):
        return nn.functional.cross_entropy(super().forward(x), labels)


@pytest.mark.filterwarnings("ignore:loss itself has no curvature")
@pytest.mark.parametrize(
    ("preconditioner", "says"),
    [
        ("empirical-fisher", r"output number 0 of the model is shared by all rows.* leave it out \(forward="),
        ("jacobi", r"loss itself on outputs \[\(\)\] has no closed form"),
        ("kronecker", r"loss itself on outputs \[\(\)\] has no closed form"),
    ],
)
def test_outputs_without_rows(preconditioner, says):
    def itself(outputs, targets):
        return outputs

    model = ReturnsLoss(FEATURES, CLASSES, dtype=torch.float64)
    assert_refused(shf.SHF(model, itself, preconditioner=preconditioner), ((x, t), None), ValueError, says)


def test_batch_statistics_with_microbatch():
    optimizer = shf.SHF(normalised(), CE, microbatch=4)
    assert_refused(
        optimizer, (x, t), ValueError, "microbatch=4: the model has batch statistics in 1, .*use microbatch=None"
    )
    optimizer.model.eval()
    assert optimizer.step(x, t).accepted


# --- failed trials are no errors ----------------------------------------------------------------------------------------


class Fragile(nn.Module):
    """A linear layer whose outputs are not finite further than `radius` from where it began."""

    def __init__(self, radius, bad=NAN):
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES).double()
        self.radius, self.bad = radius, bad
        self.register_buffer("origin", self.layer.weight.detach().clone())

    def forward(self, x):
        far = (self.layer.weight - self.origin).norm() > self.radius
        return self.layer(x) + (self.bad if far else 0.0)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_step_whose_every_trial_fails_is_rejected_and_raises_damping(bad):
    """Fails if `Candidates.visit` takes a value that is not finite."""
    optimizer = shf.SHF(Fragile(0.0, bad), CE)
    before = snapshot(optimizer)["model"]
    for k in range(3):
        info = optimizer.step(x, t)
        assert (info.accepted, info.chosen_iterate, info.step_size, info.reduction_ratio) == (False, 0, 0.0, -INF)
        assert info.loss_after == info.loss_before
        assert info.damping == pytest.approx((100 / 99) ** k)
        assert optimizer.damping == pytest.approx((100 / 99) ** (k + 1))
    assert identical(snapshot(optimizer)["model"], before)


def lengths_of_iterates():
    """How far each CG iterate of the first step moves the weight (they grow: CG starts at zero)."""
    found = []
    for count in range(1, 5):
        torch.manual_seed(0)
        model = Fragile(INF)
        shf.SHF(model, CE, cg_iterations=count, backtracking=None, damping=1e-3).step(x, t)
        found.append((model.layer.weight - model.origin).norm().item())
    return found


@pytest.mark.parametrize("chosen", [1, 2, 3])
def test_iterates_whose_trial_fails_are_skipped(chosen):
    lengths = lengths_of_iterates()
    assert lengths == sorted(lengths)
    torch.manual_seed(0)
    model = Fragile(0.5 * (lengths[chosen - 1] + lengths[chosen]))
    info = shf.SHF(model, CE, cg_iterations=4, damping=1e-3).step(x, t)
    assert (info.chosen_iterate, info.cg_steps, info.accepted) == (chosen, 4, True)
    assert (model.layer.weight - model.origin).norm().item() == pytest.approx(lengths[chosen - 1])


def test_a_failed_trial_raises_damping_even_where_another_iterate_is_good():
    """Fails if `shf_step` moves λ by ρ alone."""
    lengths = lengths_of_iterates()
    torch.manual_seed(0)
    optimizer = shf.SHF(Fragile(0.5 * (lengths[2] + lengths[3])), CE, cg_iterations=4, damping=1e-3)
    info = optimizer.step(x, t)
    assert (info.chosen_iterate, info.failed_trials) == (3, 1)
    assert optimizer.damping > info.damping


def test_a_product_beyond_the_largest_number_is_a_failed_trial():
    """exp(80)² is too large for float32: loss and gradient are finite, the first product is not."""
    model = nn.Linear(FEATURES, 1)
    with torch.no_grad():
        model.bias.fill_(80.0)
    optimizer = shf.SHF(model, nn.PoissonNLLLoss(), preconditioner=None)
    before = snapshot(optimizer)["model"]
    info = optimizer.step(x.float(), torch.ones(ROWS, 1))
    assert (info.cg_stop, info.cg_steps, info.chosen_iterate) == (shf.CGStop.NON_FINITE, 0, 0)
    assert not info.accepted
    assert optimizer.damping > info.damping
    assert identical(snapshot(optimizer)["model"], before)


def test_outputs_that_no_parameter_influences():
    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = mlp()

        def forward(self, inputs):
            return self.layer(inputs).detach()

    assert_refused(shf.SHF(Detached(), CE), (x, t), ValueError, "do not depend on any of the parameters")


@pytest.mark.parametrize(
    ("parameters", "given", "advice"),
    [(torch.float64, torch.float32, "inputs.double()"), (torch.float32, torch.float64, "inputs.float()")],
)
def test_inputs_of_another_precision_are_refused_in_words(parameters, given, advice):
    optimizer = shf.SHF(mlp(dtype=parameters), nn.MSELoss(), seed=1)
    inputs, targets = valued(dtype=given)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=rf"parameters are {parameters}, inputs are {given}: .*{re.escape(advice)}"):
        optimizer.step(inputs, targets)
    assert identical(snapshot(optimizer), before)


def test_in_double_precision_the_loss_is_summed_in_it_whatever_the_targets_are():
    """f to 1e-13 with targets in single precision, whose mean in single precision is off by 1e-8."""
    model = mlp()
    inputs, targets = valued(40)
    targets = targets.float()
    info = shf.SHF(model, nn.MSELoss(), seed=1).step(inputs, targets)
    with torch.no_grad():
        after = (model(inputs) - targets.double()).square().mean().item()
    assert info.loss_after == pytest.approx(after, rel=1e-13)


def test_outputs_of_less_precision_than_the_parameters_get_a_warning():
    model = mlp()
    with pytest.warns(shf.SHFWarning, match=r"torch\.float64, its outputs torch\.float32: the loss is summed in that"):
        shf.SHF(model, nn.MSELoss(), forward=lambda m, x: m(x).float(), seed=1).step(*valued())
