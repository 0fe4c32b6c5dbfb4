"""Draws inside a model: frozen for a step, row by row; what cannot be frozen is refused by name."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shf
from helpers import CLASSES, FEATURES, assert_close, labelled, theta
from shf.data.draws import Draws, mix
from shf.data.rows import RowAxis, infer_axis
from shf.errors import AmbiguousRowsError

ROWS = 6
CE = nn.CrossEntropyLoss()


class Forward(nn.Module):
    """A linear layer between two functions of a test."""

    def __init__(self, function) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.function(x))


def optimizer_for(function, **options) -> tuple[shf.SHF, Tensor, Tensor]:
    torch.manual_seed(0)
    optimizer = shf.SHF(Forward(function), nn.CrossEntropyLoss(), seed=3, **options)
    return optimizer, torch.randn(ROWS, 4), torch.randint(3, (ROWS,))


def test_every_pass_meets_the_same_numbers_and_a_part_its_rows():
    draws, x = Draws(5, ROWS), torch.ones(ROWS, 4)
    with draws.over():
        first = [F.dropout(x), torch.randn(2), torch.rand_like(x)]
    with draws.over():
        again = [F.dropout(x), torch.randn(2), torch.rand_like(x)]
    rows = torch.tensor([4, 1])
    with draws.over(rows):
        part = [F.dropout(x[rows]), torch.randn(2), torch.rand_like(x[rows])]
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(part[0], first[0][rows])
    assert torch.equal(part[1], first[1])
    assert torch.equal(part[2], first[2][rows])


def test_another_seed_gives_other_numbers_of_the_same_law():
    x = torch.ones(2000, 10)
    masks = []
    for seed in (1, 2):
        with Draws(seed, len(x)).over():
            masks.append(F.dropout(x, 0.3) > 0)
    assert not torch.equal(*masks)
    for mask in masks:
        assert mask.float().mean().item() == pytest.approx(0.7, abs=0.02)


def test_a_part_can_come_first_where_the_axis_is_known():
    whole, part, x = Draws(5, ROWS), Draws(5, ROWS, [RowAxis(1)]), torch.ones(3, ROWS)
    rows = torch.tensor([5, 2])
    with part.over(rows):
        found = F.dropout(x[:, rows])
    with whole.over():
        expected = F.dropout(x)[:, rows]
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("full", "part", "expected"),
    [
        ((6, 4), (3, 4), RowAxis(0)),
        ((6, 6, 2), (6, 3, 2), RowAxis(1)),  # as many time steps as rows
        ((12, 5), (6, 5), RowAxis(0, 2)),
        ((5,), (5,), None),
    ],
)
def test_the_row_axis_is_the_one_that_scales(full, part, expected):
    assert infer_axis(full, 6, part, 3) == expected


@pytest.mark.parametrize("part", [(3, 3), (4, 6), (6,)])
def test_an_axis_that_does_not_scale_is_ambiguous(part):
    with pytest.raises(AmbiguousRowsError, match="no single axis"):
        infer_axis((6, 6), 6, part, 3)


@pytest.mark.parametrize("minor", [False, True])
def test_folded_rows(minor):
    axis = RowAxis(0, 2, minor)
    grid = torch.arange(ROWS).repeat(2) if minor else torch.arange(ROWS).repeat_interleave(2)
    rows = torch.tensor([3, 0])
    assert axis.take(grid, rows).unique().tolist() == [0, 3]
    assert torch.equal(axis.to_front(grid), torch.arange(ROWS)[:, None].expand(-1, 2))
    parts = [axis.take(grid, r) for r in (torch.arange(4), torch.arange(4, ROWS))]
    assert torch.equal(axis.cat(parts), grid)


def test_rows_folded_behind_time_are_found():
    """(T·B) with time first: shapes cannot say it, comparing outputs can."""

    def function(x: Tensor) -> Tensor:
        sequence = x.expand(3, *x.shape).reshape(3 * len(x), 4)
        return F.dropout(sequence).view(3, len(x), 4).mean(0)

    optimizer, x, t = optimizer_for(function, curvature_batch=2)
    optimizer.step(x, t)
    assert optimizer._subject._layouts._known is not None
    assert optimizer._subject._layouts._known[1].draws == [RowAxis(0, 3, minor=True)]


def test_the_same_seed_gives_the_same_trajectory_and_the_global_generator_rests():
    results = []
    for consumed in (0, 3):
        optimizer, x, t = optimizer_for(F.dropout, curvature_batch=2)
        torch.manual_seed(9)
        torch.rand(consumed)
        state = torch.get_rng_state()
        for _ in range(3):
            optimizer.step(x, t)
        assert torch.equal(torch.get_rng_state(), state)
        results.append(optimizer.model.layer.weight.detach().clone())
    assert torch.equal(*results)


def test_masks_change_from_step_to_step():
    seen = []

    def function(x: Tensor) -> Tensor:
        y = F.dropout(x)
        if len(x) == ROWS:
            seen.append((y != 0).clone())
        return y

    optimizer, x, t = optimizer_for(function)
    optimizer.step(x, t)
    first = list(seen)
    seen.clear()
    optimizer.step(x, t)
    assert all(torch.equal(first[0], mask) for mask in first)
    assert all(torch.equal(seen[0], mask) for mask in seen)
    assert not torch.equal(first[0], seen[0])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x * torch.bernoulli(x.sigmoid()), r"aten\.bernoulli\.default"),
        (lambda x: x * torch.multinomial(x.softmax(1), 1), r"aten\.multinomial"),
        (lambda x: x * random.random(), "different outputs"),
    ],
)
def test_what_cannot_be_frozen_is_refused_by_name(function, message):
    optimizer, x, t = optimizer_for(function)
    before = optimizer.model.layer.weight.detach().clone()
    with pytest.raises(RuntimeError, match=message):
        optimizer.step(x, t)
    assert torch.equal(optimizer.model.layer.weight, before)


def test_seeding_inside_forward_is_refused():
    def function(x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return F.dropout(x)

    optimizer, x, t = optimizer_for(function)
    with pytest.raises(RuntimeError, match="global generator"):
        optimizer.step(x, t)


def test_a_draw_without_a_row_axis_is_refused_only_where_rows_are_selected():
    def function(x: Tensor) -> Tensor:
        return x + 0.01 * torch.randn(len(x), len(x)).mean()

    optimizer, x, t = optimizer_for(function)
    assert optimizer.step(x, t).accepted
    optimizer, x, t = optimizer_for(function, curvature_batch=2)
    with pytest.raises(ValueError, match="random draw number 0"):
        optimizer.step(x, t)


def test_reentrant_checkpointing_is_refused_with_the_remedy():
    optimizer, x, t = optimizer_for(lambda x: x)
    inner = optimizer.model.layer.forward
    optimizer.model.layer.forward = lambda x: checkpoint(inner, x.requires_grad_(), use_reentrant=True)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        optimizer.step(x, t)


def test_eval_mode_draws_nothing():
    optimizer, x, t = optimizer_for(nn.Dropout(0.9))
    optimizer.model.eval()
    info = optimizer.step(x, t)
    expected = nn.CrossEntropyLoss()(optimizer.model(x), t).item()
    assert info.loss_after == pytest.approx(expected, rel=1e-5)


def test_mix_tells_numbers_apart():
    seeds = {mix(*numbers) for numbers in [(1, 2), (2, 1), (12,), (1, 2, 0), (0, 1, 2)]}
    assert len(seeds) == 5
    assert all(0 <= seed < 2**63 for seed in seeds)


class LayerDrop(nn.Module):
    """Layers with dropout, each passed over at random: which draws there are depends on draws. `decide` draws the number."""

    def __init__(self, decide):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(3)).double()
        self.head, self.decide = nn.Linear(FEATURES, CLASSES).double(), decide

    def forward(self, x):
        for layer in self.layers:
            if self.decide(x) < 0.4:
                continue
            x = x + F.dropout(layer(x).tanh(), 0.5)
        return self.head(x)


@pytest.mark.parametrize("options", [{}, {"preconditioner": None, "curvature_batch": 9}], ids=["paper", "some"])
def test_layers_passed_over_at_random_are_the_same_ones_in_chunks(options):
    """Fails if draws of a step are taken for those of the passes that looked for rows, where other layers were left out."""
    chunks, whole = (
        shf.SHF(LayerDrop(lambda _: torch.rand(())), CE, seed=3, microbatch=m, **options) for m in (10, None)
    )
    for _ in range(6):
        found, expected = (o.step(*labelled(30)) for o in (chunks, whole))
        assert found.loss_before == pytest.approx(expected.loss_before, rel=1e-9)
    assert_close(theta(chunks.model), theta(whole.model), 1e-8)


def test_draws_that_depend_on_draws_for_rows_are_refused_in_words():
    optimizer = shf.SHF(LayerDrop(lambda x: torch.rand(len(x)).min() * 8), CE, seed=0, microbatch=10)
    with pytest.raises(AmbiguousRowsError, match=r"random draw number .* depend on random numbers of some rows"):
        optimizer.step(*labelled(30))
