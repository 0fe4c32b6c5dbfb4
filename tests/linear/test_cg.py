"""Conjugate gradients against dense algebra."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import assert_close, identical
from shf.linear.cg import CGStop, conjugate_gradient, keep_all, keep_last
from shf.linear.stopping import geometric, relative_progress

sizes = st.integers(1, 8)
seeds = st.integers(0, 2**32 - 1)
NAN, INF = math.nan, math.inf


def system(size: int, seed: int, spread: float = 10.0):
    """A symmetric positive definite A with eigenvalues in [1, spread], b, and any other vector."""
    source = torch.Generator().manual_seed(seed)
    Q, _ = torch.linalg.qr(torch.randn(size, size, generator=source, dtype=torch.float64))
    values = torch.logspace(0, math.log10(spread), size, dtype=torch.float64)
    b, other = torch.randn(2, size, generator=source, dtype=torch.float64)
    A = Q @ torch.diag(values) @ Q.t()
    return (A + A.t()) / 2, b, other


def q(A, b, x):
    return 0.5 * x @ A @ x - b @ x


@given(sizes, seeds)
def test_solves_in_as_many_iterations_as_there_are_unknowns(size, seed):
    A, b, _ = system(size, seed)
    assert_close(conjugate_gradient(A.mv, b, iterations=size).last, torch.linalg.solve(A, b), 1e-8)


@given(sizes, seeds)
def test_the_solution_depends_on_neither_start_nor_preconditioner(size, seed):
    A, b, other = system(size, seed)
    P = 0.1 + other.square()
    found = conjugate_gradient(A.mv, b, iterations=size + 2, start=other, precondition=lambda r: r / P)
    assert_close(found.last, torch.linalg.solve(A, b), 1e-8)


@given(sizes, seeds, st.booleans())
def test_iterates_minimise_q_over_the_krylov_space(size, seed, preconditioned):
    A, b, x0 = system(size, seed)
    P = (0.1 + x0.square()) if preconditioned else torch.ones(size, dtype=torch.float64)
    found = conjugate_gradient(A.mv, b, iterations=min(size, 4), start=x0, precondition=lambda r: r / P)
    direction, basis = (b - A @ x0) / P, []
    for x in found.iterates:
        for _ in range(2):  # twice: orthogonal to rounding
            for v in basis:
                direction = direction - v * (v @ direction)
        basis.append(direction / direction.norm())
        K = torch.stack(basis, 1)
        best = x0 + K @ torch.linalg.solve(K.t() @ A @ K, K.t() @ (b - A @ x0))
        assert (x - best).norm() <= 1e-7 * (x0.norm() + best.norm())
        direction = (A @ basis[-1]) / P


@given(sizes, seeds, st.booleans())
def test_values_are_q_and_fall(size, seed, warm):
    A, b, other = system(size, seed)
    seen = []

    def watch(values):
        seen[:] = values
        return False

    start = other if warm else None
    found = conjugate_gradient(A.mv, b, iterations=size, start=start, stop=watch)
    assert_close(found.values, [q(A, b, x) for x in found.iterates], 1e-9)
    assert_close(seen, [q(A, b, other if warm else torch.zeros_like(b)), *found.values], 1e-9)
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(seen))


def test_the_exact_inverse_as_preconditioner_needs_one_iteration():
    A, b, _ = system(6, 1, spread=1e4)
    found = conjugate_gradient(A.mv, b, iterations=1, precondition=torch.linalg.inv(A).mv)
    assert_close(found.last, torch.linalg.solve(A, b), 1e-9)


def test_products_and_steps_are_counted():
    A, b, other = system(8, 0)
    calls = []

    def product(v):
        calls.append(v)
        return A @ v

    cold = conjugate_gradient(product, b, iterations=3)
    assert (cold.steps, cold.products, cold.stop, len(calls)) == (3, 3, CGStop.ITERATIONS, 3)
    warm = conjugate_gradient(product, b, iterations=3, start=other)
    assert (warm.steps, warm.products, warm.stop, len(calls)) == (3, 4, CGStop.ITERATIONS, 7)


def test_start_at_zero_is_the_default():
    A, b, _ = system(5, 0)
    default = conjugate_gradient(A.mv, b, iterations=3)
    explicit = conjugate_gradient(A.mv, b, iterations=3, start=torch.zeros_like(b))
    assert_close(torch.stack(list(default.iterates)), torch.stack(list(explicit.iterates)), 1e-14)


@pytest.mark.parametrize("warm", [False, True])
def test_the_solution_may_be_kept_in_a_given_vector_even_in_the_start(warm):
    A, b, other = system(5, 0)
    start = other.clone() if warm else None
    expected = conjugate_gradient(A.mv, b, iterations=3, start=start)
    out = start if start is not None else torch.full_like(b, torch.nan)
    found = conjugate_gradient(A.mv, b, iterations=3, start=start, out=out)
    assert found.last is out
    assert torch.equal(out, expected.last)


def test_arguments_are_untouched_and_iterates_are_apart():
    A, b, other = system(5, 0)
    before = [b.clone(), other.clone()]
    found = conjugate_gradient(A.mv, b, iterations=3, start=other)
    assert identical([b, other], before)
    assert len({x.data_ptr() for x in [*found.iterates, b, other]}) == 5


def test_a_visitor_sees_what_would_have_been_kept():
    A, b, other = system(6, 0)
    for keep in (keep_all, keep_last, geometric(1.5)):
        seen = []
        visited = conjugate_gradient(
            A.mv,
            b,
            iterations=5,
            start=other,
            keep=keep,
            visit=lambda n, x, q, seen=seen: seen.append((n, x.clone(), q)),
        )
        kept = conjugate_gradient(A.mv, b, iterations=5, start=other, keep=keep)
        assert not visited.iterates
        assert [n for n, _, _ in seen] == visited.numbers == kept.numbers
        assert [q for _, _, q in seen] == visited.values == kept.values
        assert identical([x for _, x, _ in seen], list(kept.iterates))


def test_a_product_may_hand_out_the_same_buffer_each_time():
    A, b, other = system(5, 0)
    out = torch.empty_like(b)
    reused = conjugate_gradient(lambda v: torch.mv(A, v, out=out), b, iterations=4, start=other)
    fresh = conjugate_gradient(A.mv, b, iterations=4, start=other)
    assert identical(list(reused.iterates), list(fresh.iterates))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_keeps_the_dtype(dtype):
    A, b, _ = system(4, 0)
    assert conjugate_gradient(A.to(dtype).mv, b.to(dtype), iterations=2).last.dtype == dtype


def test_no_gradient_graph_is_recorded():
    A, b, _ = system(4, 0)
    assert not conjugate_gradient(A.requires_grad_().mv, b, iterations=2).last.requires_grad


# --- early ends --------------------------------------------------------------------------------------------------------


def test_zero_right_hand_side_is_solved_at_once():
    found = conjugate_gradient(torch.eye(3).mv, torch.zeros(3), iterations=5)
    assert (found.steps, found.products, found.stop) == (0, 0, CGStop.ZERO_RESIDUAL)
    assert identical((list(found.iterates), found.last), ([], torch.zeros(3)))


def test_a_start_that_solves_is_returned():
    b = torch.tensor([1.0, 2.0, 4.0])
    found = conjugate_gradient(lambda v: 2 * v, b, iterations=5, start=b / 2)
    assert (found.steps, found.products, found.stop) == (0, 1, CGStop.ZERO_RESIDUAL)
    assert identical(found.last, b / 2)


def test_solved_on_the_way():
    found = conjugate_gradient(lambda v: 4 * v, torch.tensor([1.0, 2.0]), iterations=5)
    assert (found.steps, found.products, found.stop) == (1, 1, CGStop.ZERO_RESIDUAL)
    assert found.last.tolist() == [0.25, 0.5]


@pytest.mark.parametrize(
    ("diagonal", "steps"), [([-1.0, -1.0], 0), ([0.0, 0.0], 0), pytest.param([4.0, -1.0], 1, id="met later")]
)
def test_ends_before_a_direction_without_positive_curvature(diagonal, steps):
    A = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    found = conjugate_gradient(A.mv, torch.tensor([1.0, 0.5], dtype=torch.float64), iterations=5)
    assert (found.steps, found.stop) == (steps, CGStop.NON_POSITIVE_CURVATURE)
    assert len(found.iterates) == steps
    assert identical(found.last, found.iterates[-1] if steps else torch.zeros(2, dtype=torch.float64))


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_non_finite_product_ends_the_run_with_the_iterates_so_far(bad, warm, at):
    A, b, other = system(6, 0)
    calls = 0

    def product(v):
        nonlocal calls
        calls += 1
        return A @ v * (bad if calls == at else 1.0)

    found = conjugate_gradient(product, b, iterations=5, start=other if warm else None)
    steps = max(at - 1 - warm, 0)
    whole = conjugate_gradient(A.mv, b, iterations=5, start=other if warm else None)
    assert (found.steps, found.stop) == (steps, CGStop.NON_FINITE)
    assert identical(list(found.iterates), list(whole.iterates[:steps]))
    assert identical(found.last, whole.iterates[steps - 1] if steps else (other if warm else torch.zeros_like(b)))


def test_a_preconditioner_that_overflows_ends_the_run():
    A, b, _ = system(4, 0)
    found = conjugate_gradient(A.mv, b, iterations=3, precondition=lambda r: r * INF)
    assert (found.steps, found.stop, found.last.tolist()) == (0, CGStop.NON_FINITE, [0.0] * 4)


def test_scalars_beyond_the_largest_number_of_the_vectors_type_end_the_run():
    """α = 10³⁹, then β = 10⁴⁰, of single-precision vectors. Fails without either comparison with `largest` in
    `conjugate_gradient`: torch raises a RuntimeError from inside the step."""
    b = torch.full((2,), 1e10)
    found = conjugate_gradient(lambda v: v * 1e-20 * 1e-19, b, iterations=2)
    assert (found.steps, found.stop, found.last.tolist()) == (0, CGStop.NON_FINITE, [0.0, 0.0])
    scales = iter([1e-13, 1e28])
    curvature = torch.tensor([1e20, 2e20])
    found = conjugate_gradient(
        lambda v: v * curvature, torch.full((2,), 1e-9), iterations=3, precondition=lambda r: r * next(scales)
    )
    assert (found.steps, found.stop) == (1, CGStop.NON_FINITE)
    assert found.last.isfinite().all()


def test_an_inner_product_that_overflows_ends_the_run():
    """p and Ap are finite, p'Ap = 2·10⁴⁰ is not. Fails if p'Ap is not looked at: α = 0, and CG goes on where it is."""
    found = conjugate_gradient(torch.clone, torch.full((2,), 1e-5), iterations=3, precondition=lambda r: r * 1e25)
    assert (found.steps, found.stop, found.last.tolist()) == (0, CGStop.NON_FINITE, [0.0, 0.0])


def test_a_residual_that_overflows_ends_the_run_before_x_is_touched():
    """Of a preconditioner that overflows at its second use. Fails if r'y after an update is not looked at: x moves."""
    scales = iter([1.0, INF])
    A, b, _ = system(4, 0)
    found = conjugate_gradient(A.mv, b, iterations=3, precondition=lambda r: r * next(scales))
    assert (found.steps, found.stop, found.last.tolist()) == (0, CGStop.NON_FINITE, [0.0] * 4)


