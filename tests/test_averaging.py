"""The running average of the iterates: what it is, and that the parameters come back whatever happens."""

import copy

import pytest
import torch
from torch import nn

import shf
from helpers import assert_close, identical, labelled, mlp, snapshot, theta

CE = nn.CrossEntropyLoss()


def trained(steps=5, **options):
    torch.manual_seed(0)
    optimizer = shf.SHF(mlp(), CE, **{"averaging": 0.7, "seed": 1, **options})
    iterates = []
    for k in range(steps):
        optimizer.step(*labelled(seed=k))
        iterates.append(theta(optimizer.model))
    return optimizer, iterates


def test_it_is_the_weighted_mean_of_the_iterates():
    optimizer, iterates = trained(25)
    expected = iterates[0]
    for k, iterate in enumerate(iterates[1:], start=1):
        keep = min(0.7, (k + 1) / (k + 10))
        expected = keep * expected + (1 - keep) * iterate
    with optimizer.averaged():
        assert_close(theta(optimizer.model), expected)


def test_the_parameters_come_back_also_after_an_error():
    optimizer, iterates = trained()
    before = snapshot(optimizer)
    with optimizer.averaged():
        assert not torch.equal(theta(optimizer.model), iterates[-1])
    assert identical(snapshot(optimizer), before)
    with pytest.raises(KeyError), optimizer.averaged():
        raise KeyError
    assert identical(snapshot(optimizer), before)


def test_a_step_on_the_average_is_refused():
    """Fails if the step is made: leaving the block would undo it, and δ and λ would belong to a step that did not happen."""
    optimizer, _ = trained()
    with optimizer.averaged():
        with optimizer.averaged():
            pass
        with pytest.raises(RuntimeError, match="step outside"):
            optimizer.step(*labelled())
    assert optimizer.step(*labelled()).accepted


def test_eval_and_train_are_averaged_without_a_block():
    """A step waits for `train`; the states of model and optimizer, saved meanwhile, belong together."""
    optimizer, iterates = trained()
    with optimizer.averaged():
        average = theta(optimizer.model)
    for _ in range(2):
        optimizer.eval()
        assert torch.equal(theta(optimizer.model), average)
        with optimizer.averaged():
            assert torch.equal(theta(optimizer.model), average)
    with pytest.raises(RuntimeError, match=r"call optimizer\.train\(\) first"):
        optimizer.step(*labelled())
    other = shf.SHF(mlp(), CE, averaging=0.7)
    other.model.load_state_dict(optimizer.model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each in (optimizer, other):
        each.train()
        each.train()
        assert torch.equal(theta(each.model), iterates[-1])
    a, b = optimizer.step(*labelled()), other.step(*labelled())
    assert a == b
    assert torch.equal(theta(optimizer.model), theta(other.model))


def test_without_averages_eval_and_train_do_nothing():
    optimizer, iterates = trained(averaging=0.0)
    optimizer.eval()
    assert torch.equal(theta(optimizer.model), iterates[-1])
    assert optimizer.step(*labelled()).accepted


def test_training_is_the_same_with_and_without():
    assert torch.equal(trained()[1][-1], trained(averaging=0.0)[1][-1])


def test_before_the_first_step_the_average_is_the_parameters():
    optimizer = shf.SHF(mlp(), CE, averaging=0.9)
    start = theta(optimizer.model)
    with optimizer.averaged():
        assert torch.equal(theta(optimizer.model), start)


def test_where_none_is_kept_it_says_so():
    optimizer, _ = trained(1, averaging=0.0)
    with pytest.raises(RuntimeError, match="averaging=0"), optimizer.averaged():
        pass


def test_parameters_that_join_later_have_an_average_from_then_on():
    model = mlp()
    model[0].weight.requires_grad_(False)
    optimizer = shf.SHF(model, CE, averaging=0.9)
    optimizer.step(*labelled())
    model[0].weight.requires_grad_(True)
    optimizer.step(*labelled())
    with optimizer.averaged():
        inside = model[0].weight.detach().clone()
    assert torch.equal(inside, model[0].weight)


def test_a_frozen_parameter_shows_itself_not_an_old_average():
    optimizer, _ = trained(10)
    first = optimizer.model[0]
    for p in first.parameters():
        p.requires_grad_(False)
    optimizer.step(*labelled(seed=20))
    with torch.no_grad():
        first.weight.fill_(7.0)
    with optimizer.averaged():
        assert bool((first.weight == 7.0).all())
    first.weight.requires_grad_(True)
    optimizer.step(*labelled(seed=21))
    with optimizer.averaged():  # its average begins anew, where it is trained again
        assert 6.0 < first.weight.mean().item() < 8.0


def test_a_copy_made_inside_has_the_average_and_can_be_trained():
    optimizer, _ = trained()
    with optimizer.averaged():
        copied, average = copy.deepcopy(optimizer), theta(optimizer.model)
    assert torch.equal(theta(copied.model), average)
    assert copied.step(*labelled()).accepted


def test_the_batch_method_averages_too():
    model = mlp()
    optimizer = shf.HF(model, CE, averaging=0.5, seed=1)
    for _ in range(3):
        optimizer.step([labelled()], curvature=labelled())
    last = theta(model)
    with optimizer.averaged():
        assert not torch.equal(theta(model), last)
    assert torch.equal(theta(model), last)


def noisy(count, seed, noise):
    """A line with so much noise on it that each batch asks for another one."""
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=source, dtype=torch.float64)
    return x, x.sum(1, keepdim=True) + noise * torch.randn(count, 1, generator=source, dtype=torch.float64)


