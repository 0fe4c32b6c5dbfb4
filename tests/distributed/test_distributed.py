"""SHF on several processes: the single process's trajectory, the same bits on every rank, and an end when one fails."""

import copy
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shf
import worlds
from helpers import identical, mlp, snapshot, theta

ROWS = 40
ITERATIONS = 50
SEED = 5
TOLERANCE = 1e-10
CE = nn.CrossEntropyLoss()


def network(dtype=torch.float64):
    """Dropout on the inputs and on the last hidden layer, as in the paper."""
    torch.manual_seed(0)
    layers = [nn.Dropout(0.2), nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 4)]
    return nn.Sequential(*layers).to(dtype)


def batch(number=0, dtype=torch.float64):
    source = torch.Generator().manual_seed(number)
    inputs = torch.randn(ROWS, 6, generator=source, dtype=torch.float64)
    return inputs.to(dtype), torch.randint(4, (ROWS,), generator=source)


def share(data, sizes, rank):
    """The rows of one rank; everything where there are no ranks."""
    return data if sizes is None else tuple(part.split(sizes)[rank] for part in data)


def optimizer_of(model, **options):
    settings = {"curvature_batch": 12, "weight_decay": 1e-2, "seed": SEED, **options}
    return shf.SHF(model, settings.pop("loss", CE), **settings)


def train(rank, sizes, options, iterations=ITERATIONS, dtype=torch.float64):
    """θ and the decisions of a run over two batches per epoch."""
    model = network(dtype)
    optimizer = optimizer_of(model, **options)
    infos = []
    for k in range(iterations):
        if k and k % 2 == 0:
            optimizer.next_epoch()
        infos.append(optimizer.step(*share(batch(k % 2, dtype), sizes, rank)))
    return theta(model), infos


def train_all(rank, runs):
    return [train(rank, *run) for run in runs]


def assert_same_run(found, expected, tolerance=TOLERANCE):
    assert (found[0] - expected[0]).abs().max().item() <= tolerance
    for info, other in zip(found[1], expected[1], strict=True):
        assert (info.cg_steps, info.cg_stop, info.products) == (other.cg_steps, other.cg_stop, other.products)
        assert info.loss_before == pytest.approx(other.loss_before, rel=tolerance, abs=tolerance)
        assert info.damping == pytest.approx(other.damping, rel=tolerance)
        assert info.step_size == other.step_size
        assert info.gradient_noise == (other.gradient_noise and pytest.approx(other.gradient_noise, rel=1e-6))


def assert_ranks_agree(found):
    """Bitwise the same parameters and decisions on every rank."""
    for other in found[1:]:
        assert identical(other[0], found[0][0])
        assert other[1] == found[0][1]


# --- the same trajectory ------------------------------------------------------------------------------------------------

OPTIONS = {
    "block of curvature rows": {},
    "strided curvature rows": {"curvature_rows": "strided"},
    "all rows are curvature rows": {"curvature_batch": None},
    "curvature rows on one rank": {"curvature_batch": 5},
    "no preconditioner": {"preconditioner": None},
    "jacobi": {"preconditioner": "jacobi"},
    "held-out, auto, noise, worth, averaging": {
        "damping": "auto",
        "damping_rule": "held-out",
        "damping_factor": 0.9,
        "damping_rise": 2.0,
        "noise_every": 1,
        "cg_noise": 0.5,
        "cg_survival": 0.9,
        "cg_worth": True,
        "averaging": 0.9,
    },
    "kronecker": {"preconditioner": "kronecker", "factor_every": 2},
    "exact momentum": {"delta_momentum": "exact", "preconditioner": "kronecker", "factor_every": 2},
    "vectors split, exact momentum": {"delta_momentum": "exact", "split_vectors": True, "curvature_batch": 5},
    "microbatch": {"microbatch": 7},
    "first worse, max norm, decaying updates": {"backtracking": "first-worse", "max_norm": 0.3, "update_decay": 0.95},
    "sum": {"loss": nn.CrossEntropyLoss(reduction="sum"), "damping": 40.0, "weight_decay": 0.4},
    "vectors split": {"split_vectors": True},
    "vectors split, jacobi, sum": {
        "split_vectors": True,
        "preconditioner": "jacobi",
        "loss": nn.CrossEntropyLoss(reduction="sum"),
        "damping": 40.0,
        "weight_decay": 4.0,
    },
    "vectors split, kronecker, sum": {
        "split_vectors": True,
        "preconditioner": "kronecker",
        "loss": nn.CrossEntropyLoss(reduction="sum"),
        "damping": 40.0,
        "weight_decay": 4.0,
    },
    "vectors split, no preconditioner, max norm": {"split_vectors": True, "preconditioner": None, "max_norm": 0.3},
    "vectors split, an average that listens": {"split_vectors": True, "averaging": "auto"},
    "per case": {"loss": shf.losses.per_case(nn.CrossEntropyLoss())},
}


