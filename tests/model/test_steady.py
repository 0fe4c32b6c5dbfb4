"""Structural damping: B + λ(I + μS) against dense float64 matrices, in products and whole steps; where it vanishes."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shf
import worlds
from helpers import Objective, assert_close, identical, snapshot, theta
from shf.data.batches import Batch
from shf.data.draws import preserved_global_state
from shf.losses import Loss
from shf.model.network import Network
from shf.probing.layout import find_layout

ROWS, STEPS, UNITS = 7, 4, 3
CE = nn.CrossEntropyLoss()
SUBSET = torch.tensor([5, 6, 0])
LAM, MU = 0.7, 0.4


class Cell(nn.Module):
    """A recurrent network that names its state at every step, and its first output layer too."""

    def __init__(self, *, names: bool = True, dropout: float = 0.0, wrap=None) -> None:
        super().__init__()
        self.into, self.over = nn.Linear(2, UNITS), nn.Linear(UNITS, UNITS)
        self.middle, self.out, self.dropout = nn.Linear(UNITS, 2), nn.Linear(2, 3), nn.Dropout(dropout)
        self.names, self.wrap, self.seen = names, wrap, []

    def forward(self, x: Tensor) -> Tensor:
        self.seen = []
        h = x.new_zeros(len(x), UNITS)
        for t in range(x.shape[1]):
            h = self.next(x[:, t], h) if self.wrap is None else self.wrap(self.next, x[:, t], h)
        return self.out(self._name(torch.tanh(self.middle(h))))

    def next(self, x: Tensor, h: Tensor) -> Tensor:
        return self._name(self.dropout(torch.tanh(self.into(x) + self.over(h))))

    def _name(self, h: Tensor) -> Tensor:
        self.seen.append(h)
        return shf.hold_steady(h) if self.names else h


def sequences(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(3)
    x = torch.randn(rows, STEPS, 2, generator=source, dtype=torch.float64)
    return x, torch.randint(3, (rows,), generator=source)


def cell(**options) -> Cell:
    torch.manual_seed(0)
    return Cell(**options).double()


def objective(model, loss=CE, rows=None, **settings) -> Objective:
    batch, network = Batch.of(*sequences()), Network(model, list(model.parameters()))
    with preserved_global_state():
        layout = find_layout(network, batch, 3)
    found = Objective(network, Loss(loss), batch, layout, curvature_rows=rows, **settings)
    found.expand(1.0)
    return found


def dense(model: Cell, rows: Tensor) -> tuple[Tensor, Tensor]:
    """J and J_h on the given rows, one autograd call per entry; the rows of J_h are all entries of all named tensors."""
    x, params = sequences()[0][rows], list(model.parameters())
    z = model(x)
    ends = [z, *model.seen]

    def gradient(entry: Tensor) -> Tensor:
        found = torch.autograd.grad(entry, params, retain_graph=True, allow_unused=True)
        pieces = [torch.zeros_like(p) if g is None else g for g, p in zip(found, params, strict=True)]
        return torch.cat([piece.reshape(-1) for piece in pieces])

    J = torch.stack([gradient(e) for e in ends[0].reshape(-1)])
    J_h = torch.stack([gradient(e) for h in ends[1:] for e in h.reshape(-1)])
    return J, J_h


def dense_system(model: Cell, rows: Tensor, reduction: str) -> tuple[Tensor, Tensor]:
    """B and S."""
    J, J_h = dense(model, rows)
    p = model(sequences()[0][rows]).detach().softmax(1)
    blocks = torch.block_diag(*(torch.diag(q) - torch.outer(q, q) for q in p))
    scale = 1 / len(rows) if reduction == "mean" else ROWS / len(rows)
    return scale * J.T @ blocks @ J, J_h.T @ J_h / len(rows)


@pytest.mark.parametrize("rows", [None, SUBSET], ids=["all-rows", "subset"])
@pytest.mark.parametrize("microbatch", [None, 2], ids=["whole", "microbatch"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_products_and_energy(rows, microbatch, reduction):
    model = cell()
    B, S = dense_system(model, torch.arange(ROWS) if rows is None else rows, reduction)
    loss = nn.CrossEntropyLoss(reduction=reduction)
    found = objective(model, loss, rows, microbatch=microbatch, structural_damping=MU).curvature(LAM)
    vectors = torch.randn(5, len(B), dtype=torch.float64)
    assert_close(torch.stack([found.product(v).clone() for v in vectors]), vectors @ (B + LAM * MU * S) + LAM * vectors)
    assert_close([found.quadratic(v) for v in vectors], [v @ (B + LAM * MU * S) @ v + LAM * v @ v for v in vectors])
    assert_close([found.structural(v) for v in vectors], [0.5 * LAM * MU * v @ S @ v for v in vectors])
    assert S.norm() > 0.1 * B.norm()


def test_products_inside_a_checkpoint():
    model = cell(wrap=lambda function, *args: checkpoint(function, *args, use_reentrant=False))
    found = objective(model, structural_damping=MU).curvature(LAM)
    vector = torch.randn(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    plain = objective(cell(), structural_damping=MU).curvature(LAM)
    assert_close(found.product(vector), plain.product(vector))


def test_with_dropout_the_rows_keep_their_masks():
    """All rows in one pass, or in chunks with their own rows of the same draws."""
    whole, chunks = (
        objective(cell(dropout=0.5), microbatch=size, structural_damping=MU).curvature(LAM) for size in (None, 3)
    )
    vector = torch.randn(sum(p.numel() for p in cell().parameters()), dtype=torch.float64)
    assert_close(chunks.product(vector), whole.product(vector))
    assert chunks.structural(vector) == pytest.approx(whole.structural(vector))


@pytest.mark.parametrize("microbatch", [None, 3])
def test_one_whole_step(microbatch):
    """CG run to the end without preconditioner: δ solves the dense system, and ρ is that of the undamped model."""
    model, (x, t) = cell(), sequences()
    B, S = dense_system(model, torch.arange(ROWS), "mean")
    before = CE(model(x), t)
    g = torch.cat([p.reshape(-1) for p in torch.autograd.grad(before, list(model.parameters()))])
    delta = torch.linalg.solve(B + LAM * (torch.eye(len(g)) + MU * S), -g)
    start = theta(model)
    options = {"preconditioner": None, "cg_iterations": 200, "backtracking": None, "microbatch": microbatch}
    info = shf.SHF(model, CE, damping=LAM, structural_damping=MU, **options).step(x, t)
    assert info.step_size == 1
    assert_close(theta(model) - start, delta, 1e-7)
    after = CE(model(x), t)
    rho = (after - before) / (0.5 * delta @ B @ delta + g @ delta)
    assert info.reduction_ratio == pytest.approx(rho.item(), rel=1e-6)


def run(model, steps=3, kind=shf.SHF, loss=CE, **options):
    optimizer = kind(model, loss, seed=1, **options)
    data = sequences()
    if kind is shf.HF:
        infos = [optimizer.step([data], curvature=data) for _ in range(steps)]
    else:
        infos = [optimizer.step(*data) for _ in range(steps)]
    return theta(model), infos


@pytest.mark.parametrize("kind", [shf.SHF, shf.HF])
def test_without_it_naming_changes_nothing(kind):
    assert identical(run(cell(), kind=kind, structural_damping=0.0), run(cell(names=False), kind=kind))


@pytest.mark.parametrize("kind", [shf.SHF, shf.HF])
def test_it_holds_the_states_back(kind):
    x, _ = sequences()
    moved = []
    for mu in (0.0, 1.0, 100.0):
        model = cell()
        model(x)
        before = torch.stack(model.seen[:-1]).detach()
        run(model, steps=1, kind=kind, structural_damping=mu, damping=0.1)
        model(x)
        moved.append((torch.stack(model.seen[:-1]) - before).norm().item())
    assert moved[0] > moved[1] > moved[2] > 0


def test_a_sum_is_a_mean_on_another_scale():
    options = {"structural_damping": MU, "curvature_batch": 4}
    found, _ = run(cell(), loss=nn.CrossEntropyLoss(reduction="sum"), damping=ROWS * 0.5, **options)
    expected, _ = run(cell(), damping=0.5, **options)
    assert_close(found, expected, 1e-8)


def share_of_run(rank: int, sizes: list[int] | None, options: dict) -> tuple[Tensor, list]:
    model, data = cell(dropout=0.3), sequences()
    optimizer = shf.SHF(model, CE, seed=1, structural_damping=MU, **options)
    own = data if sizes is None else tuple(part.split(sizes)[rank] for part in data)
    infos = [optimizer.step(*own) for _ in range(3)]
    return theta(model), infos


def all_runs(rank: int, sizes: list[int], settings: list[dict]) -> list:
    return [share_of_run(rank, sizes, options) for options in settings]


def test_several_processes_follow_the_single_one():
    settings = [{}, {"curvature_batch": 3}, {"split_vectors": True, "microbatch": 2}]
    first, second = worlds.run(2, all_runs, [5, 2], settings)
    assert identical(first, second)
    for options, (found, infos) in zip(settings, first, strict=True):
        expected, others = share_of_run(0, None, options)
        assert_close(found, expected, 1e-8)
        assert infos[-1].reduction_ratio == pytest.approx(others[-1].reduction_ratio, rel=1e-6)


@pytest.mark.parametrize("options", [{}, {"curvature_batch": 3}, {"microbatch": 3}], ids=str)
def test_a_model_that_names_nothing_is_refused(options):
    optimizer = shf.SHF(cell(names=False), CE, structural_damping=0.1, **options)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=r"named no tensor to hold steady: call shf.hold_steady\(h\)"):
        optimizer.step(*sequences())
    assert identical(snapshot(optimizer), before)


def test_a_tensor_overwritten_after_it_was_named_is_refused():
    class Overwrites(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return shf.hold_steady(super().forward(x)).relu_()

    x, t = torch.randn(6, 4), torch.randint(3, (6,))
    with pytest.raises(RuntimeError, match=r"tensor number 0, of shape \(6, 3\), was overwritten in place"):
        shf.SHF(Overwrites(4, 3), CE, structural_damping=0.1).step(x, t)


@pytest.mark.parametrize("value", [(torch.ones(2), None), torch.ones(2, dtype=torch.int64)])
def test_only_tensors_with_a_gradient_can_be_held(value):
    with pytest.raises(TypeError, match="hold_steady takes one floating-point tensor, got a"):
        shf.hold_steady(value)


def test_elsewhere_it_returns_its_argument():
    h = torch.randn(3)
    assert shf.hold_steady(h) is h
    compiled = torch.compile(lambda x: shf.hold_steady(x) * 2, backend="eager", fullgraph=True)
    assert torch.equal(compiled(h), 2 * h)
