"""The reduction ratio and the rule that moves λ, on hand-made numbers."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shf.damping.levenberg import adapt_damping, reduction_ratio, rounding
from shf.info import DampingBound, bound_reached

FAILURE = -math.inf


@pytest.mark.parametrize(
    ("f_new", "f_old", "model_change", "expected"),
    [
        (1.0, 2.0, -1.0, 1.0),
        (1.5, 2.0, -1.0, 0.5),
        (0.0, 2.0, -1.0, 2.0),
        (2.0, 2.0, -1.0, 0.0),
        pytest.param(2.1, 2.0, -1.0, FAILURE, id="f rose"),
        pytest.param(2.1, 2.0, 1.0, FAILURE, id="f rose as the model said: still a failure, not ρ > 0"),
        pytest.param(1.0, 2.0, 0.0, FAILURE, id="the model promises nothing"),
        pytest.param(1.0, 2.0, 0.5, FAILURE, id="the model promises a rise"),
        pytest.param(math.nan, 2.0, -1.0, FAILURE, id="f is nan"),
        pytest.param(math.inf, 2.0, -1.0, FAILURE, id="f is inf"),
        pytest.param(-math.inf, 2.0, -1.0, FAILURE, id="f is -inf"),
        pytest.param(1.0, 2.0, math.nan, FAILURE, id="the model is nan"),
        pytest.param(1.0, 2.0, -math.inf, FAILURE, id="the model is -inf"),
    ],
)
def test_reduction_ratio(f_new, f_old, model_change, expected):
    assert reduction_ratio(f_new, f_old, model_change) == expected


@pytest.mark.parametrize(
    ("f_new", "model_change", "expected"),
    [
        pytest.param(2.0, -0.01, 1.0, id="no change, and no more was promised than rounding"),
        pytest.param(2.01, -0.01, 1.0, id="a rise by rounding"),
        pytest.param(1.9, -0.01, pytest.approx(10.0), id="a change beyond rounding"),
        pytest.param(2.1, -0.01, FAILURE, id="a rise beyond rounding"),
        pytest.param(2.0, -1.0, 0.0, id="a promise beyond rounding that did not come true"),
        pytest.param(2.0, 0.0, FAILURE, id="no promise"),
        pytest.param(math.nan, -0.01, FAILURE, id="f is nan"),
    ],
)
def test_what_is_lost_in_rounding_says_nothing_against_the_model(f_new, model_change, expected):
    assert reduction_ratio(f_new, 2.0, model_change, noise=0.02) == expected


def test_rounding_goes_with_the_size_of_f():
    assert rounding(-3.0, 1e-7) == pytest.approx(1.2e-6)


@pytest.mark.parametrize(
    ("rho", "expected"),
    [
        (FAILURE, 100 / 99),
        (-1.0, 100 / 99),
        (0.0, 100 / 99),
        (math.nextafter(0.25, 0), 100 / 99),
        (0.25, 1.0),
        (0.5, 1.0),
        (0.75, 1.0),
        (math.nextafter(0.75, 1), 0.99),
        (5.0, 0.99),
    ],
)
def test_damping_moves_only_outside_of_a_quarter_and_three_quarters(rho, expected):
    assert adapt_damping(1.0, rho, 0.99) == pytest.approx(expected, rel=1e-15)


@given(damping=st.floats(1e-12, 1e12), factor=st.floats(0.1, 1.0))
def test_a_failure_undoes_a_success(damping, factor):
    assert adapt_damping(adapt_damping(damping, 1.0, factor), 0.0, factor) == pytest.approx(damping, rel=1e-12)


@given(rho=st.one_of(st.just(FAILURE), st.floats(-1e9, 1e9)), damping=st.floats(1e-12, 1e12))
def test_factor_one_keeps_damping(rho, damping):
    assert adapt_damping(damping, rho, 1.0) == damping


def test_lambda_may_rise_faster_than_it_falls():
    assert adapt_damping(1.0, 0.0, 0.5, rise=3.0) == 8.0
    assert adapt_damping(1.0, 1.0, 0.5, rise=3.0) == 0.5
    assert adapt_damping(1.0, 0.5, 0.5, rise=3.0) == 1.0


@pytest.mark.parametrize(
    ("damping", "expected"),
    [(0.5, DampingBound.FLOOR), (0.6, None), (2.0, DampingBound.CEILING), (9.0, DampingBound.CEILING)],
)
def test_the_bound_that_is_reached(damping, expected):
    assert bound_reached(damping, 0.5, 2.0) is expected
