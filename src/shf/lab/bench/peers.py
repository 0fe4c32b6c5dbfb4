"""Seconds per epoch beside other optimizers, on the same network and the same batches.

All see the MNIST classifier in gradient batches of 1000 rows. Second-order peers get SHF's effort: three CG iterations per
step; the Kronecker-factored ones renew their preconditioner every tenth step. What is compared is time, not progress.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import one_hot
from torch.nn.utils import parameters_to_vector

from shf.lab.bench.cases import MNIST, FeedForward, Workload
from shf.lab.bench.measure import Pace, Work, interleaved

BATCHES = 60
"""Gradient batches of an epoch."""
_PERIOD = 10
"""Steps that are timed together, so that work done every tenth step counts in proportion."""
_CG_ITERATIONS = 3


@dataclass(frozen=True)
class Peer:
    """An optimizer: its package (None if torch or shf), and how to make a step on one batch."""

    name: str
    package: str | None
    make: Callable[[FeedForward, Workload], Work]
    setup: str


def _shf(case: FeedForward, problem: Workload) -> Work:
    optimizer = case.optimizer(problem)
    return lambda: optimizer.step(problem.inputs, problem.targets)


def _first_order(package: str, name: str, **options: Any) -> Callable[[FeedForward, Workload], Work]:
    """A step of one of torch's kind: a gradient, and what the optimizer makes of it."""

    def make(case: FeedForward, problem: Workload) -> Work:
        optimizer = getattr(import_module(package), name)(problem.model.parameters(), **options)

        def step() -> None:
            optimizer.zero_grad()
            problem.loss(problem.model(problem.inputs), problem.targets).backward()
            optimizer.step()

        return step

    return make


def _hessianfree(case: FeedForward, problem: Workload) -> Work:
    hf = import_module("hessianfree")
    layers = [hf.nl.Linear(), *(hf.nl.ReLU() for _ in case.units[1:-1]), hf.nl.Softmax()]
    network = hf.FFNet(list(case.units), layers=layers, loss_type=hf.loss_funcs.CrossEntropy())
    network.optimizer = hf.opt.HessianFree(CG_iter=_CG_ITERATIONS, plotting=False)
    inputs = problem.inputs.numpy()
    targets = one_hot(problem.targets, case.units[-1]).float().numpy()

    def step() -> None:
        network.cache_minibatch(inputs, targets)
        network.W += network.optimizer.compute_update()

    return step


def _newton_cg(case: FeedForward, problem: Workload) -> Work:
    library = import_module("torchmin")
    names, shapes = zip(*((name, p.shape) for name, p in problem.model.named_parameters()), strict=True)
    sizes = [shape.numel() for shape in shapes]

    def f(theta: Tensor) -> Tensor:
        pieces = [piece.view(shape) for piece, shape in zip(theta.split(sizes), shapes, strict=True)]
        outputs = functional_call(problem.model, dict(zip(names, pieces, strict=True)), (problem.inputs,))
        return problem.loss(outputs, problem.targets)

    theta = parameters_to_vector(problem.model.parameters()).detach()

    def step() -> None:
        nonlocal theta
        found = library.minimize(f, theta, method="newton-cg", max_iter=1, options={"cg_max_iter": _CG_ITERATIONS})
        theta = found.x.detach()

    return step


_SGD = _first_order("torch.optim", "SGD", lr=0.01, momentum=0.9, nesterov=True)
_ADAM = _first_order("torch.optim", "Adam", lr=1e-3)
_SHAMPOO = _first_order("pytorch_optimizer", "Shampoo", lr=1e-3, preconditioning_compute_steps=_PERIOD)
_SOAP = _first_order("pytorch_optimizer", "SOAP", lr=1e-3, precondition_frequency=_PERIOD)
PEERS = {
    "shf": Peer("SHF", None, _shf, "ζ 3, curvature batch 100"),
    "sgd": Peer("SGD with Nesterov momentum", None, _SGD, "torch.optim"),
    "adam": Peer("Adam", None, _ADAM, "torch.optim"),
    "shampoo": Peer("Shampoo", "pytorch-optimizer", _SHAMPOO, "preconditioner every 10th step"),
    "soap": Peer("SOAP", "pytorch-optimizer", _SOAP, "preconditioner every 10th step"),
    "hessianfree": Peer("hessianfree's HF", "hessianfree", _hessianfree, "3 CG iterations on all 1000 rows"),
    "newton-cg": Peer("Newton-CG", "pytorch-minimize", _newton_cg, "3 CG iterations on all 1000 rows, line search"),
}


def seconds_per_epoch(names: Sequence[str], pace: Pace) -> dict[str, dict[str, Any]]:
    """An entry per peer, in the order given; those that are not installed say so."""
    case, steps = (MNIST.shrunk(), 1) if pace.quick else (MNIST, _PERIOD)
    problem, chosen = case.problem(), {name: PEERS[name] for name in names}
    there = {name: peer.make(case, copy.deepcopy(problem)) for name, peer in chosen.items() if _version(peer)}

    def repeated(step: Work) -> Work:
        return lambda: [step() for _ in range(steps)]

    found = interleaved({name: repeated(step) for name, step in there.items()}, pace)
    entries = {}
    for name, peer in chosen.items():
        entry: dict[str, Any] = {"peer": peer.name, "package": _version(peer), "setup": peer.setup}
        if name in found:
            per_step = found[name].median / steps
            entry |= {"seconds_per_step": per_step, "seconds_per_epoch": per_step * BATCHES}
            if "adam" in found:
                entry["over_adam"] = found[name].over(found["adam"])
        else:
            entry["skipped"] = f"{peer.package} is not installed: pip install '.[bench]' in a clone"
        entries[name] = entry
    return entries


def _version(peer: Peer) -> str | None:
    package = peer.package or "torch"
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return None
