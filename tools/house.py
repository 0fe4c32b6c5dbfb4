"""What can be counted of the house: `python tools/house.py` prints lines, imports, options, and what a small step costs.

With PYTHONPATH=OTHER/src it counts another version. `--rounds 0` leaves the clock out.
"""

import argparse
import ast
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import get_annotations
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import shf

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from test_architecture import CORE, FOLDER, room, siblings

OPTIONS: dict[str, dict[str, Any]] = {"default": {}, "fast": dict(shf.presets.fast)}
ROWS, WIDTHS, WARM = 148, (10, 50, 50, 1), 5


BEGAN = "f8e3a0f"
"""Version 0.1.0, with which the source is compared."""
SINCE = {
    "estimators": ("sklearn",),
    "integrations": ("integrations", "groups.py:page"),
    "closures": (
        *("closure.py", "groups.py:refuse_incomplete", "probing/layout.py:calls_along_rows"),
        *("objective.py:Objective._of_closures", "objective.py:Objective._pieces_of_closure"),
    ),
    "several terms": ("terms.py", "problems/sum.py", "objective.py:_is_of_pairs"),
    "exact solvers": (
        *("linear/exact.py", "linear/roots.py", "linear/sides.py", "linear/trustregion.py", "linear/unseen.py"),
        *(
            "problems/roots.py",
            "model/rowjacobian.py",
            "model/linearuses.py",
            "hessian/expansion.py:LossExpansion.row_roots",
        ),
        *("problems/batch.py:BatchProblem.can_be_written_out", "problems/batch.py:BatchProblem.roots"),
        *("problems/batches.py:BatchesProblem.roots", "problems/passes.py:Passes.roots", "problems/system.py:_roots"),
        *(
            "linear/system.py:LinearSystem.written_out",
            "linear/system.py:LinearSystem._instead",
            "linear/system.py:_gib",
        ),
        *("runtime/diagnosis.py:diagnose_held", "runtime/guards.py:_is_held"),
    ),
    "losses that are not convex": (
        *("hessian/blocks.py", "hessian/fisher.py", "losses.py:Loss.tell", "losses.py:_mean_and_variance"),
        *(
            f"hessian/expansion.py:LossExpansion.{n}"
            for n in ("_indefinite", "_curved", "_positive", "_differentiated")
        ),
        *(f"hessian/expansion.py:LossExpansion.{n}" for n in ("_curve", "_tell")),
    ),
    "decay direction": (
        *("linear/decaystep.py", "preconditioners/kronecker.py:Renewal.decay_step"),
        "preconditioners/factors.py:invert_undamped",
    ),
    "iterations by what survives": ("linear/survival.py",),
    "averages that listen": (
        *(f"averaging.py:{n}" for n in ("Averaging._listen", "Averaging.share", "Averaging.serves", "_relative_gain")),
        *("averaging.py:exchange_", "base.py:CurvatureOptimizer.eval", "base.py:CurvatureOptimizer.train"),
        *("base.py:CurvatureOptimizer._exchange", "base.py:CurvatureOptimizer._average_serves"),
    ),
    "rules for convolutions": (
        *("model/convolution.py", "model/layersquares.py:_is_depthwise", "model/layersquares.py:_depthwise_per_case"),
        *("model/layersquares.py:_correlated", "model/layersquares.py:_seen_at"),
    ),
    "rows that mix": ("model/shares.py",),
    "models that differentiate": (
        *(
            "model/evaluation.py",
            "probing/layout.py:_evaluate_alike",
            "preconditioners/kronecker.py:_warn_of_uncovered",
        ),
    ),
    "zeros that nobody keeps": (
        *("model/zeros.py", "model/secondgraph.py:without_cotangents", "model/secondgraph.py:cotangent"),
        "model/secondgraph.py:_place",
    ),
    "what a model is made of, remembered": ("model/fingerprint.py", "model/network.py:Network.once"),
    "outputs that are no tensor": ("model/network.py:call_for_tensor", "model/network.py:_named"),
    "loaders with workers": (
        *("data/growing.py:_Order", "data/growing.py:_Columns", "data/growing.py:_refuse_loading"),
    ),
    "states of other options": ("composition.py:Config.in_words", "composition.py:Config.others"),
    "parts given as objects": ("component.py:_refuse_beside", "solvers.py"),
    "precisions that differ": ("probing/losses.py:explained_dtypes", "probing/losses.py:_warn_of_lost_precision"),
    "a step in words": ("info.py:StepInfo.__str__", "info.py:StepInfo.asdict"),
    "regression on a map": (
        *("lab/data/terrain.py", "lab/data/datasets.py:_terrain", "lab/data/fetching.py:_terrain_status"),
        *("lab/models.py:regressor", "lab/evaluation.py:_maps"),
    ),
    "the original CURVES, fetched": (
        *("lab/data/fetching.py:fetch_original", "lab/data/fetching.py:_check_original"),
        "lab/data/curves.py:pca_left",
    ),
    "claims decided": (
        *(f"lab/rerun/claims.py:{n}" for n in ("Earlier", "Claim._by_earlier")),
        *(
            f"lab/rerun/judges.py:{n}"
            for n in ("planned", "within", "settled", "last_at_most", "rises_steadily", "_is_steady")
        ),
        *(f"lab/rerun/judges.py:{n}" for n in ("vanishes", "sooner_to", "lower_in_equal_time", "share_a_clock", "_at")),
        *(f"lab/rerun/judges.py:{n}" for n in ("competitive", "calmer")),
        *("lab/rerun/page.py:open_claims", "lab/rerun/page.py:curves_table", "lab/rerun/queue.py:lacking_checkpoints"),
        "lab/rerun/entries.py:_fitted",
    ),
    "clocks that go wrong": ("lab/clock.py",),
}
"""Modules, rooms and definitions (file:name) for what version 0.1.0 did not do, by that. What it took inside of other
definitions is not here."""


