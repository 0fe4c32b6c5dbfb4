"""The Kronecker preconditioner against dense float64 Kronecker products, from step to step, and where it does not apply."""

import copy
import io
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cases
import shf
from helpers import ROWS, Objective, assert_close, identical, labelled, mlp, normalised, theta, valued
from shf.data.batches import Batch
from shf.data.draws import preserved_global_state
from shf.hessian.expansion import LossExpansion
from shf.linear.decay import Decay
from shf.losses import Loss
from shf.model.network import Network
from shf.preconditioners import Identity
from shf.preconditioners.factors import Block, Factors, balance, find_blocks, invert
from shf.preconditioners.kronecker import Renewal, Schedule
from shf.probing.layout import find_layout
from shf.problems.shared import SharedProblem
from shf.runtime.context import twice_differentiable_kernels
from shf.state import Memory

DAMPING, DECAY, SEED = 0.3, 0.05, 7
ONCE = Schedule(average=0.95, every=1, cg_iterations=3)
CE = nn.CrossEntropyLoss()


class Setting:
    """A model on a batch in float64, expanded once with the Kronecker preconditioner."""

    def __init__(
        self, model: nn.Module, inputs, targets, loss=CE, *, microbatch=None, decay=DECAY, seed=SEED, **handling
    ) -> None:
        self.model, self.network, self.loss = model, Network(model, list(model.parameters())), Loss(loss)
        self.batch, self.state = Batch.of(inputs, targets, **handling), {}
        self.decay = Decay(self.network.shapes, tuple(decay if p.ndim > 1 else 0.0 for p in self.network.parameters))
        memory = Memory(self.network, self.state, {"iteration": 0})
        with preserved_global_state(), twice_differentiable_kernels(torch.device("cpu")), torch.no_grad():
            self.objective = Objective(
                self.network,
                self.loss,
                self.batch,
                find_layout(self.network, self.batch, 3),
                decay=self.decay,
                seed=seed,
                microbatch=microbatch,
                preconditioner=Renewal(memory, ONCE),
            )
            self.expansion = self.objective.expand(DAMPING)
        memory.commit()

    def inverse(self) -> Tensor:
        """P⁻¹, dense."""
        eye = torch.eye(sum(self.network.shapes.sizes), dtype=torch.float64)
        return torch.stack([self.expansion.precondition(e).clone() for e in eye], 1)

    def covered(self) -> set[str]:
        """The names of the weights that have factors."""
        return {n for n, p in self.model.named_parameters() if "input_factor" in self.state[p]}


# --- dense references ---------------------------------------------------------------------------------------------------


