"""Networks of the usual shapes, in torch alone: ResNet-18, EfficientNet-B0, MobileNetV2, a small vision transformer; GPT-2
from transformers; and inputs for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

CLASSES = 10


class Residual(nn.Module):
    """x ↦ activation(body(x) + shortcut(x))."""

    def __init__(self, body: nn.Module, shortcut: nn.Module, activation: nn.Module) -> None:
        super().__init__()
        self.body, self.shortcut, self.activation = body, shortcut, activation

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.body(x) + self.shortcut(x))  # type: ignore[no-any-return]


def convolved(
    inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1, activation: type[nn.Module] | None = None
) -> list[nn.Module]:
    """A convolution, batch normalisation, and an activation if there is one."""
    layer = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [layer, nn.BatchNorm2d(outputs), *([activation()] if activation else [])]


def head(channels: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES)]


def resnet(widths: Sequence[int] = (64, 128, 256, 512), blocks: int = 2) -> nn.Module:
    layers = [*convolved(3, widths[0], 7, 2, 1, nn.ReLU), nn.MaxPool2d(3, 2, 1)]
    inputs = widths[0]
    for number, outputs in enumerate(widths):
        for block in range(blocks):
            stride = 2 if number and not block else 1
            body = [*convolved(inputs, outputs, 3, stride, 1, nn.ReLU), *convolved(outputs, outputs, 3)]
            same = stride == 1 and inputs == outputs
            shortcut = nn.Identity() if same else nn.Sequential(*convolved(inputs, outputs, 1, stride))
            layers.append(Residual(nn.Sequential(*body), shortcut, nn.ReLU()))
            inputs = outputs
    return nn.Sequential(*layers, *head(inputs))


class Squeeze(nn.Module):
    """Squeeze and excitation: each channel times a gate that sees the means of all."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, inner, 1),
            nn.SiLU(),
            nn.Conv2d(inner, channels, 1),
            nn.Sigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(x)  # type: ignore[no-any-return]


Stage = tuple[int, int, int, int, int]
"""Expansion, kernel, stride of the first block, channels, blocks."""


def inverted(stages: Sequence[Stage], activation: type[nn.Module], *, squeeze: bool) -> nn.Module:
    """Inverted residuals: wide within, each channel convolved by itself."""
    layers, inputs = convolved(3, 32, 3, 2, 1, activation), 32
    for expansion, kernel, first, outputs, blocks in stages:
        for block in range(blocks):
            stride, width = first if block == 0 else 1, inputs * expansion
            body = convolved(inputs, width, 1, 1, 1, activation) if expansion > 1 else []
            body += convolved(width, width, kernel, stride, width, activation)
            body += [Squeeze(width, inputs // 4)] if squeeze else []
            whole = nn.Sequential(*body, *convolved(width, outputs, 1))
            same = stride == 1 and inputs == outputs
            layers.append(Residual(whole, nn.Identity(), nn.Identity()) if same else whole)
            inputs = outputs
    return nn.Sequential(*layers, *convolved(inputs, 1280, 1, 1, 1, activation), *head(1280))


def efficientnet() -> nn.Module:
    stages = [(1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 5, 2, 40, 2), (6, 3, 2, 80, 3)]
    stages += [(6, 5, 1, 112, 3), (6, 5, 2, 192, 4), (6, 3, 1, 320, 1)]
    return inverted(stages, nn.SiLU, squeeze=True)


def mobilenet() -> nn.Module:
    stages = [(1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 3, 2, 32, 3), (6, 3, 2, 64, 4)]
    stages += [(6, 3, 1, 96, 3), (6, 3, 2, 160, 3), (6, 3, 1, 320, 1)]
    return inverted(stages, nn.ReLU6, squeeze=False)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.inputs, self.outputs = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inputs(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        found: Tensor = self.outputs(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return found


class VisionTransformer(nn.Module):
    """Patches of 4 × 4 of images of 32 × 32."""

    def __init__(self, width: int = 192, heads: int = 3, depth: int = 12) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.start = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, 65, width))
        layers: list[nn.Module] = []
        for _ in range(depth):
            attention = nn.Sequential(nn.LayerNorm(width), Attention(width, heads))
            wide = [nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]
            layers += [Residual(b, nn.Identity(), nn.Identity()) for b in (attention, nn.Sequential(*wide))]
        self.layers = nn.Sequential(*layers, nn.LayerNorm(width))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.start.expand(len(x), -1, -1), tokens], 1) + self.places
        return self.head(self.layers(tokens)[:, 0])  # type: ignore[no-any-return]


class Tokens(nn.Module):
    """GPT-2, from tokens to logits (rows, classes, places)."""

    def __init__(self, **shape: int) -> None:
        super().__init__()
        try:
            from transformers import GPT2Config, GPT2LMHeadModel
        except ImportError as error:
            raise SystemExit("GPT-2 comes with transformers: pip install '.[integrations]' in a clone") from error
        still = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
        ends = dict.fromkeys(("bos_token_id", "eos_token_id"))
        self.model = GPT2LMHeadModel(GPT2Config(use_cache=False, **still, **ends, **shape))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens).logits.mT  # type: ignore[no-any-return]


class Packed(nn.Module):
    """An LSTM on sequences of different lengths, and its last state."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.recurrent, self.head = nn.LSTM(inputs, width), nn.Linear(width, CLASSES)

    def forward(self, padded: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(padded, lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.recurrent(packed)[1][0][-1])  # type: ignore[no-any-return]


def perceptron(inputs: int, *widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for width in widths:
        layers += [nn.Linear(inputs, width), nn.BatchNorm1d(width), nn.ReLU()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, CLASSES))


Draw = Callable[[int, torch.Generator], object]
"""Inputs of so many rows."""


def images(size: int) -> Draw:
    return lambda rows, source: torch.randn(rows, 3, size, size, generator=source)


def numbers(width: int) -> Draw:
    return lambda rows, source: torch.randn(rows, width, generator=source)


def sequences(width: int, longest: int) -> Draw:
    """Padded ones, and their lengths."""

    def draw(rows: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
        lengths = torch.randint(longest // 2, longest + 1, (rows,), generator=source)
        return torch.randn(rows, longest, width, generator=source), lengths

    return draw


def words(vocabulary: int, length: int) -> Draw:
    return lambda rows, source: torch.randint(vocabulary, (rows, length), generator=source)