def _lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def lines() -> dict[str, int]:
    """Lines of the core, of the laboratory, and of both."""
    core, everything = sum(map(_lines, CORE.values())), sum(map(_lines, FOLDER.rglob("*.py")))
    return {"core": core, "laboratory and commands": everything - core, "all": everything}


def since() -> dict[str, int]:
    """Lines of what is for something that version 0.1.0 did not do."""
    return {what: sum(map(_lines_of, names)) for what, names in SINCE.items()}


def _lines_of(name: str) -> int:
    """Of a room, a module, or a definition in one."""
    file, _, inside = name.partition(":")
    path = FOLDER / file
    if not inside:
        return sum(_lines(p) for p in (path, *path.rglob("*.py")) if p.is_file())
    node: Any = ast.parse(path.read_text(encoding="utf-8"))
    for part in inside.split("."):
        node = next(n for n in node.body if getattr(n, "name", None) == part)
    return int(node.end_lineno) - min(n.lineno for n in (node, *node.decorator_list)) + 1


def before() -> int:
    """Lines of version 0.1.0, by git."""
    command = ["git", "grep", "--count", "", BEGAN, "--", "src/shf/*.py"]
    found = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=True)
    return sum(int(line.rpartition(":")[2]) for line in found.stdout.splitlines())


def fan_out() -> tuple[int, str]:
    """The most modules that a module of the core imports, and which does."""
    return max((len(siblings(name)), name) for name in CORE if not name.endswith("__init__"))


def edges() -> set[tuple[str, str]]:
    """Which room, or file that stands in none, imports which other."""
    return {(room(a), room(b)) for a in CORE for b in siblings(a) if room(a) != room(b)}


def declared() -> dict[str, set[str]]:
    """Where each option of the optimizers is declared: the parts whose field it is."""
    found: dict[str, set[str]] = {}
    for config in (shf.Config, shf.HFConfig):
        for kind in [kind for role in config.roles.values() for kind in role.kinds.values()]:
            for name, field in kind.options().items():
                owners = {base.__name__ for base in kind.__mro__ if field in get_annotations(base)}
                found.setdefault(name, set()).update(owners)
    return found