def references(setting: Setting, layers: list[str]) -> dict[str, tuple[Tensor, Tensor]]:
    """A and G of each layer from plain autograd: its input (or its patches), and the gradient of u'z by its output."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    modules = {name: setting.model.get_submodule(name) for name in layers}
    handles = [
        m.register_forward_hook(lambda m, args, out, name=name: seen.__setitem__(name, (args[0], out)))
        for name, m in modules.items()
    ]
    z = setting.model(setting.batch.inputs)
    for handle in handles:
        handle.remove()
    u = LossExpansion(setting.loss, z.detach(), setting.batch.targets).hessian_root(
        setting.objective.part._passes.signs
    )[0]
    gradients = torch.autograd.grad((u * z).sum(), [out for _, out in seen.values()])
    found = {}
    for (name, (a, _)), g in zip(seen.items(), gradients, strict=True):
        module = modules[name]
        a = a.detach()
        if isinstance(module, nn.Conv1d | nn.Conv2d):
            a, g = patches_by_hand(module, a), g.flatten(2).transpose(1, 2)
        a, g = a.reshape(-1, a.shape[-1]), g.reshape(-1, g.shape[-1])
        if module.bias is not None:
            a = torch.cat([a, torch.ones(len(a), 1, dtype=a.dtype)], 1)
        found[name] = (sum(torch.outer(row, row) for row in a) / len(a), sum(torch.outer(row, row) for row in g))
    return found


def patches_by_hand(module: nn.Module, a: Tensor) -> Tensor:
    """What each output position is a linear function of: the Jacobian of the convolution by its weight tells."""
    positions = []
    for case in a:
        by_weight = torch.autograd.functional.jacobian(
            lambda w, case=case: torch.func.functional_call(module, {"weight": w}, (case[None],))[0, 0].reshape(-1),
            module.weight.detach(),
        )
        positions.append(by_weight[:, 0].flatten(1))
    return torch.stack(positions)


def dense(a: Tensor, g: Tensor, damping: float) -> Tensor:
    """(G + √λ/π I) ⊗ (A + π√λ I) for a (outputs, inputs) matrix written row by row."""
    pi = math.sqrt((a.trace() / len(a)) / (g.trace() / len(g)))
    eye = lambda m: torch.eye(len(m), dtype=m.dtype)  # noqa: E731
    return torch.kron(g + math.sqrt(damping) / pi * eye(g), a + pi * math.sqrt(damping) * eye(a))


def double(model: nn.Module) -> nn.Module:
    torch.manual_seed(3)
    model = model.double()
    for p in model.parameters():
        nn.init.normal_(p, std=0.5)
    return model


def images(channels=2, size=5):
    return torch.randn(ROWS, channels, size, size, dtype=torch.float64), torch.randint(3, (ROWS,))


NETWORKS = {
    "perceptron": (lambda: mlp(), labelled, ["0", "2"]),
    "no bias": (lambda: nn.Sequential(nn.Linear(4, 5, bias=False), nn.Tanh(), nn.Linear(5, 3)), labelled, ["0", "2"]),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(27, 3)),
        images,
        ["0", "3"],
    ),
    "dilated convolution, uneven": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 2, (1, 2), dilation=(1, 2), padding=(1, 0), bias=False), nn.Flatten(), nn.Linear(42, 3)
        ),
        images,
        ["0", "2"],
    ),
    "sequence convolution": (
        lambda: nn.Sequential(nn.Conv1d(2, 3, 3, stride=2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(9, 3)),
        lambda: (torch.randn(ROWS, 2, 5, dtype=torch.float64), torch.randint(3, (ROWS,))),
        ["0", "3"],
    ),
    "convolution, padding same, even kernel": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, (4, 3), padding="same"), nn.Tanh(), nn.Flatten(), nn.Linear(75, 3)),
        images,
        ["0", "3"],
    ),
    "convolution, padding valid": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3, stride=2, padding="valid"), nn.Flatten(), nn.Linear(12, 3)),
        images,
        ["0", "2"],
    ),
    "convolution, padding by reflection": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 2, (2, 3), (2, 1), (1, 2), (1, 2), padding_mode="reflect"), nn.Flatten(), nn.Linear(30, 3)
        ),
        images,
        ["0", "2"],
    ),
    "convolution, padding same by repetition": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 2, 2, padding="same", padding_mode="replicate"), nn.Flatten(), nn.Linear(50, 3)
        ),
        images,
        ["0", "2"],
    ),
    "convolution, stride and dilation in both directions": (
        lambda: nn.Sequential(nn.Conv2d(2, 2, (3, 2), (2, 3), (2, 1), dilation=(2, 1)), nn.Flatten(), nn.Linear(24, 3)),
        lambda: images(size=7),
        ["0", "2"],
    ),
    "sequence convolution, circular": (
        lambda: nn.Sequential(nn.Conv1d(2, 3, 3, padding=2, padding_mode="circular"), nn.Flatten(), nn.Linear(21, 3)),
        lambda: (torch.randn(ROWS, 2, 5, dtype=torch.float64), torch.randint(3, (ROWS,))),
        ["0", "2"],
    ),
    "sequence convolution, padding same, dilated": (
        lambda: nn.Sequential(nn.Conv1d(2, 3, 2, padding="same", dilation=3), nn.Flatten(), nn.Linear(15, 3)),
        lambda: (torch.randn(ROWS, 2, 5, dtype=torch.float64), torch.randint(3, (ROWS,))),
        ["0", "2"],
    ),
    "linear layer on sequences": (
        lambda: nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(15, 3)),
        lambda: (torch.randn(ROWS, 5, 2, dtype=torch.float64), torch.randint(3, (ROWS,))),
        ["0", "3"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("microbatch", [None, 5])
@pytest.mark.parametrize("name", NETWORKS)
def test_against_dense_kronecker_products(name, microbatch):
    make, data, layers = NETWORKS[name]
    setting = Setting(double(make()), *data(), microbatch=microbatch)
    assert setting.covered() == {f"{layer}.weight" for layer in layers}
    expected = torch.zeros_like(setting.inverse())
    ends, begin = {}, 0
    for parameter, size in zip(setting.network.names, setting.network.shapes.sizes, strict=True):
        ends[parameter] = torch.arange(begin, begin + size)
        begin += size
    for layer, (a, g) in references(setting, layers).items():
        places = ends[f"{layer}.weight"].view(len(g), -1)
        if f"{layer}.bias" in ends:
            places = torch.cat([places, ends[f"{layer}.bias"][:, None]], 1)
        rows = places.reshape(-1)
        expected[rows[:, None], rows] = torch.linalg.inv(dense(a, g, DAMPING + DECAY))
    assert_close(setting.inverse(), expected, 1e-9)


@pytest.mark.parametrize("name", ["perceptron", "convolution"])
def test_the_step_of_weight_decay_is_damped_by_the_decay_alone(name):
    """-P_w⁻¹Wθ. Fails with λ in P, or with biases that decay."""
    make, data, layers = NETWORKS[name]
    setting = Setting(double(make()), *data())
    step = dict(zip(setting.network.names, setting.network.shapes.split(setting.expansion.decay_step()), strict=True))
    for layer, (a, g) in references(setting, layers).items():
        weight = setting.model.get_submodule(layer).weight.detach().flatten(1)
        pull = torch.cat([DECAY * weight, torch.zeros(len(g), 1, dtype=torch.float64)], 1).reshape(-1)
        expected = -torch.linalg.solve(dense(a, g, DECAY), pull).view(len(g), -1)
        assert_close(torch.cat([step[f"{layer}.weight"].flatten(1), step[f"{layer}.bias"][:, None]], 1), expected, 1e-9)


def test_weights_without_decay_have_no_step_of_it():
    """Not even where their factors cannot be inverted undamped, and where a diagonal has zeros."""
    model = double(nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3)))
    inputs, targets = labelled()
    inputs[:, 1] = 0
    setting = Setting(model, inputs, targets)
    weights = tuple(DECAY if n == "2.weight" else 0.0 for n in setting.network.names)
    setting.objective.problem._decay = Decay(setting.network.shapes, weights)
    expansion = setting.objective.expand(DAMPING)
    step = dict(zip(setting.network.names, setting.network.shapes.split(expansion.decay_step()), strict=True))
    assert {n for n, piece in step.items() if piece.count_nonzero()} == {"2.weight", "2.bias"}
    assert all(piece.isfinite().all() for piece in step.values())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_linear_model_with_a_quadratic_loss_is_factored_exactly(reduction):
    """There inputs and gradients are independent: A ⊗ E[G] is the Gauss-Newton matrix."""
    model, (inputs, targets) = double(nn.Linear(4, 3)), valued(30)
    loss = nn.MSELoss(reduction=reduction)
    pairs = []
    for seed in range(200):
        setting = Setting(model, inputs, targets, loss, seed=seed)
        pairs.append([setting.state[model.weight][name] for name in ("input_factor", "output_factor")])
    a, g = pairs[0][0], torch.stack([g for _, g in pairs]).mean(0)
    product = shf.gauss_newton_product(model, loss, inputs, targets)
    B = torch.stack([product(e) for e in torch.eye(15, dtype=torch.float64)])
    order = torch.cat([torch.arange(12).view(3, 4), torch.arange(12, 15)[:, None]], 1).reshape(-1)
    assert_close(torch.kron(g, a), B[order[:, None], order], 0.05)


def test_damping_is_balanced_by_the_means_of_the_diagonals():
    assert balance(2.0, 8.0) == 0.5
    assert balance(2.0, 0.0) == balance(0.0, 8.0) == 1.0


def test_a_factor_that_rounding_made_indefinite_is_still_inverted():
    layer = nn.Linear(2, 2, bias=False)
    block = Block(layer, 0, None, 2, 2)
    broken = torch.tensor([[1.0, 1.0], [1.0, 1.0 - 1e-6]])
    decay = Decay.none(Network(layer, [layer.weight]).shapes)
    inverse = invert(Factors([block], [(broken, broken)], {}), 1e-30, decay)
    assert all(torch.linalg.eigvalsh(m).min() > 0 for m in inverse.pairs[0])


# --- every declared case ------------------------------------------------------------------------------------------------

WITHOUT_FACTORS = {
    "tied weights": {"encoder.weight"},
    "a layer used twice": {"layer.weight"},
    "weight_norm": {"0.parametrizations.weight.original0", "0.parametrizations.weight.original1"},
    "Conv2d, in-place activation": {"0.weight"},
    "Conv2d, groups": {"0.weight"},
    "Conv3d": {"0.weight"},
    "ConvTranspose2d": {"0.weight"},
    "ConvTranspose1d": {"0.weight"},
    "MultiheadAttention, LayerNorm": {"attention.in_proj_weight", "attention.out_proj.weight"},
    "cell written by hand": {"into.weight", "over.weight"},
}
"""Weights of two or more dimensions in linear and convolution layers that must not have factors."""


@pytest.fixture(params=cases.CASES, ids=lambda case: case.name.replace(" ", "-"))
def case(request):
    with cases.without_convexity(request.param):
        yield request.param


def in_double(case: cases.Case):
    torch.manual_seed(1)
    torch.set_default_dtype(torch.float64)
    try:
        inputs, targets = case.data()
        inputs = inputs.to(torch.float64) if hasattr(inputs, "batch_sizes") else inputs
        return double(case.model()), inputs, targets
    finally:
        torch.set_default_dtype(torch.float32)


def test_it_is_symmetric_and_positive_definite(case):
    model, inputs, targets = in_double(case)
    setting = Setting(model, inputs, targets, case.loss, **case.handling)
    inverse = setting.inverse()
    assert_close(inverse, inverse.T, 1e-12)
    assert torch.linalg.eigvalsh(inverse).min() > 0
    # 1/(λ + w) is the most that P⁻¹ may have, up to the spread of λ over two factors
    assert torch.linalg.eigvalsh(inverse).max() <= 1.0001 / DAMPING
    if case.name in WITHOUT_FACTORS:
        assert not setting.covered() & WITHOUT_FACTORS[case.name]


def test_the_gradient_is_the_same(case):
    model, inputs, targets = in_double(case)
    found = Setting(model, inputs, targets, case.loss, decay=0.0, **case.handling).expansion.gradient
    plain = shf.SHF(model, case.loss, preconditioner=None, seed=1)
    network = plain._network()
    with preserved_global_state(), twice_differentiable_kernels(torch.device("cpu")):
        layout = find_layout(network, Batch.of(inputs, targets, **case.handling), 3)
        objective = Objective(
            network,
            plain.loss,
            Batch.of(inputs, targets, **case.handling),
            layout,
            seed=SEED,
            preconditioner=Identity(),
        )
        expected = objective.data_terms()[1]
    assert_close(found, expected, 1e-10)


def test_a_step_descends(case):
    model, inputs, targets = in_double(case)
    info = shf.SHF(model, case.loss, preconditioner="kronecker", seed=1, **case.handling).step(inputs, targets)
    assert info.accepted
    assert info.loss_after < info.loss_before


# --- where factors do not apply -----------------------------------------------------------------------------------------


def test_parameters_outside_of_layers_have_a_jacobi_diagonal():
    """Of a LayerNorm: Σ_j (J_j'u_j)² over cases."""
    model = double(nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3)))
    setting = Setting(model, *labelled())
    z = model(setting.batch.inputs)
    u = LossExpansion(setting.loss, z.detach(), setting.batch.targets).hessian_root(
        setting.objective.part._passes.signs
    )[0]
    expected = torch.zeros(5, dtype=torch.float64)
    for row in (u * z).sum(1):
        expected += torch.autograd.grad(row, model[1].weight, retain_graph=True)[0].square()
    assert_close(setting.state[model[1].weight]["diagonal"], expected)
    assert setting.covered() == {"0.weight", "3.weight"}