def check_trajectories(sizes, names, iterations):
    runs = [(sizes, OPTIONS[name], iterations) for name in names]
    found = worlds.run(len(sizes), train_all, runs, seconds=600)
    for run, results in zip(runs, zip(*found, strict=True), strict=True):
        assert_ranks_agree(results)
        assert_same_run(results[0], train(None, None, *run[1:]))


def test_two_ranks_follow_the_single_process():
    check_trajectories([25, 15], ["block of curvature rows", "vectors split, an average that listens"], ITERATIONS)


def test_two_ranks_follow_with_any_option():
    check_trajectories([25, 15], OPTIONS, 8)


@pytest.mark.parametrize("sizes", [[40, 0], [0, 40], [39, 1]], ids=str)
def test_a_rank_may_hold_no_rows_or_one(sizes):
    noise = "held-out, auto, noise, worth, averaging"
    check_trajectories(sizes, ["block of curvature rows", "jacobi", "kronecker", "sum", "vectors split", noise], 5)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[40], [20, 20], [13, 20, 7], [0, 31, 9], [11, 3, 16, 10], [0, 0, 40, 0]], ids=str)
def test_any_number_of_ranks_follows_the_single_process(sizes):
    check_trajectories(sizes, OPTIONS, ITERATIONS)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_float32_stays_near(ranks):
    sizes = [ROWS - 5 * (ranks - 1)] + [5] * (ranks - 1)
    found = worlds.run(ranks, train, sizes, {}, ITERATIONS, torch.float32)
    assert_ranks_agree(found)
    expected = train(None, None, {}, ITERATIONS, torch.float32)
    assert (found[0][0] - expected[0]).abs().max().item() <= 1e-4


def test_the_trajectories_compared_move_and_differ():
    """What the comparisons above rest on: the runs go somewhere, and not all to the same place."""
    ends = [train(None, None, options, 6)[0] for options in OPTIONS.values()]
    start = theta(network())
    assert all((end - start).abs().max() > 1e-2 for end in ends)
    apart = [bool((a - b).abs().max() > 1e-4) for i, a in enumerate(ends) for b in ends[:i]]
    # block, microbatch, per case, split, the scaled sum and an average that has not listened yet are the same method
    assert apart.count(False) == 15


def hf_run(rank, sizes, **options):
    """Batches in rank order: with ranks each has its own list of batches."""
    model = network()
    optimizer = shf.HF(model, CE, weight_decay=1e-2, seed=SEED, cg_iterations=12, **options)
    batches = [batch(0), batch(1), batch(2)]
    own = batches if sizes is None else [batches[:1], batches[1:]][rank]
    infos = [optimizer.step(own, share(batch(3), sizes, rank)) for _ in range(8)]
    return theta(model), infos


def hf_run_split(rank, sizes):
    return hf_run(rank, sizes, split_vectors=True)


@pytest.mark.parametrize("sizes", [[25, 15], [0, 40]], ids=str)
@pytest.mark.parametrize("run", [hf_run, hf_run_split])
def test_the_batch_method_follows_too(run, sizes):
    found = worlds.run(2, run, sizes)
    assert_ranks_agree(found)
    assert_same_run(found[0], hf_run(None, None))