# --- one step of a small network ----------------------------------------------------------------------------------------


class Small:
    """10-50-50-1 on 148 rows, and an optimizer that has made some steps."""

    def __init__(self, options: dict[str, Any]) -> None:
        torch.manual_seed(0)
        layers = [part for a, b in pairwise(WIDTHS) for part in (nn.Linear(a, b), nn.Tanh())]
        self.model, self.loss = nn.Sequential(*layers[:-1]), nn.MSELoss()
        self.inputs = torch.randn(ROWS, WIDTHS[0])
        self.targets = self.inputs.sin().sum(1, keepdim=True) + 0.3 * torch.randn(ROWS, 1)
        self.optimizer = shf.SHF(self.model, self.loss, seed=0, **options)
        for _ in range(WARM):
            self.step()

    def step(self) -> Any:
        return self.optimizer.step(self.inputs, self.targets)

    def renewals(self) -> int:
        """Of the preconditioner's factors, so far."""
        return int(self.optimizer.param_groups[0]["shf"].get("factor_renewals", 0))

    def bare(self, infos: Sequence[Any]) -> None:
        """The autograd calls of these steps and nothing else: a gradient, products J'L''J over kept graphs (where CG makes
        all of its iterations the last is by J alone), evaluations."""
        curved = 2 / self.targets.numel()  # L'' of the mean of squares
        for info in infos:
            parameters = list(self.model.parameters())
            z = self.model(self.inputs)
            torch.autograd.grad(self.loss(z, self.targets), parameters, retain_graph=True)
            u = torch.zeros_like(z, requires_grad=True)
            pulled = torch.autograd.grad(z, parameters, u, create_graph=True)
            along = [torch.ones_like(p) for p in parameters]
            whole = info.products - (info.cg_stop is shf.CGStop.ITERATIONS)
            for number in range(info.products):
                (Jv,) = torch.autograd.grad(pulled, u, along, retain_graph=True)
                HJv = curved * Jv
                if number < whole:
                    torch.autograd.grad(z, parameters, HJv, retain_graph=True)
            with torch.no_grad():
                for _ in range(info.evaluations):
                    self.loss(self.model(self.inputs), self.targets).item()

    def matrices(self) -> Callable[[Sequence[Any], int], None]:
        """The matrix products that the preconditioner needs in these steps, of which so many renew its factors: squares of
        layers' inputs and output gradients for the diagonal; for factors G⁻¹RA⁻¹ in each iteration, and in a renewal a
        backward pass to the layers' outputs, aa', gg' and the inverses."""
        a, layers = self.inputs, []
        for part in self.model:
            z = part(a)
            if isinstance(part, nn.Linear):
                layers.append((torch.cat([a.detach(), torch.ones(ROWS, 1)], 1), z))
            a = z
        outputs, signs = [s for _, s in layers], torch.ones_like(a)
        given = torch.autograd.grad(a, outputs, signs, retain_graph=True)
        sizes = [(inputs.shape[1], g.shape[1]) for (inputs, _), g in zip(layers, given, strict=True)]
        blocks = [(torch.eye(rows), torch.ones(rows, columns), torch.eye(columns)) for columns, rows in sizes]

        def diagonal(infos: Sequence[Any], renewed: int) -> None:
            for _ in infos:
                for (inputs, _), g in zip(layers, given, strict=True):
                    g.square().t() @ inputs.square()

        def factors(infos: Sequence[Any], renewed: int) -> None:
            for info in infos:
                for _ in range(info.cg_steps):
                    for G, R, A in blocks:
                        G @ R @ A
            for _ in range(renewed):
                found = torch.autograd.grad(a, outputs, signs, retain_graph=True)
                for (inputs, _), g in zip(layers, found, strict=True):
                    for t in (inputs, g):
                        root, _ = torch.linalg.cholesky_ex(t.t() @ t + torch.eye(t.shape[1]))
                        torch.cholesky_inverse(root)

        return factors if self.renewals() else diagonal