def test_an_iterate_beyond_the_largest_number_is_not_kept():
    found = conjugate_gradient(lambda v: v * 1e-30, torch.full((2,), 1e20), iterations=3)
    assert (found.steps, found.stop, found.last.tolist()) == (0, CGStop.NON_FINITE, [0.0, 0.0])


# --- which iterates are kept, and when to stop --------------------------------------------------------------------------


def test_geometric_spacing():
    keep = geometric(1.3)
    expected = sorted({math.ceil(1.3**i) for i in range(23)})
    assert expected[:14] == [1, 2, 3, 4, 5, 7, 9, 11, 14, 18, 24, 31, 40, 52]
    assert [j for j in range(1, expected[-1] + 1) if keep(j)] == expected


@given(base=st.floats(1.01, 4.0))
def test_geometric_spacing_of_any_base(base):
    expected = {math.ceil(base**i) for i in range(math.ceil(math.log(300) / math.log(base)) + 1)}
    keep = geometric(base)
    assert [j for j in range(1, 300) if keep(j)] == sorted(j for j in expected if j < 300)


def test_only_what_is_asked_for_is_kept_and_the_last_one():
    A, b, _ = system(8, 0)
    every = conjugate_gradient(A.mv, b, iterations=7)
    some = conjugate_gradient(A.mv, b, iterations=7, keep=lambda number: number in (2, 3))
    assert list(some.numbers) == [2, 3, 7]
    assert identical(list(some.iterates), [every.iterates[i - 1] for i in (2, 3, 7)])
    assert list(some.values) == [every.values[i - 1] for i in (2, 3, 7)]
    assert identical(some.last, every.last)