def tiny(rank, sizes):
    """Two parameters: fewer than ranks."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1).double()
    optimizer = shf.SHF(model, nn.MSELoss(), split_vectors=True, weight_decay=0.1, cg_iterations=2)
    inputs = torch.linspace(-1, 1, ROWS, dtype=torch.float64).view(-1, 1)
    infos = [optimizer.step(*share((inputs, inputs.exp()), sizes, rank)) for _ in range(5)]
    return theta(model), infos


def test_vectors_may_be_split_over_more_ranks_than_they_have_entries():
    found = worlds.run(3, tiny, [10, 25, 5])
    assert_ranks_agree(found)
    assert_same_run(found[0], tiny(None, None))


# --- state --------------------------------------------------------------------------------------------------------------


def continued(rank, sizes, saved, iterations, options):
    model = network()
    optimizer = optimizer_of(model, seed=rank, **options)  # the loaded state brings its own
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    for _ in range(iterations):
        optimizer.step(*share(batch(), sizes, rank))
    return theta(model), {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


@pytest.mark.parametrize("options", [{}, {"split_vectors": True}], ids=["whole", "split"])
def test_a_run_continues_with_another_number_of_ranks(options):
    _, saved = worlds.run(2, continued, [25, 15], None, 4, options)[1]
    (onward, _), *_ = worlds.run(3, continued, [10, 10, 20], copy.deepcopy(saved), 4, options)
    alone, _ = continued(None, None, copy.deepcopy(saved), 4, {})
    straight, _ = continued(0, None, None, 8, {})
    assert (onward - alone).abs().max() <= TOLERANCE
    assert (straight - alone).abs().max() <= TOLERANCE


def left(rank):
    """The group ends while δ is still split among its ranks: what is said, and whether anything has changed."""
    optimizer = optimizer_of(network(), split_vectors=True)
    optimizer.step(*share(batch(), [25, 15], rank))
    torch.distributed.destroy_process_group()
    before, said = theta(optimizer.model), []
    for action in (optimizer.state_dict, lambda: optimizer.step(*batch())):
        with pytest.raises(RuntimeError) as refusal:
            action()
        said.append(str(refusal.value))
    return said, identical(theta(optimizer.model), before)


def test_split_vectors_cannot_be_had_after_the_group_has_ended():
    for said, unchanged in worlds.run(2, left):
        assert all("call state_dict() on all of them before it ends" in text for text in said)
        assert (len(said), unchanged) == (2, True)


def thawed(rank, sizes, options):
    """A layer joins after two steps, a state is taken after four."""
    model = network()
    optimizer = optimizer_of(model, **options)
    model[1].requires_grad_(False)
    for k in range(6):
        model[1].requires_grad_(k >= 2)
        optimizer.step(*share(batch(), sizes, rank))
        if k == 3:
            taken = copy.deepcopy(optimizer.state_dict()["state"])
    return theta(model), taken


@pytest.mark.parametrize("options", [{}, {"split_vectors": True}], ids=["whole", "split"])
def test_parameters_may_join_between_steps(options):
    found = worlds.run(2, thawed, [25, 15], options)
    expected = thawed(None, None, {})
    for end, state in found:
        assert (end - expected[0]).abs().max() <= TOLERANCE
        assert state.keys() == expected[1].keys()
        assert all((state[k]["delta"] - expected[1][k]["delta"]).abs().max() <= TOLERANCE for k in state)


def with_own_seed(rank, sizes):
    model = network()
    optimizer = optimizer_of(model, seed=SEED + rank)
    for _ in range(3):
        optimizer.step(*share(batch(), sizes, rank))
    return theta(model), optimizer.state_dict()["param_groups"][0]["shf"]["seed"]


def with_own_seed_after_a_fault(rank, sizes):
    """The first batch is refused on rank 1, before the ranks have agreed on a seed."""
    model = network()
    optimizer = optimizer_of(model, seed=SEED + rank)
    inputs, targets = share(batch(), sizes, rank)
    with pytest.raises(ValueError if rank == 1 else shf.RankError, match="targets have"):
        optimizer.step(inputs, targets[1:] if rank == 1 else targets)
    return optimizer.step(inputs, targets).accepted, optimizer.state_dict()["param_groups"][0]["shf"]["seed"]


def test_a_first_batch_that_is_refused_does_not_keep_ranks_from_agreeing_on_a_seed():
    assert worlds.run(2, with_own_seed_after_a_fault, [25, 15]) == [(True, SEED)] * 2


def test_the_seed_of_rank_0_is_everyones():
    found = worlds.run(2, with_own_seed, [25, 15])
    assert [seed for _, seed in found] == [SEED, SEED]
    assert (found[0][0] - with_own_seed(0, None)[0]).abs().max() <= TOLERANCE


class Normalised(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 4))


class StatesFirst(nn.Module):
    """Returns hidden states, with time in front, before what the loss looks at."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(5, 7).double(), nn.Linear(7, 4).double()

    def forward(self, x):
        states = self.inner(torch.stack([x[:, :5], x[:, 1:]])).tanh()
        return states, self.out(states.sum(0))