def of_lines(noise, steps, **options):
    """Newton steps, each to the minimum of its own sixteen rows; how an average that nobody looks at serves beside it."""
    torch.manual_seed(0)
    model = nn.Linear(6, 1, dtype=torch.float64)
    with torch.no_grad():
        model.weight.fill_(30.0)
    settings = {"solver": "dense", "damping": 0.05 if noise else 10.0, "damping_factor": 1.0, "cg_decay": 0.0}
    optimizer = shf.SHF(model, nn.MSELoss(), seed=0, **{**settings, **options})
    infos = [optimizer.step(*noisy(16, k, noise)) for k in range(steps)]
    iterate = theta(model)
    with optimizer.averaged():
        served = theta(model)
    return optimizer, infos, iterate, served


def test_an_average_stands_in_while_new_batches_are_better_fitted_by_it():
    """Of noisy batches the average serves; on the way to a line without noise it lags behind, and the iterate does."""
    steps = 10  # one look, before anything of it has come into a step
    optimizer, infos, iterate, served = of_lines(3.0, 60, averaging="auto")
    _, plain, *_ = of_lines(3.0, steps, averaging=0.999)
    assert [info.loss_after for info in infos[:steps]] == [info.loss_after for info in plain]
    assert [a.evaluations - b.evaluations for a, b in zip(infos, plain, strict=False)] == [0] * 9 + [1]
    rows, targets = noisy(5000, 99, 0.0)
    fits = [nn.functional.mse_loss(rows @ v[:-1] + v[-1], targets[:, 0]) for v in (served, iterate)]
    assert fits[0] < 0.5 * fits[1]

    optimizer, _, iterate, served = of_lines(0.0, 20, averaging="auto")
    assert torch.equal(served, iterate)
    optimizer.eval()
    assert torch.equal(theta(optimizer.model), iterate)
    optimizer.step(*noisy(16, 20, 0.0))


def test_steps_that_go_farther_than_their_batches_know_become_shorter():
    """Fails without the share: each step goes all the way to what its own batch asks for, and the next goes elsewhere."""
    optimizer, _, iterate, _ = of_lines(3.0, 100, averaging="auto")
    _, _, unheld, _ = of_lines(3.0, 100, averaging=0.999)
    share = optimizer.param_groups[0]["shf"]["step_share"]
    assert 0.05 <= share < 0.8
    twin = copy.deepcopy(optimizer)
    twin.param_groups[0]["shf"]["step_share"] = 1.0
    for each in (optimizer, twin):
        each.step(*noisy(16, 100, 3.0))
    assert_close(theta(optimizer.model) - iterate, share * (theta(twin.model) - iterate))
    rows, targets = noisy(5000, 99, 0.0)
    held, free = (nn.functional.mse_loss(rows @ v[:-1] + v[-1], targets[:, 0]) for v in (iterate, unheld))
    assert held < 0.5 * free
    optimizer, *_ = of_lines(0.0, 30, averaging="auto")
    assert optimizer.param_groups[0]["shf"]["step_share"] == 1.0


def test_what_the_average_gained_is_part_of_the_state():
    optimizer, *_ = of_lines(3.0, 25, averaging="auto")
    other = shf.SHF(copy.deepcopy(optimizer.model), nn.MSELoss(), **optimizer.config.values)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for k in range(25, 32):
        assert optimizer.step(*noisy(16, k, 3.0)) == other.step(*noisy(16, k, 3.0))
    assert identical(snapshot(optimizer), snapshot(other))
    gains = optimizer.param_groups[0]["shf"]["average_gain"]
    assert 0 < gains < 1
