"""Objectives made of terms on several processes: each gives its own rows of each term."""

import pytest
from torch import nn

import shf
import worlds
from helpers import identical, snapshot, theta
from test_terms import MSE, batches, laplacian, network

SPLITS = {
    "both have some of each": {"interior": (4, 5), "boundary": (3, 3), "data": (1, 4), "more": (2, 4)},
    "one has none of some": {"interior": (0, 9), "boundary": (6, 0), "data": (0, 5), "more": (6, 0)},
}
OPTIONS = [
    {},
    {"preconditioner": "jacobi", "curvature_batch": 4, "noise_every": 1},
    {"split_vectors": True, "weight_decay": 0.1},
    {"damping": "auto", "microbatch": 2},
]


def objective():
    """More terms than a process had counts to tell of before there were terms."""
    return {
        "interior": shf.Term(MSE, forward=laplacian),
        "boundary": shf.Term(MSE, weight=100.0),
        "data": shf.Term(nn.HuberLoss(reduction="sum"), weight=0.5),
        "more": nn.SmoothL1Loss(),
    }


def data(split=None, rank=0, seed=0):
    """All rows, or those of one rank."""
    found = batches(seed)
    found["more"] = tuple(2 * t for t in found["boundary"])
    if split is None:
        return found
    return {name: tuple(t.split(SPLITS[split][name])[rank] for t in pair) for name, pair in found.items()}


def optimizer_of(**options):
    return shf.SHF(network(0.3), objective(), **{"seed": 3, "weight_decay": 0.01, **options})


def train(rank, split, options, steps=3):
    optimizer = optimizer_of(**options)
    infos = [optimizer.step(data(split, rank, k % 2)) for k in range(steps)]
    return theta(optimizer.model), infos


def train_all(rank, runs):
    return [train(rank, *run) for run in runs]


def test_the_trajectory_is_that_of_one_process():
    runs = list(zip(2 * list(SPLITS), OPTIONS, strict=True))
    found = worlds.run(2, train_all, runs)
    for number, (_, options) in enumerate(runs):
        expected, infos = train(0, None, options)
        for theta_found, infos_found in (results[number] for results in found):
            assert (theta_found - expected).abs().max() < 1e-9, options
            for info, other in zip(infos_found, infos, strict=True):
                assert info.terms == pytest.approx(other.terms, rel=1e-8)
                assert info.loss_before == pytest.approx(other.loss_before, rel=1e-8)
                assert info.gradient_noise == (other.gradient_noise and pytest.approx(other.gradient_noise, rel=1e-6))
        assert identical(found[0][number][0], found[1][number][0])
        assert found[0][number][1] == found[1][number][1]


def errors(rank):
    """What is said on each rank where terms are empty everywhere, where one is not finite, and where one rank errs."""
    optimizer, said = optimizer_of(), []
    good = data("both have some of each", rank)
    optimizer.step(good)
    before = snapshot(optimizer)
    for name in ("interior", "more"):
        empty = {**good, name: tuple(t[:0] for t in good[name])}
        said.append(message(optimizer, empty))
    bad = {**good, "data": (good["data"][0] * float("nan"), good["data"][1])} if rank == 1 else good
    said.append(message(optimizer, bad))
    said.append(message(optimizer, {**good, "data": 3} if rank == 1 else good))
    unchanged = identical(snapshot(optimizer), before)
    return said, unchanged, optimizer.step(good).accepted


def message(optimizer, given):
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        optimizer.step(given)
    return f"{caught.type.__name__}: {caught.value}"


def test_errors_end_the_step_on_all_and_name_the_term():
    found = worlds.run(2, errors)
    for said, unchanged, goes_on in found:
        assert unchanged
        assert goes_on
        assert said[0] == "ValueError: term 'interior' is empty: none of the 2 ranks has a row"
        assert said[1] == "ValueError: term 'more' is empty: none of the 2 ranks has a row"
    assert found[1][0][2].startswith("NonFiniteError: term 'data': loss HuberLoss is nan")
    assert found[0][0][2].startswith("RankError: rank 1 raised NonFiniteError: term 'data'")
    assert "term 'data' is a int" in found[0][0][3]


def skip(rank):
    optimizer = optimizer_of(nonfinite="skip")
    good = data("both have some of each", rank)
    bad = {**good, "data": (good["data"][0] * float("nan"), good["data"][1])} if rank == 1 else good
    return optimizer.step(bad).skipped, optimizer.step(good).accepted


def test_all_skip_together():
    found = worlds.run(2, skip)
    assert all(skipped and accepted for skipped, accepted in found)
    assert "term 'data'" in found[1][0]


def other_terms(rank, kind):
    terms = objective()
    if kind == "weight" and rank == 1:
        terms["data"] = shf.Term(nn.HuberLoss(reduction="sum"), weight=2.0)
    if kind == "missing" and rank == 1:
        del terms["more"]
    if kind == "order" and rank == 1:
        terms = {name: terms[name] for name in reversed(terms)}
    optimizer = shf.SHF(network(), terms, seed=0)
    optimizer.step({name: pair for name, pair in data().items() if name in terms})


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("weight", "term.data is number 2: HuberLoss, sum, weight 0.5 on rank 0, number 2: HuberLoss, sum, weight 2.0"),
        ("missing", "term.more is number 3: SmoothL1Loss, mean, weight 1.0 on rank 0, absent on rank 1"),
        ("order", "term.interior is number 0: MSELoss, mean, weight 1.0 on rank 0, number 3: MSELoss"),
    ],
)
def test_processes_with_other_terms_do_not_step(kind, says):
    for outcome in worlds.attempt(2, other_terms, kind):
        name, text, _ = outcome.error
        assert name == "RankError"
        assert says in text