def rooted(rank, sizes, preconditioner):
    torch.manual_seed(0)
    model = StatesFirst()
    optimizer = shf.SHF(
        model, lambda outputs, targets: CE(outputs[1], targets), seed=SEED, preconditioner=preconditioner
    )
    for _ in range(3):
        optimizer.step(*share(batch(), sizes, rank))
    return theta(model)


@pytest.mark.parametrize("preconditioner", ["jacobi", "kronecker"])
def test_roots_of_an_output_that_is_not_the_first_follow_the_single_process(preconditioner):
    expected = rooted(0, None, preconditioner)
    for found in worlds.run(2, rooted, [25, 15], preconditioner):
        assert (found - expected).abs().max() <= TOLERANCE


def one_normalised_step(rank, sizes):
    torch.manual_seed(0)
    model = Normalised().double()
    optimizer = shf.SHF(model, CE, seed=SEED)
    info = optimizer.step(*share(batch(), sizes, rank))
    return theta(model), [info], {name: b.clone() for name, b in model.named_buffers()}


def test_batch_normalisation_uses_each_ranks_own_statistics():
    """As in DistributedDataParallel: every rank normalises by its own rows, and rank 0's running statistics are kept."""
    sizes = [25, 15]
    found = worlds.run(2, one_normalised_step, sizes)
    assert_ranks_agree(found)
    torch.manual_seed(0)
    model, losses = Normalised().double(), []
    for rank in (1, 0):
        inputs, targets = share(batch(), sizes, rank)
        trained = copy.deepcopy(model)
        losses.append(sizes[rank] / ROWS * CE(trained(inputs), targets).item())
    assert found[0][1][0].loss_before == pytest.approx(sum(losses), rel=1e-12)
    assert found[0][1][0].loss_before != pytest.approx(one_normalised_step(None, None)[1][0].loss_before, rel=1e-6)
    expected = {name: b.clone() for name, b in trained.named_buffers()}
    for _, _, buffers in found:
        assert all(torch.allclose(buffers[name], expected[name], rtol=1e-12, atol=0) for name in expected)


class Combined(Normalised):
    """Features are combined by a sparse matrix, a buffer beside those of BatchNorm."""

    def __init__(self):
        super().__init__()
        self.register_buffer("combination", torch.eye(6, dtype=torch.float64).roll(1, 0).to_sparse())

    def forward(self, inputs):
        return super().forward(torch.sparse.mm(self.combination, inputs.T).T)


def one_combined_step(rank, sizes):
    torch.manual_seed(0)
    model = Combined().double()
    info = shf.SHF(model, CE, seed=SEED).step(*share(batch(), sizes, rank))
    return theta(model), [info], model[1].running_mean.clone()


def test_sparse_buffers_are_each_ranks_own():
    found = worlds.run(2, one_combined_step, [25, 15])
    assert_ranks_agree(found)
    assert torch.equal(found[0][2], found[1][2])
    assert found[0][2].any()


# --- what is sent -------------------------------------------------------------------------------------------------------


def counted(rank, options):
    """(messages, bytes) of the second step, and its info; the first also compares seeds and parameters."""
    optimizer = optimizer_of(network(options.pop("dtype")), **options)
    data = share(batch(dtype=optimizer.param_groups[0]["params"][0].dtype), [25, 15], rank)
    optimizer.step(*data)
    traffic = optimizer._connection.ranks().traffic
    before = (traffic.messages, traffic.bytes)
    info = optimizer.step(*data)
    return traffic.messages - before[0], traffic.bytes - before[1], info


@pytest.mark.parametrize(
    ("options", "width"),
    [
        ({"dtype": torch.float64}, 8),
        ({"dtype": torch.float32}, 4),
        ({"dtype": torch.float32, "message_dtype": "bfloat16"}, 2),
    ],
)
def test_one_message_per_product_and_per_evaluation(options, width):
    n = theta(network()).numel()
    for messages, size, info in worlds.run(2, counted, options):
        vectors = 2 + info.products - 1  # the gradient, the preconditioner and the products; the last is but p'Ap
        assert messages == 1 + 1 + 1 + vectors + info.evaluations  # the agreement and the objective come first
        numbers = 6 * 8 + 2 * 8 * (2 + info.evaluations)  # flag, two fingerprints, three counts; values with their flag
        assert size == vectors * (n + 1) * width + numbers