@pytest.mark.parametrize("axis", [0, 1])
def test_an_embedding_has_a_jacobi_diagonal_of_its_cases(axis):
    """Σ_j (J_j'u_j)², whichever axis of the words the cases lie along."""

    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.out = nn.Embedding(5, 4, padding_idx=2), nn.Linear(4, 3)

        def forward(self, x):
            return self.out(self.embedding(x if axis == 0 else x.t()).tanh().mean(1 - axis))

    model, words = double(Words()), torch.randint(5, (ROWS, 7))
    setting = Setting(model, words, labelled()[1])
    z = model(words)
    u = LossExpansion(setting.loss, z.detach(), setting.batch.targets).hessian_root(
        setting.objective.part._passes.signs
    )[0]
    by_case = [
        torch.autograd.grad(row, model.embedding.weight, retain_graph=True)[0].square() for row in (u * z).sum(1)
    ]
    assert_close(setting.state[model.embedding.weight]["diagonal"], sum(by_case))
    assert setting.covered() == {"out.weight"}


def test_a_layer_of_another_kind_of_input_or_size_has_a_diagonal(monkeypatch):
    monkeypatch.setattr("shf.preconditioners.factors._LARGEST", 5)
    network = Network(model := mlp(), list(model.parameters()))
    assert [(b.inputs, b.outputs) for b in find_blocks(network)] == []  # 4 + 1 inputs but 6 outputs; 6 + 1 inputs
    monkeypatch.setattr("shf.preconditioners.factors._LARGEST", 6)
    assert [(b.inputs, b.outputs) for b in find_blocks(network)] == [(5, 6)]


