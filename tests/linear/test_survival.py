"""One CG iteration while the next batches do not bear out what steps gain on their own."""

import io

import pytest
import torch
from torch import nn

import shf
from helpers import identical, labelled, mlp, theta
from shf.linear import Survival

CE = nn.CrossEntropyLoss()


def told(survival, steps, noise=0.0):
    """The numbers after each of some steps: the share that was made, f, and its fall on the step's own batch."""
    numbers, found = {}, []
    for step in steps:
        numbers = survival.after(numbers, *step, noise)
        found.append(numbers)
    return found


def test_it_is_what_is_left_of_the_gains():
    """By hand: of half a step three quarters of the fall are gained."""
    steps = [(1.0, 10.0, 4.0), (0.5, 7.0, 4.0), (1.0, 6.5, 1.0), (1.0, 6.6, 1.0)]
    falls = 0.95**2 * (10.0 - 7.0) + 0.95 * (7.0 - 6.5) + (6.5 - 6.6)
    gains = 0.95**2 * 4.0 + 0.95 * 3.0 + 1.0
    for least, lost in ((0.999 * falls / gains, False), (1.001 * falls / gains, True)):
        survival = Survival(least=least)
        last = told(survival, steps)[-1]
        assert last["survival_lost"] is lost
        assert survival.limit(7, last) == (1 if lost else 7)


@pytest.mark.parametrize(("noise", "lost"), [(0.0, True), (1e-3, False)])
def test_a_difference_within_rounding_says_nothing(noise, lost):
    assert told(Survival(least=0.5), [(1.0, 1.0, 1e-4), (1.0, 1.0, 0.0)], noise)[-1]["survival_lost"] is lost


def test_a_first_step_says_nothing():
    assert not told(Survival(least=0.9), [(1.0, 3.0, 1.0)])[0]["survival_lost"]


def steps(batches, count=30, *, loss=CE, **options):
    """The optimizer after so many steps on batches by number, and what happened."""
    torch.manual_seed(0)
    optimizer = shf.SHF(
        mlp(), loss, **{"cg_iterations": 4, "preconditioner": None, "damping": 0.1, "seed": 1, **options}
    )
    return optimizer, [optimizer.step(*batches(k)) for k in range(count)]


def new_labels(k):
    """The same inputs with other labels in each step: nothing to learn from them."""
    inputs, targets = labelled(seed=0)
    return inputs, targets[torch.randperm(len(targets), generator=torch.Generator().manual_seed(k))]


def test_where_there_is_nothing_to_learn_one_iteration_must_do():
    _, infos = steps(new_labels, cg_survival=0.2)
    assert [info.cg_steps for info in infos[-10:]] == [1] * 10
    assert infos[1].cg_steps == 4


def test_where_batches_agree_nothing_changes():
    ends = [theta(steps(lambda _: labelled(), cg_survival=bound)[0].model) for bound in (None, 0.9)]
    assert identical(*ends)


def test_a_sum_over_batches_that_grow_is_judged_as_their_mean():
    """Fails if f itself is compared: a larger batch of the same rows would look as though all were lost."""

    def growing(k):
        return tuple(part.repeat(2 ** (k // 10), *(1,) * (part.ndim - 1)) for part in labelled())

    _, infos = steps(growing, loss=nn.CrossEntropyLoss(reduction="sum"), damping="auto", cg_survival=0.5)
    assert {info.cg_steps for info in infos} == {4}


def test_steps_that_are_made_in_part_have_gained_in_part():
    """Fails if β is left out: a fifth of the fall, at most, is found again on the same batch."""
    optimizer, _ = steps(lambda _: labelled(), 1, cg_survival=0.4)
    optimizer.param_groups[0]["shf"]["update_scale"] = 0.1
    assert {optimizer.step(*labelled()).cg_steps for _ in range(40)} == {4}


def test_it_is_saved_and_loaded():
    first, _ = steps(new_labels, cg_survival=0.2)
    file = io.BytesIO()
    torch.save({"model": first.model.state_dict(), "optimizer": first.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second = shf.SHF(mlp(), CE, cg_iterations=4, preconditioner=None, seed=1, cg_survival=0.2)
    second.model.load_state_dict(saved["model"])
    with pytest.warns(shf.SHFWarning, match="other options"):  # of λ, which is in the state
        second.load_state_dict(saved["optimizer"])
    for k in range(30, 34):
        assert first.step(*new_labels(k)) == second.step(*new_labels(k))
    assert identical(theta(second.model), theta(first.model))
