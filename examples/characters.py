"""A character-level transformer (0.8 million parameters) on a text that ships with Python: SHF against AdamW and Muon.

The text is the documentation strings of Python's standard library. Attention is F.scaled_dot_product_attention; its fused
kernel has no second derivative, so inside SHF's steps, and only there, torch's own mathematical form is used.

python examples/characters.py --seconds 600
"""

import ast
import math
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shf.lab.baselines.registry import find
from shf.lab.contest import Method, Row, Step, Task, by_gradient, contest, parser, stochastic

CONTEXT, WIDTH, HEADS, LAYERS, CHARACTERS = 64, 128, 4, 4, 96
LOSS = nn.CrossEntropyLoss()
SHF = {"damping": 0.01, "cg_iterations": 3, "curvature_batch": 16, "preconditioner": "kronecker"}


def docstrings(modules: int | None = None) -> str:
    """Those of the (first so many) modules in the standard library's own folder, in the order of their names."""
    texts = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:modules]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                texts.append(ast.get_docstring(node) or "")
    return "\n\n".join(filter(None, texts))


class Block(nn.Module):
    """Causal attention and a two-layer network, each behind a LayerNorm and beside a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.qkv, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.before(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(attended.transpose(1, 2).flatten(2))
        return x + self.inner(x)


class Characters(nn.Module):
    """Embedding, fixed positions, blocks, a distribution over the next character at every position."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(CHARACTERS, WIDTH), nn.Linear(WIDTH, CHARACTERS)
        self.norm = nn.LayerNorm(WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        angles = torch.arange(CONTEXT)[:, None] * torch.exp(torch.arange(0, WIDTH, 2) * (-math.log(1e4) / WIDTH))
        self.register_buffer("positions", torch.cat([angles.sin(), angles.cos()], 1), persistent=False)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02 if p.shape[1] == WIDTH else 0.01)
        nn.init.normal_(self.embedding.weight, std=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.blocks(self.embedding(x) + self.positions[: x.shape[1]]))).transpose(1, 2)


def documentation(modules: int | None = None) -> Task:
    """Nine tenths of the text for training; what follows is held out, to choose rates and to validate."""
    codes = torch.tensor([ord(c) - 31 if 32 <= ord(c) < 127 else 0 for c in docstrings(modules)])
    size = len(codes) * 9 // 10
    held_out = codes[size:].unfold(0, CONTEXT + 1, CONTEXT)
    tuned, test = held_out[: len(held_out) // 2][:100], held_out[len(held_out) // 2 :][:200]

    def batches(rows: int, source: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            starts = torch.randint(size - CONTEXT - 1, (rows, 1), generator=source)
            windows = codes[starts + torch.arange(CONTEXT + 1)]
            yield windows[:, :-1], windows[:, 1:]

    def evaluate(model: nn.Module) -> Row:
        found = {"held_out_loss": tuned, "validation_loss": test}
        return {name: LOSS(model(w[:, :-1]), w[:, 1:]).item() for name, w in found.items()}

    return Task("characters", Characters, batches, evaluate, tuned_on="held_out_loss")


def adamw(model: nn.Module, rate: float) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
    return by_gradient(model, LOSS, optimizer)


def methods() -> list[Method]:
    return [
        Method("shf", 48, lambda m, _: stochastic(m, LOSS, 50, **SHF, seed=0), settings=SHF),
        Method("adamw", 32, adamw, (0.01, 0.003, 0.001, 0.0003)),
        Method(
            "muon", 32, lambda m, r: find("muon").build(m, LOSS, {"learning_rate": r}).step, (0.1, 0.03, 0.01, 0.003)
        ),
    ]


def main() -> None:
    options = parser(__doc__, seconds=240)
    options.add_argument("--modules", type=int, help="read only so many modules of the standard library")
    chosen = options.parse_args()
    contest([documentation(chosen.modules)], methods(), chosen)


if __name__ == "__main__":
    main()