def test_images_with_channels_last_make_the_same_step():
    """torch crashes where GroupNorm's parameters alone are differentiated by there."""
    inputs = torch.randn(ROWS, 2, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ends = []
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        layers = nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)
        model = nn.Sequential(*layers).to(torch.float64, memory_format=layout)
        shf.SHF(model, nn.CrossEntropyLoss(), seed=0, **shf.presets.fast).step(
            inputs.to(memory_format=layout), labelled()[1]
        )
        ends.append(theta(model))
    assert_close(ends[1], ends[0])


def test_a_frozen_bias_has_no_place_in_the_factor():
    model = mlp()
    model[0].bias.requires_grad_(False)
    optimizer = shf.SHF(model, CE, preconditioner="kronecker")
    optimizer.step(*labelled())
    assert optimizer.state[model[0].weight]["input_factor"].shape == (4, 4)
    model[0].bias.requires_grad_(True)
    optimizer.step(*labelled())
    assert optimizer.state[model[0].weight]["input_factor"].shape == (5, 5)


def test_a_layer_that_the_loss_does_not_see():
    class Apart(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(4, 3), nn.Linear(4, 2)

        def forward(self, x):
            self.unused(x)
            return self.used(x)

    model = Apart().double()
    before = theta(model.unused)
    assert shf.SHF(model, CE, preconditioner="kronecker").step(*labelled()).accepted
    assert torch.equal(theta(model.unused), before)


def test_the_batch_method_and_rounded_messages_are_refused():
    with pytest.raises(ValueError, match=r"HF\(preconditioner='kronecker'\)"):
        shf.HF(mlp(), CE, preconditioner="kronecker")
    with pytest.raises(ValueError, match="not positive definite"):
        shf.SHF(mlp(), CE, preconditioner="kronecker", message_dtype="bfloat16")


def coupled(z, t):
    """A sum over rows of convex functions of all outputs of a row together."""
    return (z[0].sum(1) + z[1].sum(1)).square().mean() + CE(z[0], t)


def elementwise(z, t):
    return z[0].exp().mean() + 3 * (z[1] - 1).square().sum(1).mean()


def apart(z, t):
    """A cross-entropy beside a sum over elements that is far larger."""
    return F.cross_entropy(z[0], t) + 1e10 * z[1].exp().mean()


def apart_and_dense(z, t):
    """A cross-entropy beside a function of all entries of a row."""
    return F.cross_entropy(z[0], t) + z[1].logsumexp(1).mean() + z[1].sum(1).square().mean()


def apart_and_flat(z, t):
    """No curvature in the second output."""
    return F.cross_entropy(z[0], t) + z[1].mean()


def read_off(loss, z, t):
    """S and L'' as dense matrices over all outputs: S column by column, since a sample is linear in its signs."""
    expansion, sizes = LossExpansion(Loss(loss), z, t), [u.numel() for u in z]
    columns = []
    for e in torch.eye(sum(sizes), dtype=torch.float64):
        pieces = e.split(sizes)
        sample = expansion.hessian_root(lambda like, number, draw, pieces=pieces: pieces[number].view_as(like))
        columns.append(torch.cat([u.reshape(-1) for u in sample]))

    def flat(x):
        return loss([part.view_as(u) for part, u in zip(x.split(sizes), z, strict=True)], t)

    return torch.stack(columns, 1), torch.autograd.functional.hessian(flat, torch.cat([u.reshape(-1) for u in z]))


@pytest.mark.parametrize("loss", [coupled, elementwise, apart, apart_and_dense, apart_and_flat])
def test_roots_over_several_outputs(loss):
    """S S' = L''. Fails for `apart` if all outputs are called diagonal because the largest of them is."""
    torch.manual_seed(0)
    z, t = [torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)], torch.arange(4) % 3
    S, H = read_off(loss, z, t)
    assert_close(S @ S.t(), H, 1e-10)
    assert_close((S @ S.t())[:12, :12], H[:12, :12], 1e-10)