def test_split_vectors_are_scattered_and_gathered():
    n, width = theta(network()).numel(), 8
    for messages, size, info in worlds.run(2, counted, {"dtype": torch.float64, "split_vectors": True}):
        # CG's (the last p'Ap a sum over rows); in one message each three at its start, |∇f|², two at δ, two that are finite
        dots, asked = 2 * info.cg_steps - 1 + 3 + 1 + 2 + 2, 2 * info.cg_steps - 1 + 4
        scattered, gathered = 1 + info.products, info.products + info.evaluations + 1  # the last one is the new θ
        assert messages == 1 + 1 + scattered + gathered + info.evaluations + asked
        part = -(-n // 2)
        numbers = 6 * 8 + 2 * 8 * (1 + info.evaluations) + 8 * (dots + asked)
        assert size == (scattered * 2 * (part + 1) + gathered * part) * width + numbers


def test_bfloat16_messages_keep_ranks_together():
    found = worlds.run(2, train, [25, 15], {"message_dtype": "bfloat16"}, 20, torch.float32)
    assert_ranks_agree(found)
    exact, rounded = train(None, None, {}, 20, torch.float32), found[0]
    assert not torch.equal(exact[0], rounded[0])
    assert rounded[1][-1].loss_before == pytest.approx(exact[1][-1].loss_before, rel=0.05)


# --- which processes ----------------------------------------------------------------------------------------------------


def groups_of_choice(rank):
    alone = optimizer_of(network(), process_group=None)
    alone.step(*batch())
    pair = dist.new_group([0, 2])
    texts = [repr(alone), repr(optimizer_of(network()))]
    if rank != 1:
        model = network()
        optimizer = optimizer_of(model, process_group=pair)
        optimizer.step(*share(batch(), [25, 0, 15], rank))
        return theta(alone.model), theta(model), [*texts, repr(optimizer)]
    with pytest.raises(ValueError, match="not one of the group's ranks"):
        optimizer_of(network(), process_group=pair).step(*batch())
    return theta(alone.model), theta(alone.model), [*texts, ""]


def test_the_process_group_is_chosen_and_shown():
    model = network()
    optimizer = optimizer_of(model)
    assert repr(optimizer).endswith("; one process)")
    optimizer.step(*batch())
    for rank, (alone, paired, (first, second, third)) in enumerate(worlds.run(3, groups_of_choice)):
        assert torch.equal(alone, theta(model))
        assert (paired - theta(model)).abs().max() <= TOLERANCE
        assert first.endswith("; alone)")
        assert second.endswith(f"; rank {rank} of 3 on gloo)")
        assert rank == 1 or third.endswith(f"; rank {rank // 2} of 2 on gloo)")


@pytest.mark.parametrize("group", ["world", 3, object])
def test_another_process_group_is_refused(group):
    with pytest.raises(ValueError, match=r"expected a torch\.distributed process group, 'auto' or None"):
        shf.SHF(mlp(), CE, process_group=group)


def wrapped_and_copied(rank):
    model = network()
    optimizer = optimizer_of(nn.parallel.DistributedDataParallel(model))
    data = share(batch(), [25, 15], rank)
    optimizer.step(*data)
    twin = copy.deepcopy(optimizer)
    optimizer.step(*data)
    twin.step(*data)
    return theta(model), theta(twin.model)


def test_ddp_is_looked_through_and_a_deep_copy_joins_the_group():
    expected = train(None, None, {}, 1)[0]
    for first, second in worlds.run(2, wrapped_and_copied):
        assert identical(first, second)
        assert not torch.equal(first, expected)


def fully_sharded(rank):
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    fully_shard(model)
    shf.SHF(model, CE).step(*share(batch(dtype=torch.float32), [25, 15], rank))


def test_parameters_that_others_have_split_are_refused():
    for outcome in worlds.attempt(2, fully_sharded):
        assert outcome.error[0] == "TypeError"
        assert "0.weight is a DTensor" in outcome.error[1]


def test_synchronised_batch_normalisation_on_cpu_is_refused():
    model = nn.SyncBatchNorm.convert_sync_batchnorm(Normalised().double())
    with pytest.raises(TypeError, match=r"1 is a SyncBatchNorm in training mode.*GroupNorm"):
        shf.SHF(model, CE).step(*batch())
    shf.SHF(model.eval(), CE).step(*batch())


# --- ranks that are not alike -------------------------------------------------------------------------------------------


def unlike(rank, what):
    """Rank 1 differs in one thing; both report what the step raises, and whether anything has changed."""
    model, options = network(), {}
    if rank == 1:
        if what == "option":
            options = {"cg_iterations": 4}
        elif what == "decay":
            options = {"weight_decay": 2e-2}
        elif what == "loss":
            options = {"loss": nn.CrossEntropyLoss(reduction="sum")}
        elif what == "dtype":
            model = model.float()
        elif what == "shape":
            model[3], model[6] = nn.Linear(9, 7).double(), nn.Linear(7, 4).double()
        elif what == "frozen":
            model[1].bias.requires_grad_(False)
        elif what == "mode":
            model.eval()
        elif what == "value":
            with torch.no_grad():
                model[3].weight[2, 1] += 2e-16
    if what in ("input_factor", "average"):
        options = {"preconditioner": "kronecker", "averaging": 0.9}
    optimizer = optimizer_of(model, **options)
    if what == "epoch" and rank == 1:
        optimizer.next_epoch()
    if what in ("input_factor", "average"):
        alone = optimizer_of(model, process_group=None, **options)
        alone.step(*batch())
        optimizer.load_state_dict(alone.state_dict())
        if rank == 1:
            optimizer.state[model[1].weight][what][0, 0] += 0.25
    before = snapshot(optimizer)
    dtype = model[1].weight.dtype
    try:
        optimizer.step(*share(batch(dtype=dtype), [25, 15], rank))
    except shf.RankError as error:
        return str(error), error.ranks, identical(snapshot(optimizer), before)
    return "no error", (), True


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("option", "option.cg_iterations is 3 on rank 0, 4 on rank 1"),
        ("decay", "weight_decay.1.weight is 0.01 on rank 0, 0.02 on rank 1"),
        ("loss", "loss is CrossEntropyLoss, mean on rank 0, CrossEntropyLoss, sum on rank 1"),
        ("dtype", "parameter.1.bias is torch.float64 [9] trained on rank 0, torch.float32 [9] trained on rank 1"),
        (
            "shape",
            "parameter.3.weight is torch.float64 [8, 9] trained on rank 0, torch.float64 [7, 9] trained on rank 1",
        ),
        ("frozen", "parameter.1.bias is torch.float64 [9] trained on rank 0, torch.float64 [9] frozen on rank 1"),
        ("mode", "mode is train on rank 0, eval on rank 1"),
        ("epoch", "state.epoch is 0 on rank 0, 1 on rank 1"),
        ("value", "parameter 3.weight (by up to 2.22e-16 on rank 1) differ from rank 0's"),
        ("input_factor", "input_factor of 1.weight (by up to 0.25 on rank 1) differ from rank 0's"),
        ("average", "the average of 1.weight (by up to 0.25 on rank 1) differ from rank 0's"),
    ],
)
def test_ranks_that_differ_are_told_so_at_the_first_step(what, says):
    for text, ranks, unchanged in worlds.run(2, unlike, what):
        assert says in text
        assert ranks == (1,)
        assert unchanged