def test_stop_rule_ends_the_run():
    A, b, _ = system(8, 0)
    found = conjugate_gradient(A.mv, b, iterations=7, stop=lambda values: len(values) == 4, keep=lambda number: False)
    assert (found.steps, found.products, found.stop, list(found.numbers)) == (3, 3, CGStop.PROGRESS, [3])


@pytest.mark.parametrize(
    ("values", "stops"),
    [
        pytest.param([-1.0] * 11, False, id="ten iterations: ten back there is only the start"),
        pytest.param([0.0, *[-1.0] * 11], True, id="eleven without progress"),
        pytest.param([0.0, *[1.0] * 11], False, id="q is not negative yet"),
        pytest.param([0.0, -1.0 + 10.1 * 5e-4, *[-1.0] * 10], False, id="just enough progress over ten"),
        pytest.param([0.0, -1.0 + 9.9 * 5e-4, *[-1.0] * 10], True, id="just too little over ten"),
        pytest.param([0.0, *[-0.5] * 279, *[-1.0] * 31], False, id="at 310 it looks 31 back: progress"),
        pytest.param([0.0, *[-0.5] * 279, *[-1.0] * 32], True, id="at 311 it looks 31 back: none"),
    ],
)
def test_relative_progress(values, stops):
    assert relative_progress(5e-4)(values) == stops