def test_heads_that_have_nothing_in_common_need_no_dense_blocks(monkeypatch):
    """Cross-entropies along different axes, a squared error and a number of the whole batch that counts as it is."""
    monkeypatch.setattr("shf.hessian.expansion._DENSE_OUTPUTS", 0)

    def loss(z, t):
        words = F.cross_entropy(z[0].transpose(1, 2), t[0]) + 2 * F.cross_entropy(z[1], t[1])
        return words + (z[2] - 1).square().sum() + z[3]

    torch.manual_seed(0)
    z = [torch.randn(shape, dtype=torch.float64) for shape in ((3, 2, 4), (3, 4, 2), (3, 2), ())]
    S, H = read_off(loss, z, [torch.randint(4, (3, 2)) for _ in range(2)])
    assert_close(S @ S.t(), H, 1e-10)


def test_a_loss_on_one_of_several_outputs_has_the_root_of_that_output_alone():
    """Bit by bit: of what the loss does not look at nothing is asked."""
    z, t = torch.randn(4, 3), torch.arange(4) % 3
    alone = LossExpansion(Loss(lambda z, t: 2 * F.cross_entropy(z, t)), z, t)
    beside = LossExpansion(Loss(lambda z, t: 2 * F.cross_entropy(z[0], t)), [z, torch.randn(4, 2)], t)

    def ones(like, number, draw):
        return torch.ones_like(like)

    assert torch.equal(alone.hessian_root(ones)[0], beside.hessian_root(ones)[0])
    assert not beside.hessian_root(ones)[1].any()


