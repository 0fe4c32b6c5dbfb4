"""Algorithm 1 over flat vectors, on hand-made problems whose every number is known."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import assert_close, identical
from shf.algorithm import State, shf_step
from shf.composition import Config
from shf.linear.cg import CGStop, conjugate_gradient, identity
from shf.linear.flat import inner_products
from shf.linear.stopping import Stopping
from shf.linear.system import LinearSystem
from shf.local import Expansion
from shf.state import Memory

NAN, INF = math.nan, math.inf
N = 5
START = State(delta=None, damping=1e-15, cg_decay=0.5, update_scale=1.0)


class Problem:
    """What Algorithm 1 asks of a problem, from `expand` and `curvature`."""

    def linearise(self, preparation):
        value, gradient = self.expand()
        return Expansion(value, gradient, lambda damping: identity)

    def system(self, damping):
        return LinearSystem(self.curvature(damping), damping)

    def point(self, delta, rate):
        return self.theta + rate * delta

    def dots(self, *pairs):
        return inner_products(*pairs)

    def own(self, vector):
        return vector

    def mean_eigenvalue(self):
        return 0.0, 0

    def iterate(self, state, stopping=None, **options):
        memory = Memory(None, {}, {})
        method = Config(preconditioner=None, **options).method(memory, 1.0)
        method = method if stopping is None else replace(method, stopping=stopping)
        return shf_step(self, state, method, memory)[:3]


class Quadratic(Problem):
    """f(θ) = ½ θ'Aθ - b'θ with its own A as curvature, unless told otherwise; `fails` replaces f at the n-th trial."""

    def __init__(self, seed=0, curvature=None, fails=None):
        source = torch.Generator().manual_seed(seed)
        M = torch.randn(N, N, generator=source, dtype=torch.float64)
        self.A = M @ M.t() + torch.eye(N, dtype=torch.float64)
        self.b, self.theta = torch.randn(2, N, generator=source, dtype=torch.float64)
        self.trials = []
        self.products = []
        self._curvature = self.A if curvature is None else curvature
        self._fails = fails or {}

    def f(self, theta):
        return (0.5 * theta @ self.A @ theta - self.b @ theta).item()

    def expand(self):
        return self.f(self.theta), self.A @ self.theta - self.b

    def curvature(self, damping):
        def product(v):
            self.products.append(v.clone())
            return self._curvature @ v + damping * v

        return product

    def value(self, theta):
        self.trials.append(theta.clone())
        return self._fails.get(len(self.trials), self.f(theta))

    def step(self, state=START, stopping=None, **options):
        theta, after, info = self.iterate(state, stopping, **options)
        assert (theta is not None) == info.accepted
        return self.theta if theta is None else theta, after, info

    def cg(self, state=START, iterations=3):
        """What CG must have done in that step."""
        start = None if state.delta is None else state.cg_decay * state.delta
        B = self._curvature + state.damping * torch.eye(N, dtype=torch.float64)
        return conjugate_gradient(B.mv, self.b - self.A @ self.theta, start=start, iterations=iterations)


@given(st.integers(0, 2**32 - 1))
def test_a_strictly_convex_quadratic_is_solved_in_one_step(seed):
    problem = Quadratic(seed)
    theta, _, info = problem.step(cg_iterations=2 * N)
    solution = torch.linalg.solve(problem.A, problem.b)
    assert_close(theta, solution, 1e-6)
    assert info.loss_after == pytest.approx(problem.f(solution), rel=1e-9)
    assert info.step_size == 1


@given(st.integers(0, 2**32 - 1), st.floats(1e-6, 10.0), st.sampled_from(["all", "first-worse", None]))
def test_the_undamped_model_of_a_quadratic_is_exact_at_every_damping(seed, damping, rule):
    _, after, info = Quadratic(seed).step(replace(START, damping=damping), backtracking=rule)
    assert info.reduction_ratio == pytest.approx(1.0, rel=1e-6)
    assert info.damping == damping
    assert after.damping == pytest.approx(0.99 * damping)


@given(st.integers(0, 2**32 - 1), st.floats(0.0, 1.0))
def test_cg_starts_from_gamma_times_the_last_delta(seed, gamma):
    problem = Quadratic(seed)
    delta = torch.arange(1.0, N + 1, dtype=torch.float64)
    state = State(delta=delta, damping=0.3, cg_decay=gamma, update_scale=1.0)
    _, after, info = problem.step(replace(state, delta=delta.clone()))
    if gamma:
        assert identical(problem.products[0], gamma * delta)
    assert info.products == info.cg_steps + (gamma > 0)
    assert_close(after.delta, problem.cg(state).last)


def test_theta_is_untouched():
    problem = Quadratic()
    state = State(delta=torch.ones(N, dtype=torch.float64), damping=1.0, cg_decay=0.5, update_scale=0.5)
    before = problem.theta.clone()
    theta, after, _ = problem.step(state)
    assert identical(problem.theta, before)
    assert theta.data_ptr() != problem.theta.data_ptr()
    assert after.delta.data_ptr() != theta.data_ptr()


@pytest.mark.parametrize(("rule", "trial", "chosen"), [("all", 4, 3), ("first-worse", 1, 3), (None, 1, 4)])
def test_what_is_handed_on_is_the_last_iterate_not_the_chosen(rule, trial, chosen):
    """The last iterate is the last trial where all are compared, and the first where they are walked down."""
    problem = Quadratic(fails={trial: 1e9})
    theta, after, info = problem.step(backtracking=rule, line_search_steps=0, cg_iterations=4)
    iterates = problem.cg(iterations=4).iterates
    assert info.chosen_iterate == chosen
    assert_close(after.delta, iterates[-1])
    assert_close(theta, problem.theta if rule is None else problem.theta + iterates[chosen - 1])


def test_among_equals_the_last_iterate_is_taken():
    """All trials are the same: "all" compares them as they come, "first-worse" walks down to the first that is not."""
    for rule in ("all", "first-worse"):
        problem = Quadratic(fails=dict.fromkeys(range(1, 10), -1e9))
        assert problem.step(backtracking=rule)[2].chosen_iterate == 3


@pytest.mark.parametrize("beta", [1.0, 0.998, 0.25])
def test_beta_scales_the_update_and_nothing_else(beta):
    problem = Quadratic()
    whole, plain = problem.step()[::2]
    scaled, info = problem.step(replace(START, update_scale=beta))[::2]
    assert_close(scaled - problem.theta, beta * (whole - problem.theta))
    assert info == plain


def test_the_line_search_shortens_the_chosen_step():
    """With a tenth of the true curvature the step overshoots; α brings it back, and only α."""
    problem = Quadratic()
    problem._curvature = 0.1 * problem.A
    theta, after, info = problem.step(cg_iterations=2 * N, backtracking=None)
    delta = problem.cg(iterations=2 * N).last
    assert 0 < info.step_size < 1
    assert math.log(info.step_size, 0.8) == pytest.approx(round(math.log(info.step_size, 0.8)))
    assert_close(theta, problem.theta + info.step_size * delta)
    assert_close(after.delta, delta)
    assert info.loss_after == pytest.approx(problem.f(theta))
    assert info.reduction_ratio == -INF  # judged at the full step, where f rose


def test_a_rejected_step_leaves_theta_and_raises_damping():
    problem = Quadratic(curvature=1e-3 * torch.eye(N, dtype=torch.float64))
    theta, after, info = problem.step(line_search_steps=2)
    assert identical(theta, problem.theta)
    assert (info.accepted, info.step_size, info.loss_after) == (False, 0.0, info.loss_before)
    assert after.damping == START.damping / 0.99
    assert after.delta is not None  # CG's solution is still where the next run starts


def test_the_cost_account():
    problem = Quadratic()
    _, _, info = problem.step(cg_iterations=4, backtracking="all")
    assert (info.gradients, info.products, info.cg_steps, info.evaluations) == (1, 4, 4, 4)
    assert len(problem.products) == 4
    assert len(problem.trials) == info.evaluations
    problem = Quadratic()
    assert problem.step(cg_iterations=4, backtracking=None)[2].evaluations == len(problem.trials) == 1


def test_line_search_trials_are_evaluations():
    problem = Quadratic(curvature=1e-3 * torch.eye(N, dtype=torch.float64))
    _, _, info = problem.step(line_search_steps=7, cg_iterations=2)
    assert info.evaluations == len(problem.trials) == 2 + 7


class Rules(Stopping):
    """Stopping rules, given as functions."""

    def __init__(self, *, keep=None, stop=None):
        object.__setattr__(self, "rules", (keep, stop))

    def keep(self):
        return self.rules[0] or super().keep()

    def stop(self, curvature_share, *, compared):
        return self.rules[1] or super().stop(curvature_share, compared=compared)


def test_stopping_rules_decide_which_iterates_take_part():
    problem = Quadratic()
    _, _, info = problem.step(stopping=Rules(keep=lambda number: number == 2), cg_iterations=4)
    assert info.evaluations == 2  # the second and the last
    _, _, info = problem.step(stopping=Rules(stop=lambda values: len(values) == 3), cg_iterations=4)
    assert (info.cg_steps, info.cg_stop) == (2, CGStop.PROGRESS)


# --- failed trials ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize(("rule", "trial"), [("all", 3), ("first-worse", 1)])
def test_an_iterate_without_a_finite_objective_is_skipped(bad, rule, trial):
    problem = Quadratic(fails={trial: bad})
    theta, _, info = problem.step(backtracking=rule)
    assert info.chosen_iterate == 2
    assert_close(theta, problem.theta + problem.cg().iterates[1])


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("rule", ["all", "first-worse", None])
def test_nothing_finite_means_no_step(bad, rule):
    problem = Quadratic(fails=dict.fromkeys(range(1, 10), bad))
    theta, after, info = problem.step(backtracking=rule)
    assert identical(theta, problem.theta)
    assert (info.chosen_iterate, info.step_size, info.accepted) == (0, 0.0, False)
    assert info.loss_after == info.loss_before
    assert info.reduction_ratio == -INF
    assert after.damping > info.damping


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("at", [1, 2])
def test_a_non_finite_product_ends_cg_and_the_iterates_before_it_count(bad, at):
    problem = Quadratic()
    good = problem.A

    def curvature(damping):
        count = iter(range(1, 100))
        return lambda v: (good @ v + damping * v) * (bad if next(count) == at else 1.0)

    problem.curvature = curvature
    theta, after, info = problem.step()
    assert (info.cg_stop, info.cg_steps, info.chosen_iterate) == (CGStop.NON_FINITE, at - 1, at - 1)
    assert info.accepted == (at > 1)
    if at == 1:
        assert identical(theta, problem.theta)
        assert after.damping > info.damping
    assert torch.isfinite(theta).all()
    assert torch.isfinite(after.delta).all()


def test_no_curvature_and_no_descent_is_a_failure():
    """B = -I is no Gauss-Newton matrix; CG refuses its first direction, and there is no iterate."""
    problem = Quadratic(curvature=-torch.eye(N, dtype=torch.float64))
    theta, after, info = problem.step()
    assert identical(theta, problem.theta)
    assert (info.cg_stop, info.chosen_iterate, info.reduction_ratio) == (CGStop.NON_POSITIVE_CURVATURE, 0, -INF)
    assert after.damping > info.damping


def test_at_the_minimum_nothing_moves():
    problem = Quadratic()
    problem.theta = torch.zeros(N, dtype=torch.float64)
    problem.b = torch.zeros(N, dtype=torch.float64)
    theta, after, info = problem.step()
    assert identical(theta, problem.theta)
    assert (info.cg_stop, info.gradient_norm, info.accepted) == (CGStop.ZERO_RESIDUAL, 0.0, False)
    assert after.damping == START.damping


@pytest.mark.parametrize("delta", [None, torch.ones(N, dtype=torch.float64)])
def test_a_batch_without_a_gradient_leaves_the_damping(delta):
    """All rows masked, say: f is 0 wherever θ goes. Fails if ρ of such a batch is a failure: every third batch like that
    makes λ grow without bound."""
    problem = Quadratic()
    problem.expand = lambda: (0.0, torch.zeros(N, dtype=torch.float64))
    problem.f = lambda theta: 0.0
    _, after, info = problem.step(replace(START, damping=0.5, delta=delta))
    assert math.isnan(info.reduction_ratio)
    assert after.damping == 0.5


def test_an_update_beyond_the_largest_number_is_not_accepted():
    problem = Quadratic()
    problem.theta = torch.full((N,), 1e38, dtype=torch.float32)
    problem.expand = lambda: (1.0, torch.full((N,), -1e30))
    problem._curvature = torch.eye(N) * 1e-9
    problem.f = lambda theta: 0.5
    theta, _, info = problem.step()
    assert not info.accepted
    assert identical(theta, problem.theta)


class Saturated(Problem):
    """An objective that is finite whatever θ is (it saturates), at a θ whose first entry is the largest number."""

    theta = torch.tensor([torch.finfo(torch.float32).max, 1.0])

    def expand(self):
        return 1.0, torch.tensor([-1e4, 0.0])

    def curvature(self, damping):
        return lambda v: (1e-28 + damping) * v

    def value(self, theta):
        return -1e36


def test_a_last_iterate_that_is_not_finite_is_no_start_of_the_next_step():
    """δ = 10⁴⁰ in single precision. Fails if `shf_step` hands it on: every later step would start from infinity."""
    problem = Saturated()
    problem.expand = lambda: (1.0, torch.full((2,), -1e10))
    problem.curvature = lambda damping: lambda v: damping * v
    state = replace(START, damping=1e-30)
    _, after, info = problem.iterate(state, cg_iterations=1, damping_min=1e-30, damping=1e-30)
    assert info.cg_steps == 1
    assert after.delta is None


def test_a_step_beyond_the_largest_number_is_rejected_even_where_the_objective_is_finite():
    """Fails if θ is not looked at before it is accepted: its first entry would be infinite."""
    problem = Saturated()
    state = replace(START, damping=1e-28)
    theta, _, info = problem.iterate(state, cg_iterations=1, damping_min=1e-28, damping=1e-28)
    assert (info.accepted, info.step_size, info.cg_steps) == (False, 0.0, 1)
    assert info.loss_after == info.loss_before
    assert theta is None
