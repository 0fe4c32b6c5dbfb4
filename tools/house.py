"""What can be counted of the house: `python tools/house.py` prints lines, imports, options, and what a small step costs.

With PYTHONPATH=OTHER/src it counts another version. `--rounds 0` leaves the clock out.
"""

import argparse
import statistics
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


def lines() -> dict[str, int]:
    """Lines of the core, of the laboratory, and of both."""
    found = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in FOLDER.rglob("*.py")}
    core = sum(found[path] for path in CORE.values())
    return {"core": core, "laboratory and commands": sum(found.values()) - core, "all": sum(found.values())}


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

    def bare(self, infos: Sequence[Any]) -> None:
        """The autograd calls of these steps and nothing else: a gradient, products over kept graphs (the last of a step by J
        alone), evaluations."""
        for info in infos:
            parameters = list(self.model.parameters())
            z = self.model(self.inputs)
            torch.autograd.grad(self.loss(z, self.targets), parameters, retain_graph=True)
            u = torch.zeros_like(z, requires_grad=True)
            pulled = torch.autograd.grad(z, parameters, u, create_graph=True)
            along = [torch.ones_like(p) for p in parameters]
            for number in range(info.products):
                (Jv,) = torch.autograd.grad(pulled, u, along, retain_graph=True)
                if number < info.products - 1:
                    torch.autograd.grad(z, parameters, Jv, retain_graph=True)
            with torch.no_grad():
                for _ in range(info.evaluations):
                    self.loss(self.model(self.inputs), self.targets)


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


def cost(options: dict[str, Any], rounds: int, steps: int = 20) -> tuple[float, float]:
    """A step and its bare autograd calls, in seconds of processor time: medians of interleaved rounds, each from the same
    start."""
    whole, bare = [], []
    for _ in range(rounds):
        small, infos = Small(options), []
        whole.append(seconds(lambda: infos.extend(small.step() for _ in range(steps))) / steps)  # noqa: B023
        bare.append(seconds(lambda: small.bare(infos)) / steps)  # noqa: B023
    return statistics.median(whole), statistics.median(bare)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    print("lines:", ", ".join(f"{name} {count}" for name, count in lines().items()))
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
            whole, bare = cost(options, chosen.rounds)
            print(f"  {1e3 * whole:.2f} ms, bare autograd calls {1e3 * bare:.2f} ms: {whole / bare:.2f} ×")


if __name__ == "__main__":
    main()