def test_signs_of_two_outputs_are_not_the_same():
    setting = Setting(mlp(), *labelled())
    output = torch.zeros(50, 3)
    assert not torch.equal(
        setting.objective.part._passes.signs(output, 0, 0), setting.objective.part._passes.signs(output, 0, 1)
    )


def test_a_sum_over_elements_needs_no_dense_blocks(monkeypatch):
    """However it is written, and however many outputs a row has."""
    monkeypatch.setattr("shf.hessian.expansion._DENSE_OUTPUTS", 0)
    z, t = torch.randn(4, 3), torch.randn(4, 3)
    sample = LossExpansion(Loss(lambda z, t: (z - t).square().sum(1).mean()), z, t).hessian_root(
        lambda like, number, draw: torch.ones_like(like)
    )
    assert_close(sample[0], torch.full((4, 3), 0.5**0.5))


PROBABILITIES = torch.rand(4, 3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
CLASSES = torch.arange(20).reshape(4, 5) % 3
WEIGHTS = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)


@pytest.mark.parametrize(
    ("loss", "targets"),
    [
        pytest.param(nn.CrossEntropyLoss(), PROBABILITIES, id="probabilities"),
        pytest.param(nn.CrossEntropyLoss(WEIGHTS, label_smoothing=0.1), PROBABILITIES, id="weighted, smoothed"),
        pytest.param(nn.CrossEntropyLoss(reduction="sum"), PROBABILITIES, id="summed"),
        pytest.param(nn.CrossEntropyLoss(), PROBABILITIES.float(), id="of another dtype"),
        pytest.param(lambda z, t: 3 * F.cross_entropy(z, t), CLASSES, id="wrapped"),
        pytest.param(lambda z, t: F.cross_entropy(z, t, WEIGHTS, ignore_index=1), CLASSES, id="wrapped, weighted"),
        pytest.param(
            lambda z, t: F.cross_entropy(z.flatten(0, 1), t.flatten()),
            torch.arange(12).reshape(4, 3) % 5,
            id="last axis",
        ),
    ],
)
def test_cross_entropy_needs_no_dense_blocks(monkeypatch, loss, targets):
    """S S' = L'' of (4, 3, 5) outputs, read off column by column, whoever calls cross-entropy and along whichever axis."""
    monkeypatch.setattr("shf.hessian.expansion._DENSE_OUTPUTS", 0)
    z = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expansion = LossExpansion(Loss(loss, "sum" if getattr(loss, "reduction", "") == "sum" else None), z, targets)
    units = torch.eye(z.numel(), dtype=torch.float64)
    columns = [expansion.hessian_root(lambda like, number, draw, e=e: e.view_as(like))[0].reshape(-1) for e in units]
    S = torch.stack(columns, 1)
    H = torch.autograd.functional.hessian(lambda x: loss(x.view_as(z), targets), z.reshape(-1))
    assert_close(S @ S.t(), H, 1e-10)


def test_classes_that_are_all_but_certain_still_count():
    """Some positions so saturated that p is one class to rounding: their share of L'' is not told, and is nothing."""
    z = torch.randn(6, 4) * torch.tensor([1.0, 1.0, 1.0, 200.0, 200.0, 200.0])[:, None]
    targets = torch.arange(6) % 4
    closed, seen = (LossExpansion(Loss(loss), z, targets) for loss in (CE, lambda z, t: CE(z, t)))

    def ones(like, number, draw):
        return torch.ones_like(like)

    assert_close(seen.hessian_root(ones)[0], closed.hessian_root(ones)[0], 1e-3)


@pytest.mark.parametrize("shape", [(6, 5000), (6, 1, 1500)], ids=str)
@pytest.mark.parametrize("spread", [0.02, 1.0, 8.0])
def test_many_classes_are_recognised_however_flat_or_sharp(shape, spread):
    """In single precision, with a padded position that is nearly certain. Fails if p is compared with the probe instead
    of with its own share of it: a flat p over thousands of classes would be taken for a certain one."""
    torch.manual_seed(0)
    z, targets = spread * torch.randn(shape), torch.arange(6)
    z[0, ..., 3], targets[0] = 20.0, -100
    closed = LossExpansion(Loss(CE), z.reshape(6, -1), targets)
    seen = LossExpansion(Loss(lambda z, t: F.cross_entropy(z.flatten(1), t)), z, targets)

    def ones(like, number, draw):
        return torch.ones_like(like)

    assert_close(seen.hessian_root(ones)[0].reshape(6, -1), closed.hessian_root(ones)[0], 1e-3)