@dataclass
class Calls:
    """What one step calls.

    Attributes:
        own: calls of functions of shf.
        across: those of them that come from another module of it.
        frames: the most frames from `step`, which torch wraps, to a call of autograd; both ends included.
        own_frames: those of them that are functions of shf.
    """

    own: int = 0
    across: int = 0
    frames: int = 0
    own_frames: int = 0


def calls(options: dict[str, Any]) -> Calls:
    """Of a warm step."""
    small, found, folder = Small(options), Calls(), str(FOLDER)
    top, autograd = type(small.optimizer).step.__code__, torch.autograd.grad.__code__

    def watch(frame: FrameType, event: str, _: object) -> None:
        if event != "call":
            return
        if frame.f_code is autograd:
            _deepest(frame, top, found, folder)
        elif frame.f_code.co_filename.startswith(folder):
            caller = frame.f_back.f_code.co_filename if frame.f_back else ""
            found.own += 1
            found.across += caller.startswith(folder) and caller != frame.f_code.co_filename

    sys.setprofile(watch)
    try:
        small.step()
    finally:
        sys.setprofile(None)
    return found


def _deepest(frame: FrameType, top: Any, found: Calls, folder: str) -> None:
    names, at = [], frame
    while at.f_code is not top:
        names.append(at.f_code.co_filename)
        assert at.f_back is not None
        at = at.f_back
    names.append(at.f_code.co_filename)
    found.frames = max(found.frames, len(names))
    found.own_frames = max(found.own_frames, sum(name.startswith(folder) for name in names))


def seconds(work: Callable[[], Any]) -> float:
    """Processor time."""
    start = time.process_time()
    work()
    return time.process_time() - start


@dataclass
class Cost:
    """Of a step, of its bare autograd calls, and of its preconditioner's matrix products, in seconds of processor time."""

    step: float
    bare: float
    matrices: float


def cost(options: dict[str, Any], rounds: int, steps: int = 20) -> Cost:
    """Medians of interleaved rounds, each from the same start."""
    found = []
    for _ in range(rounds):
        small, infos = Small(options), []
        before = small.renewals()
        whole = seconds(lambda: infos.extend(small.step() for _ in range(steps)))  # noqa: B023
        renewed, matrices = small.renewals() - before, small.matrices()
        bare = seconds(lambda: small.bare(infos))  # noqa: B023
        found.append((whole, bare, seconds(lambda: matrices(infos, renewed))))  # noqa: B023
    return Cost(*(statistics.median(column) / steps for column in zip(*found, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    print("lines:", ", ".join(f"{name} {count}" for name, count in lines().items()))
    new, old = since(), before()
    print(f"  for what {BEGAN} did not do: {sum(new.values())}:", ", ".join(f"{n} {k}" for n, k in new.items()))
    rest = lines()["all"] - sum(new.values())
    print(f"  all others: {rest}; {BEGAN} had {old}, {rest - old:+}")
    print("largest fan-out: {} ({})".format(*fan_out()))
    graph = edges()
    print(f"edges between rooms: {len(graph)}")
    for name in sorted({a for a, _ in graph}):
        print(f"  {name} → {', '.join(sorted(b for a, b in graph if a == name))}")
    if hasattr(shf.Config, "roles"):
        owners = declared()
        print(
            f"options that are fields: {len(owners)}, declared more than once: {sum(len(n) > 1 for n in owners.values())}"
        )
    for name, options in OPTIONS.items():
        print(f"a warm step of {'-'.join(map(str, WIDTHS))} with {ROWS} rows, {name}: {calls(options)}")
        if chosen.rounds:
            found = cost(options, chosen.rounds)
            bare, both = found.bare, found.bare + found.matrices
            print(f"  {1e3 * found.step:.2f} ms, {found.step / bare:.2f} × bare autograd calls, {1e3 * bare:.2f} ms")
            print(f"  {found.step / both:.2f} × these and the preconditioner's matrix products, {1e3 * both:.2f} ms")


if __name__ == "__main__":
    main()
