"""The equations of the physics benchmark: derivatives against autograd, and solutions that solve them."""

import json
import re
from pathlib import Path

import pytest
import torch

import field
import poisson
from equations import PROBLEMS, derivatives, mlp
from helpers import assert_close
from physics import PUBLISHED, against_published, against_rerun, charts
from shf.lab.pages import filled
from shf.lab.plots import draw

DOCS = Path(__file__).parents[2] / "docs"


def by_autograd(u, x, second):
    x = x.clone().requires_grad_()
    value = u(x)
    (slope,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    bends = [torch.autograd.grad(slope[:, i].sum(), x, retain_graph=True)[0][:, i : i + 1] for i in range(x.shape[1])]
    return value.detach(), slope.detach(), sum(c * b for c, b in zip(second, bends, strict=True))


def test_derivatives_are_carried_through_the_layers():
    torch.manual_seed(0)
    model, x, second = mlp(3, 7, 5, 1), torch.randn(11, 3, dtype=torch.float64), (0.5, 0.0, 2.0)
    for found, expected in zip(derivatives(model, x, second), by_autograd(model, x, second), strict=True):
        assert_close(found, expected, 1e-12)


@pytest.mark.parametrize("name", sorted(PROBLEMS.keys() - {"allen-cahn"}))
def test_the_solution_solves_the_equation(name):
    problem = PROBLEMS[name]
    x = problem.inside(50, torch.Generator().manual_seed(0))
    value, slope, bend = by_autograd(problem.solution, x, problem.second)
    size = slope.abs().max() + bend.abs().max()
    assert problem.residual(x, value, slope, bend).abs().max() < 1e-9 * size


def test_the_solution_of_allen_and_cahn_is_between_its_phases():
    problem = PROBLEMS["allen-cahn"]
    x, h = problem.inside(20, torch.Generator().manual_seed(0)) * 0.9, 1e-3
    x[:, 1] += 0.01
    value = problem.solution(x)

    def moved(i, by):
        shift = torch.zeros(2, dtype=torch.float64)
        shift[i] = by
        return problem.solution(x + shift)

    slope = torch.cat([(moved(i, h) - moved(i, -h)) / (2 * h) for i in (0, 1)], 1)
    bend = 0.001 * (moved(0, h) - 2 * value + moved(0, -h)) / h**2
    assert problem.residual(x, value, slope, bend).abs().max() < 1e-2 * slope[:, 1].abs().max()
    assert value.abs().max() <= 1


@pytest.mark.parametrize("name", sorted(PROBLEMS))
def test_the_solution_keeps_to_the_boundary(name):
    problem = PROBLEMS[name]
    x, values = problem.points(torch.Generator().manual_seed(1))["boundary"]
    assert values.isfinite().all()
    forward = problem.terms()["boundary"].forward
    assert (forward(problem.solution, x) - values).abs().max() < 1e-12


def test_the_page_shows_its_records():
    text, published = (
        (DOCS / "physics.md").read_text(encoding="utf-8"),
        json.loads(PUBLISHED.read_text(encoding="utf-8")),
    )
    assert filled(text, {"published": against_published(published), "rerun": against_rerun()}) == text
    for chart in charts(published):
        assert (DOCS / "figures" / f"{chart.name}.svg").read_text(encoding="utf-8") == draw(chart, standalone=True)


def test_the_page_shows_the_records_of_the_picture():
    text = (DOCS / "physics.md").read_text(encoding="utf-8")
    assert filled(text, {"field": field.summary()}) == text


def test_the_picture_is_seen_in_every_second_pixel():
    (seen, grey), (unseen, _) = field.pixels()
    assert len(seen) == len(unseen) == 4096
    assert grey.min() >= 0
    assert grey.max() <= 1
    assert not set(map(tuple, seen.tolist())) & set(map(tuple, unseen.tolist()))


def test_the_first_lines_of_the_page_solve_their_equation():
    (block,) = re.findall(r"```python\n(.*?)```", (DOCS / "physics.md").read_text(encoding="utf-8"), re.DOTALL)
    torch.manual_seed(0)
    names = {"__name__": "example"}
    exec(compile(block, "docs/physics.md", "exec"), names)
    x = torch.rand(500, 2, dtype=torch.float64)
    assert poisson.error(names["u"], x).abs().max() < 1e-3
