"""Backtracking over CG iterates and the line search, on hand-made sequences."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shf.linear.cg import keep_all
from shf.selection import Backtracking, Candidates, Rate, line_search

ALL, FIRST_WORSE, LAST = Backtracking.ALL, Backtracking.FIRST_WORSE, Backtracking.LAST
NAN, INF = math.nan, math.inf


def choose(values, rule):
    """The choice among iterates with these objectives, and the indices in the order in which they were evaluated."""
    visited = []

    def f(delta):
        visited.append(int(delta.item()))
        return values[visited[-1]]

    candidates = Candidates(f, rule, keep_all)
    for index in range(len(values)):
        if candidates.keep(index + 1) or index == len(values) - 1:  # as CG does
            candidates.visit(index + 1, torch.tensor([float(index)]), 0.0)
    best = candidates.choose()
    return None if best is None else (best.number - 1, best.value), visited


@pytest.mark.parametrize(
    ("values", "rule", "index", "visited"),
    [
        ([3.0, 2.0, 1.0], ALL, 2, [0, 1, 2]),
        ([3.0, 2.0, 1.0], FIRST_WORSE, 2, [2, 1]),
        ([3.0, 2.0, 1.0], LAST, 2, [2]),
        ([1.0, 2.0, 3.0], ALL, 0, [0, 1, 2]),
        ([1.0, 2.0, 3.0], FIRST_WORSE, 0, [2, 1, 0]),
        ([1.0, 2.0, 3.0], LAST, 2, [2]),
        pytest.param([0.0, 9.0, 1.0, 2.0], ALL, 0, [0, 1, 2, 3], id="all: looks behind a hill"),
        pytest.param([0.0, 9.0, 1.0, 2.0], FIRST_WORSE, 2, [3, 2, 1], id="first-worse: stops at the hill"),
        pytest.param([5.0, 1.0, 1.0, 1.0], ALL, 3, [0, 1, 2, 3], id="all: of equals the latest"),
        pytest.param([5.0, 1.0, 1.0, 1.0], FIRST_WORSE, 3, [3, 2, 1, 0], id="first-worse: an equal is not worse"),
        pytest.param([0.5, 1.0, 1.0], FIRST_WORSE, 0, [2, 1, 0], id="first-worse: walks over equals"),
        pytest.param([2.0, 1.0, NAN], ALL, 1, [0, 1, 2], id="all: passes over nan at the end"),
        pytest.param([2.0, 1.0, NAN], FIRST_WORSE, 1, [2, 1, 0], id="first-worse: passes over nan at the end"),
        pytest.param([0.5, INF, 1.0], ALL, 0, [0, 1, 2], id="all: passes over inf in between"),
        pytest.param([0.5, INF, 1.0], FIRST_WORSE, 0, [2, 1, 0], id="first-worse: passes over inf in between"),
        pytest.param([0.5, -INF, 1.0], ALL, 0, [0, 1, 2], id="all: -inf is no success"),
        pytest.param([1.0, NAN], LAST, None, [1], id="last: nan is a failure"),
        pytest.param([NAN, INF, -INF], ALL, None, [0, 1, 2], id="all: nothing finite"),
        pytest.param([NAN, INF, -INF], FIRST_WORSE, None, [2, 1, 0], id="first-worse: nothing finite"),
        ([4.0], ALL, 0, [0]),
        ([4.0], FIRST_WORSE, 0, [0]),
    ],
)
def test_backtracking(values, rule, index, visited):
    assert choose(values, rule) == (None if index is None else (index, values[index]), visited)


@pytest.mark.parametrize("rule", Backtracking)
def test_no_iterate_to_choose_from(rule):
    assert choose([], rule) == (None, [])


numbers = st.one_of(st.floats(-5, 5), st.sampled_from([NAN, INF, -INF]))


@given(st.lists(numbers, min_size=1))
def test_all_finds_the_smallest_finite(values):
    finite = [v for v in values if math.isfinite(v)]
    found, _ = choose(values, ALL)
    assert (INF if found is None else found[1]) == (min(finite) if finite else INF)


@given(st.lists(st.floats(-5, 5), min_size=1))
def test_rules_are_ordered_by_what_they_find_and_what_they_cost(values):
    (best, seen), (near, some), (last, one) = (choose(values, rule) for rule in (ALL, FIRST_WORSE, LAST))
    assert best[1] <= near[1] <= last[1]
    assert len(seen) >= len(some) >= len(one) == 1


def search(f, slope, steps=60, f_old=1.0):
    """The rate found on f, and the trials that were made (α = 1 is known beforehand)."""
    trials = []

    def value_at(alpha):
        trials.append(alpha)
        return f(alpha)

    return line_search(value_at, f_old, f(1.0), slope, steps=steps), trials


def test_full_step_when_it_descends_enough():
    assert search(lambda alpha: 0.5, slope=-1.0) == (Rate(1.0, 0.5), [])


@pytest.mark.parametrize(("f_full", "accepted"), [(0.99, True), (math.nextafter(0.99, 1), False)])
def test_sufficient_decrease_is_a_hundredth_of_the_slope(f_full, accepted):
    assert (line_search(lambda alpha: 5.0, 1.0, f_full, -1.0, steps=0).alpha == 1.0) == accepted


def test_shrinks_by_four_fifths_until_it_descends():
    rate, trials = search(lambda alpha: 0.5 if alpha < 0.6 else 2.0, slope=-1.0)
    assert trials == pytest.approx([0.8, 0.64, 0.512])
    assert rate == Rate(trials[-1], 0.5)


@pytest.mark.parametrize("steps", [0, 1, 7, 60])
def test_rejected_after_all_trials(steps):
    rate, trials = search(lambda alpha: 2.0, slope=-1.0, steps=steps)
    assert rate == Rate(0.0, 1.0)
    assert len(trials) == steps


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_non_finite_trial_fails(bad):
    rate, trials = search(lambda alpha: 0.5 if alpha < 0.7 else bad, slope=-1.0)
    assert rate == Rate(pytest.approx(0.64), 0.5)
    assert len(trials) == 2


@pytest.mark.parametrize(
    ("f", "alpha"),
    [
        pytest.param(lambda alpha: 1 + 0.005 * alpha, 0.0, id="a rise that the printed test would accept"),
        pytest.param(lambda alpha: 1 - 0.001 * alpha, 1.0, id="any descent will do"),
        pytest.param(lambda alpha: 1.0, 1.0, id="no rise"),
        pytest.param(lambda alpha: 1 + (alpha > 0.7), pytest.approx(0.64), id="no rise further in"),
    ],
)
def test_uphill_slope_never_accepts_a_rise(f, alpha):
    assert search(f, slope=+1.0)[0].alpha == alpha


@pytest.mark.parametrize(
    ("f_full", "slope", "alpha"),
    [
        pytest.param(1.001, -0.001, 1.0, id="both within rounding"),
        pytest.param(1.1, -0.001, 0.0, id="f rises beyond rounding"),
        pytest.param(1.001, -1.0, 0.0, id="the slope promises more"),
        pytest.param(NAN, -0.001, 0.0, id="not finite"),
    ],
)
def test_no_trial_is_asked_for_what_rounding_decides(f_full, slope, alpha):
    assert line_search(lambda rate: 2.0, 1.0, f_full, slope, steps=5, noise=0.01) == Rate(alpha, 1.0)


@given(
    values=st.lists(numbers, min_size=1, max_size=8),
    slope=st.floats(-10, 10),
    steps=st.integers(0, 10),
)
def test_an_accepted_rate_never_rises(values, slope, steps):
    trials = iter(values * 11)
    rate = line_search(lambda alpha: next(trials), 1.0, next(trials), slope, steps=steps)
    assert rate.value <= 1.0
    assert rate.alpha == 0.0 or any(rate.alpha == pytest.approx(0.8**j) for j in range(steps + 1))
    assert (rate.alpha > 0) or rate.value == 1.0