def test_relative_progress_stops_long_before_the_limit():
    A, b, _ = system(120, 0, spread=1e3)
    found = conjugate_gradient(A.mv, b, iterations=250, stop=relative_progress(5e-4), keep=geometric(1.3))
    assert found.stop is CGStop.PROGRESS
    assert 10 < found.steps < 100
    k = max(10, found.steps // 10)
    back = conjugate_gradient(A.mv, b, iterations=found.steps - k)
    assert (found.values[-1] - back.values[-1]) / found.values[-1] < k * 5e-4


def test_long_runs_stay_where_they_have_converged():
    """A residual that goes on falling ends in numbers without digits, and α = r'y / p'Ap of such is anything."""
    for dtype, seeds in ((torch.float64, range(6)), (torch.float32, range(6))):
        for seed in seeds:
            source = torch.Generator().manual_seed(seed)
            R = torch.randn(8, 12, generator=source, dtype=dtype)
            A, b = R.T @ R + 0.3 * torch.eye(12, dtype=dtype), torch.randn(12, generator=source, dtype=dtype)
            found = conjugate_gradient(A.mv, b, iterations=4000, keep=lambda number: False)
            assert found.stop is CGStop.ZERO_RESIDUAL
            torch.testing.assert_close(A @ found.last, b, rtol=0, atol=1e3 * torch.finfo(dtype).eps)