def drifting(rank):
    optimizer = optimizer_of(network(), check_every=3)
    for k in range(10):
        if k == 4 and rank == 1:
            with torch.no_grad():
                optimizer.model[6].bias[1] *= 1 + 1e-12
        try:
            optimizer.step(*share(batch(), [25, 15], rank))
        except shf.RankError as error:
            return k, str(error)
    return None


def test_parameters_that_drift_are_found_where_they_differ():
    for k, text in worlds.run(2, drifting):
        assert k == 6  # steps 0, 3 and 6 compare
        assert "parameter 6.bias (by up to" in text
        assert "on rank 1" in text


def without_rows(rank):
    optimizer = optimizer_of(network())
    optimizer.step(*share(batch(), [0, 0, ROWS], rank))


def test_no_rows_anywhere_is_an_error_everywhere():
    for outcome in worlds.attempt(2, without_rows):
        assert outcome.error[:2] == ("ValueError", "the batch is empty: none of the 2 ranks has a row")


# --- faults -------------------------------------------------------------------------------------------------------------


class Faulty(nn.Module):
    """Does something at its n-th pass, once it is told what."""

    def __init__(self, at):
        super().__init__()
        self.action, self.at, self.passes = None, at, 0

    def forward(self, x):
        self.passes += 1
        if self.action is not None and self.passes == self.at:
            self.action()
        return x


