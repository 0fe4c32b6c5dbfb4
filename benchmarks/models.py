"""Models as people have them: what the first step of `fast` costs, channels convolved by themselves, rows that mix, memory.

    python benchmarks/models.py [fast] [mixed] [memory]     what is not yet in results/models, on one thread
    python benchmarks/models.py page                        the tables, in docs/performance.md

Seconds are the processor's. Parts of a first step are those of the calls that make them. Where rows mix, the second step is
made again and again, with and without the preconditioner in turns. A figure of memory comes from a process of its own.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import networks
import shf
from networks import images, numbers, sequences, words
from shf.lab import machine
from shf.lab.bench import memory
from shf.lab.bench.measure import take_over
from shf.lab.clock import CLOCKS
from shf.lab.files import write_atomically
from shf.lab.pages import fill, table
from shf.model import layersquares, percase
from shf.preconditioners import factors, kronecker, layerfactors
from shf.problems import shared
from shf.subject import Subject

ROOT = Path(__file__).resolve().parent.parent
RECORDS, PAGE = ROOT / "results" / "models", ROOT / "docs" / "performance.md"
LATER, ROUNDS, SEEDS, STEPS = 5, 3, (0, 1, 2), 20
clock = CLOCKS["processor"]
CE = nn.CrossEntropyLoss()


@dataclass(frozen=True)
class Case:
    """A network and a batch; targets are random classes.

    Attributes:
        words: what it is called.
        make: the network.
        draw: inputs.
        rows: how many.
        classes: of each target.
        targets: their shape beyond the rows.
        training: its mode.
    """

    words: str
    make: Callable[[], nn.Module]
    draw: networks.Draw
    rows: int
    classes: int = networks.CLASSES
    targets: tuple[int, ...] = ()
    training: bool = True

    def build(self, seed: int = 0) -> tuple[nn.Module, Any, Tensor]:
        torch.manual_seed(seed)
        source = torch.Generator().manual_seed(seed)
        model = self.make().train(self.training)
        inputs = self.draw(self.rows, source)
        return model, inputs, torch.randint(self.classes, (self.rows, *self.targets), generator=source)


def gpt2(words_: str, rows: int, vocabulary: int = 50257, **shape: int) -> Case:
    make = lambda: networks.Tokens(vocab_size=vocabulary, **shape)  # noqa: E731
    return Case(words_, make, words(vocabulary, 64), rows, vocabulary, (64,))


FAST = {
    "resnet18": Case("ResNet-18", networks.resnet, images(32), 128),
    "efficientnet": Case("EfficientNet-B0", networks.efficientnet, images(32), 128),
    "efficientnet-eval": Case(
        "EfficientNet-B0, running statistics", networks.efficientnet, images(32), 64, training=False
    ),
    "mobilenet-eval": Case("MobileNetV2, running statistics", networks.mobilenet, images(32), 64, training=False),
    "vit": Case("ViT, 12 layers of 192", networks.VisionTransformer, images(32), 32),
    "gpt2-little": gpt2("GPT-2, 4 layers of 256, 5000 words", 8, 5000, n_embd=256, n_head=4, n_layer=4),
    "gpt2": gpt2("GPT-2 small", 4),
}
MIXED = {
    "resnet18": FAST["resnet18"],
    "packed": Case("LSTM, packed sequences", lambda: networks.Packed(28, 128), sequences(28, 28), 128),
    "perceptron": Case("MLP, BatchNorm1d", lambda: networks.perceptron(64, 128, 128), numbers(64), 2000),
}
SMALL = {
    "resnet18": Case("residual network, widths 8, 16", lambda: networks.resnet((8, 16), 1), images(8), 32),
    "packed": Case("LSTM of 16, packed sequences", lambda: networks.Packed(8, 16), sequences(8, 12), 60),
    "perceptron": Case("MLP 16-24-24, BatchNorm1d", lambda: networks.perceptron(16, 24, 24), numbers(16), 100),
}
VARIANTS: Mapping[str, dict[str, Any]] = {
    "default": {},
    "exact": {"preconditioner_squares": "exact"},
    "none": {"preconditioner": None},
}
MEMORY = {"resnet18": FAST["resnet18"], "gpt2": gpt2("GPT-2 small, 2 of its 12 layers", 4, n_layer=2)}
CONSUMERS = ("gradient", "fast", "soap")

# --- the preset's first step -----------------------------------------------------------------------------------------


@dataclass
class Parts:
    """Seconds of the calls that a step's parts consist of."""

    seconds: dict[str, float] = field(default_factory=dict)

    def watched(self, call: Callable[..., Any], name: Callable[..., str | None]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            begun = clock()
            found = call(*args, **kwargs)
            if (part := name(*args)) is not None:
                self.seconds[part] = self.seconds.get(part, 0.0) + clock() - begun
            return found

        return wrapped


def kind(module: nn.Module, squeezes: set[nn.Module]) -> str | None:
    """Whether a layer belongs to a gate, or convolves each channel by itself."""
    if module in squeezes:
        return "squeeze"
    return "depthwise" if isinstance(module, nn.Conv2d) and module.groups > 1 else None


@contextmanager
def watching(model: nn.Module) -> Iterator[dict[str, float]]:
    parts, gates = Parts(), [m for m in model.modules() if isinstance(m, networks.Squeeze)]
    squeezes = {layer for gate in gates for layer in gate.modules()}
    places: list[tuple[Any, str, Callable[..., str | None]]] = [
        (Subject, "layout", lambda *_: "probing"),
        (kronecker.Renewal, "_renew", lambda *_: "renewal"),
        (shared, "mean_eigenvalue", lambda *_: "first damping"),
        (layerfactors, "_sums", lambda block, *_: kind(block.module, squeezes)),
    ]
    with ExitStack() as patches:
        for owner, attribute, name in places:
            patches.enter_context(mock.patch.object(owner, attribute, parts.watched(getattr(owner, attribute), name)))
        squares = parts.watched(layersquares.formula, lambda module, *_: kind(module, squeezes))
        patches.enter_context(mock.patch.dict(percase.squares_by_layers.__kwdefaults__, of_layer=squares))
        yield parts.seconds


def inverting(optimizer: shf.SHF, model: nn.Module) -> float:
    """Seconds to invert the factors of all gates."""
    begun = clock()
    for gate in (m for m in model.modules() if isinstance(m, networks.Squeeze)):
        for layer in (m for m in gate.modules() if isinstance(m, nn.Conv2d)):
            pair = tuple(optimizer.state[layer.weight][name] for name in ("input_factor", "output_factor"))
            factors._inverses(pair, (1.0, 1.0), (1.0, 1.0))
    return clock() - begun


def timed(work: Callable[[], object]) -> float:
    begun = clock()
    work()
    return clock() - begun


def first_step(case: Case) -> dict[str, Any]:
    model, inputs, targets = case.build()
    parameters = list(model.parameters())

    def gradient() -> object:
        return torch.autograd.grad(CE(model(inputs), targets), parameters)

    gradient()
    optimizer = shf.SHF(model, CE, **shf.presets.fast, seed=0)
    with watching(model) as parts:
        first = timed(lambda: optimizer.step(inputs, targets))
        found = dict(parts)
    later, gradients = [], []
    for _ in range(LATER):
        later.append(timed(lambda: optimizer.step(inputs, targets)))
        gradients.append(timed(gradient))
    return {
        "parameters": sum(p.numel() for p in parameters),
        "rows": case.rows,
        "gradient": statistics.median(gradients),
        "first": first,
        "later": later,
        "parts": {**found, "squeeze inverses": inverting(optimizer, model)},
    }


# --- rows that mix ---------------------------------------------------------------------------------------------------


class SecondStep:
    """The second step of training, again and again."""

    def __init__(self, case: Case, options: Mapping[str, Any]) -> None:
        self.model, self.inputs, self.targets = case.build()
        first = shf.SHF(self.model, CE, seed=0)
        first.step(self.inputs, self.targets)
        self.optimizer = shf.SHF(self.model, CE, seed=0, **options)
        take_over(self.optimizer, first)
        self.start = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
        self()  # what is found out about a model is known from now on

    def __call__(self) -> float:
        model, optimizer = copy.deepcopy(self.start)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        return timed(lambda: self.optimizer.step(self.inputs, self.targets))


def final(case: Case, seed: int, options: Mapping[str, Any]) -> float:
    """The objective at the end of a short training on one batch."""
    model, inputs, targets = case.build(seed)
    optimizer = shf.SHF(model, CE, seed=seed, **options)
    return [optimizer.step(inputs, targets).loss_after for _ in range(STEPS)][-1]


def mixed(case: Case, small: Case) -> dict[str, Any]:
    steps = {name: SecondStep(case, VARIANTS[name]) for name in ("default", "none")}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            seconds[name].append(step())
    finals = {
        f"{damping:g}": {n: [final(small, s, {**o, "damping": damping}) for s in SEEDS] for n, o in VARIANTS.items()}
        for damping in (1.0, 0.1)
    }
    return {"rows": case.rows, "seconds": seconds, "steps": STEPS, "final": finals}


# --- memory ----------------------------------------------------------------------------------------------------------


def consume(what: str, case: Case) -> int:
    """Bytes at the peak of two gradients or steps, beyond the interpreter with its libraries; in a process of its own."""
    work(what, SMALL["resnet18"])()
    before = memory.resident()
    run = work(what, case)
    memory.reset_peak()
    for _ in range(2):
        run()
    return memory.peak() - before


def work(what: str, case: Case) -> Callable[[], object]:
    model, inputs, targets = case.build()
    if what == "fast":
        optimizer = shf.SHF(model, CE, **shf.presets.fast, seed=0)
        return lambda: optimizer.step(inputs, targets)
    other: torch.optim.Optimizer | None = None
    if what == "soap":
        try:
            from pytorch_optimizer import SOAP
        except ImportError as error:
            raise SystemExit("SOAP comes with pytorch-optimizer: pip install '.[bench]' in a clone") from error
        other = SOAP(model.parameters(), lr=1e-3)

    def run() -> None:
        model.zero_grad()
        CE(model(inputs), targets).backward()
        if other is not None:
            other.step()

    return run


def peaks(name: str) -> dict[str, int]:
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**16)}
    found = {}
    for what in CONSUMERS:
        command = [sys.executable, __file__, "consume", what, name]
        found[what] = int(
            subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout.split()[-1]
        )
    return found