def test_factors_of_frozen_parameters_are_forgotten():
    """Fails if they stay: frozen while the inputs change, and then unfrozen, a layer would be solved with old ones."""
    model, (inputs, targets) = mlp(), labelled()
    optimizer = shf.SHF(model, CE, preconditioner="kronecker", factor_every=100)
    optimizer.step(inputs, targets)
    before = optimizer.state[model[0].weight]["input_factor"].clone()
    model[0].requires_grad_(False)
    optimizer.step(100 * inputs, targets)
    assert "input_factor" not in optimizer.state[model[0].weight]
    model[0].requires_grad_(True)
    optimizer.step(100 * inputs, targets)
    assert optimizer.state[model[0].weight]["input_factor"].norm() > 1000 * before.norm()


def test_what_layers_returned_is_let_go_before_cg(monkeypatch):
    """Fails if the record of a renewal stays: every layer's output would be in memory throughout CG."""
    recorded = []
    genuine = SharedProblem.system
    monkeypatch.setattr(
        SharedProblem,
        "system",
        lambda self, damping: (
            recorded.append(dict(self.part._shared.jacobian._kept.calls.of)) or genuine(self, damping)
        ),
    )
    shf.SHF(mlp(), CE, preconditioner="kronecker").step(*labelled())
    assert recorded == [{}]


@pytest.mark.parametrize("loss", [lambda z, t: CE(z[0], t), lambda z, t: CE(z[0], t) + z[1].square().mean()])
def test_a_model_of_two_heads_is_preconditioned(loss):
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 2)

        def forward(self, x):
            h = self.body(x).tanh()
            return self.first(h), self.second(h)

    info = shf.SHF(Heads().double(), loss, **shf.presets.fast).step(*labelled())
    assert info.accepted
    assert info.loss_after < info.loss_before


@pytest.mark.parametrize("shapes", [[(8, 1100)], [(8, 3), (3,)]])
def test_a_loss_without_a_root_is_refused_by_name(shapes):
    """More coupled outputs than dense blocks are made of; outputs that have not the same number of rows."""
    loss = Loss(lambda z, t: sum(u.sum() for u in z).square())
    with pytest.raises(ValueError, match=r"'kronecker' need a root of L''"):
        LossExpansion(loss, [torch.randn(shape) for shape in shapes], None).hessian_root(
            lambda like, number, draw: torch.ones_like(like)
        )


# --- what it is for -----------------------------------------------------------------------------------------------------


def test_one_iteration_solves_what_it_describes():
    """Regression on inputs of very different sizes and correlations: A ⊗ G is the curvature, a diagonal is not."""
    torch.manual_seed(0)
    mixing = torch.randn(4, 4, dtype=torch.float64) * torch.tensor([1.0, 10.0, 0.1, 3.0], dtype=torch.float64)
    inputs = torch.randn(2000, 4, dtype=torch.float64) @ mixing
    targets = inputs @ torch.randn(4, 3, dtype=torch.float64)
    ends = {}
    for kind in ("kronecker", "jacobi"):
        torch.manual_seed(1)
        optimizer = shf.SHF(
            nn.Linear(4, 3).double(), nn.MSELoss(), preconditioner=kind, cg_iterations=1, damping=1e-6, seed=0
        )
        ends[kind] = optimizer.step(inputs, targets).loss_after
    assert ends["kronecker"] < 0.05 * ends["jacobi"]


# --- from step to step --------------------------------------------------------------------------------------------------


def run(optimizer: shf.SHF, begin: int, end: int) -> shf.SHF:
    for k in range(begin, end):
        optimizer.step(*labelled(seed=k % 3))
    return optimizer


def make(model=None, **options) -> shf.SHF:
    torch.manual_seed(0)
    settings = {"preconditioner": "kronecker", "seed": 4, "weight_decay": 0.01, "factor_every": 2, **options}
    return shf.SHF(model or mlp(dropout=0.3), CE, **settings)