def raise_an_error():
    raise ArithmeticError("cosmic ray")


def interrupt():
    raise KeyboardInterrupt


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def hang():
    time.sleep(3600)


def fault(rank, action, at, options, sizes=(25, 15)):
    model = network()
    model.append(Faulty(at))
    optimizer = optimizer_of(model, **options)
    data = share(batch(), list(sizes), rank)
    optimizer.step(*data)
    model[-1].passes, model[-1].action = 0, action if rank == 1 else None
    before = snapshot(optimizer)
    try:
        optimizer.step(*data)
    except BaseException as error:
        unchanged = identical(snapshot(optimizer), before)
        again = None if action in (kill, hang) else optimizer.step(*data).accepted
        return f"{type(error).__name__}: {error}", getattr(error, "ranks", ()), unchanged, again
    return "no error", (), True, None


# pass 1 is the gradient's, 2 the curvature's, from 3 on objectives are evaluated
@pytest.mark.parametrize("at", [1, 2, 3, 4])
@pytest.mark.parametrize("options", [{}, {"split_vectors": True}], ids=["whole", "split"])
def test_an_error_on_one_rank_ends_the_step_on_all(at, options):
    found = worlds.run(2, fault, raise_an_error, at, options)
    assert [text for text, *_ in found] == [
        "RankError: rank 1 raised ArithmeticError: cosmic ray",
        "ArithmeticError: cosmic ray",
    ]
    for _, _, unchanged, again in found:
        assert unchanged
        assert again  # and the group is as good as before
    assert found[0][1] == (1,)


def test_an_interrupted_rank_ends_the_step_on_all():
    found = worlds.run(2, fault, interrupt, 2, {})
    assert [text for text, *_ in found] == ["RankError: rank 1 raised KeyboardInterrupt", "KeyboardInterrupt: "]


@pytest.mark.waits
def test_a_killed_rank_is_named():
    """The timeout waits for the killed rank. On a slow machine it is too short for the other one: then a longer one."""
    for seconds in (4, 30, 200):
        survivor, gone, other = worlds.attempt(3, fault, kill, 3, {"rank_timeout": float(seconds)}, (20, 15, 5))
        assert gone is None
        found = [outcome.value[:3] for outcome in (survivor, other)]
        if all(ranks == (1,) for _, ranks, _ in found):
            break
    for text, ranks, unchanged in found:
        assert f"rank 1 gave no sign within {seconds} s: killed, hanging, or out of reach" in text
        assert ranks == (1,)
        assert unchanged


@pytest.mark.waits
def test_a_hanging_rank_is_named():
    """Sooner than the group's own timeout, which would end the test."""
    survivor = worlds.attempt(2, fault, hang, 2, {"rank_timeout": 2.0}, wait_for=[0])[0]
    text, ranks, unchanged, _ = survivor.value
    assert "rank 1 gave no sign within 2 s: killed, hanging, or out of reach" in text
    assert ranks == (1,)
    assert unchanged


def interrupted_outside_of_messages(rank, function):
    """Rank 1 is interrupted where no message is being prepared, and its process ends."""
    if rank == 1:
        module = shf.linear.solver if function == "conjugate_gradient" else shf.damping.levenberg
        original = getattr(module, function)

        def patched(*args, **kwargs):
            return interrupt() if optimizer._scalars["iteration"] == 1 else original(*args, **kwargs)

        setattr(module, function, patched)
    optimizer = optimizer_of(network())
    for _ in range(3):
        optimizer.step(*share(batch(), [25, 15], rank))


# before CG's first product; and after the last message of the step, so that the others notice at the next one
@pytest.mark.parametrize("function", ["conjugate_gradient", "adapt_damping"])
def test_a_rank_that_leaves_between_messages_is_named(function):
    first, second = worlds.attempt(2, interrupted_outside_of_messages, function)
    assert second.error[0] == "KeyboardInterrupt"
    assert first.error[0] == "RankError"
    assert "rank 1 raised KeyboardInterrupt" in first.error[1]