# --- records and page ------------------------------------------------------------------------------------------------

PARTS: Mapping[str, tuple[Sequence[str], Callable[[str], dict[str, Any]]]] = {
    "fast": (tuple(FAST), lambda name: first_step(FAST[name])),
    "mixed": (tuple(MIXED), lambda name: mixed(MIXED[name], SMALL[name])),
    "memory": (tuple(MEMORY), peaks),
}


def versions() -> dict[str, str]:
    own = machine.versions()
    for package in ("transformers", "pytorch_optimizer"):
        try:
            own[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            own[package] = "not installed"
    return own


def measure(parts: Sequence[str]) -> None:
    torch.set_num_threads(1)
    machine.keep_freed_memory()
    for part, (names, run) in ((part, PARTS[part]) for part in parts):
        for name in names:
            path = RECORDS / part / f"{name}.json"
            if path.exists():
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            record = {"found": run(name), "machine": machine.description(), "versions": versions()}
            write_atomically(path, (json.dumps(record, indent=1) + "\n").encode())
            print(part, name, record["found"], flush=True)


def recorded(part: str) -> Iterator[tuple[str, Any]]:
    for name in PARTS[part][0]:
        if (path := RECORDS / part / f"{name}.json").exists():
            yield name, json.loads(path.read_text(encoding="utf-8"))["found"]


def seconds(value: float) -> str:
    return f"{value:.3g} s"


def firsts() -> Iterator[Sequence[str]]:
    for name, e in recorded("fast"):
        later = statistics.median(e["later"])
        shares = [f"{e['parts'].get(part, 0.0) / later:.2f}" for part in ("probing", "renewal", "first damping")]
        counts = f"{e['parameters']:,}", str(e["rows"])
        times = [seconds(value) for value in (e["gradient"], later, e["first"])]
        yield [FAST[name].words, *counts, *times, f"{e['first'] / later:.2f}", *shares]


def channels() -> Iterator[Sequence[str]]:
    for name, e in recorded("fast"):
        shares = [e["parts"].get(part, 0.0) / e["gradient"] for part in ("depthwise", "squeeze", "squeeze inverses")]
        if FAST[name].make in (networks.efficientnet, networks.mobilenet):
            yield [FAST[name].words, *(f"{share:.2f}" for share in (*shares, sum(shares)))]


def mixtures() -> Iterator[Sequence[str]]:
    for name, e in recorded("mixed"):
        ratio = statistics.median(itertools.starmap(lambda a, b: a / b, zip(*e["seconds"].values(), strict=True)))
        times = [seconds(statistics.median(e["seconds"][kind])) for kind in ("none", "default")]
        yield [MIXED[name].words, str(e["rows"]), *times, f"{ratio:.2f}"]


def trainings() -> Iterator[Sequence[str]]:
    for name, e in recorded("mixed"):
        for damping, found in e["final"].items():
            cells = [f"{statistics.fmean(found[n]):.3g} ({min(found[n]):.3g} to {max(found[n]):.3g})" for n in VARIANTS]
            yield [SMALL[name].words, damping, *cells]


def eaten() -> Iterator[Sequence[str]]:
    for name, e in recorded("memory"):
        sizes = [f"{e[what] / 2**20:.0f} MiB" for what in CONSUMERS]
        yield [MEMORY[name].words, *sizes, f"{e['fast'] / e['gradient']:.2f}", f"{e['fast'] / e['soap']:.2f}"]


def page() -> None:
    parts = {
        "models-fast": table(
            [
                "network",
                "parameters",
                "rows",
                "gradient",
                "later step",
                "first",
                "first / later",
                "probing",
                "renewal",
                "λ",
            ],
            firsts(),
            "---:",
        ),
        "models-channels": table(
            ["network", "depthwise, squares", "gates, sums", "gates, inverses", "together / gradient"],
            channels(),
            "---:",
        ),
        "models-mixed": table(["network", "rows", "without", "default", "default / without"], mixtures(), "---:"),
        "models-training": table(["network", "λ", "default", "exact squares", "without"], trainings(), "---:"),
        "models-memory": table(["network", "gradient", "`fast`", "SOAP", "/ gradient", "/ SOAP"], eaten(), "---:"),
    }
    fill(PAGE, parts)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["page"]:
            page()
        case ["consume", what, name]:
            torch.set_num_threads(1)
            print(consume(what, MEMORY[name]))
        case parts if set(parts) <= set(PARTS):
            measure(parts or list(PARTS))
        case _:
            raise SystemExit(__doc__)