@pytest.mark.parametrize("model", [lambda: mlp(dropout=0.3), normalised])
@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_resumed_run_is_the_same_bit_by_bit(stop, model):
    whole = run(make(model()), 0, 6)
    first = run(make(model()), 0, stop)
    file = io.BytesIO()
    torch.save({"model": first.model.state_dict(), "optimizer": first.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second = make(model())
    second.model.load_state_dict(saved["model"])
    second.load_state_dict(saved["optimizer"])
    run(second, stop, 6)
    assert identical(second.state_dict(), whole.state_dict())
    assert torch.equal(theta(second.model), theta(whole.model))


def test_a_state_from_before_there_were_factors_continues():
    old = run(make(preconditioner="empirical-fisher"), 0, 2)
    new = make()
    with pytest.warns(shf.SHFWarning, match="other options"):
        new.load_state_dict(old.state_dict())
    run(new, 2, 4)
    assert "input_factor" in new.state[new.model[0].weight]


def test_the_state_of_the_other_preconditioners_has_no_trace_of_it():
    optimizer = run(make(preconditioner="jacobi"), 0, 2)
    assert all(set(entry) == {"delta"} for entry in optimizer.state.values())
    assert not [name for name in optimizer.param_groups[0]["shf"] if "factor" in name]


def test_factors_are_running_averages():
    fresh = {}
    for keep in (0.0, 1.0):
        optimizer = run(make(mlp(), factor_every=1, factor_average=keep), 0, 1)
        first = optimizer.state[optimizer.model[0].weight]["input_factor"].clone()
        run(optimizer, 1, 2)
        fresh[keep] = (first, optimizer.state[optimizer.model[0].weight]["input_factor"])
    inputs = [torch.cat([labelled(seed=k)[0], torch.ones(ROWS, 1, dtype=torch.float64)], 1) for k in (0, 1)]
    a = [x.T @ x / ROWS for x in inputs]
    assert_close(fresh[0.0][0], a[0])
    assert_close(fresh[0.0][1], a[1])  # nothing kept
    assert_close(fresh[1.0][1], (a[0] + a[1]) / 2)  # the second of two keeps half


def test_factors_are_renewed_on_schedule():
    optimizer = make(factor_every=3)
    renewed = []
    for k in range(7):
        before = optimizer.state.get(optimizer.model[0].weight, {}).get("input_factor")
        run(optimizer, k, k + 1)
        renewed.append(optimizer.state[optimizer.model[0].weight]["input_factor"] is not before)
    assert renewed == [True, False, False, True, False, False, True]


def test_renewals_take_a_fifth_of_the_work():
    schedule = Schedule(0.95, None, cg_iterations=3)
    block = Block(nn.Linear(999, 1000), 0, 1, 1000, 1000)
    periods = {n: schedule.period([block], [n], others=False) for n in (100, 1000, 10_000)}
    assert periods[100] > periods[1000] >= periods[10_000] >= 1
    for n, period in periods.items():
        step = 23 * n * 1e6 + 8e9
        assert (4 * n * 1e6 + 6e9) / period <= 0.2 * step * 1.01


def test_an_exception_takes_the_renewal_back(monkeypatch):
    optimizer = run(make(factor_every=1), 0, 2)
    before = copy.deepcopy(optimizer.state_dict())
    original = Memory.commit

    def interrupted(self):
        original(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(Memory, "commit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(optimizer, 2, 3)
    monkeypatch.undo()
    assert identical(optimizer.state_dict(), before)
    run(optimizer, 2, 4)
    assert torch.equal(theta(optimizer.model), theta(run(make(factor_every=1), 0, 4).model))


def test_layers_that_a_derivative_by_the_inputs_uses_again_are_said_to_have_a_diagonal_alone():
    def slope(model, inputs):
        inputs = inputs.detach().requires_grad_()
        return torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)[0]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    inputs = torch.randn(12, 2, dtype=torch.float64)
    optimizer = shf.SHF(model, nn.MSELoss(), forward=slope, preconditioner="kronecker", factor_every=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            optimizer.step(inputs, torch.ones_like(inputs))
    assert ["have a diagonal in place of factors" in str(w.message) for w in caught] == [True]
    plain = shf.SHF(model, nn.MSELoss(), preconditioner="kronecker")
    plain.step(inputs, torch.ones(12, 1, dtype=torch.float64))  # a warning would be an error


def test_a_renewal_is_one_backward_pass(monkeypatch):
    """Sums of the layers with factors and the diagonals of all others come from the same one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double()
    inputs, targets = torch.randn(12, 4, dtype=torch.float64), torch.randint(3, (12,))
    optimizer = shf.SHF(model, nn.CrossEntropyLoss(), preconditioner="kronecker", factor_every=2, cg_iterations=1)
    passes, original = [], torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **k: passes.append(1) or original(*a, **k))
    counts = []
    for _ in range(4):
        passes.clear()
        optimizer.step(inputs, targets)
        counts.append(len(passes))
    assert counts[2] == counts[3] + 1
