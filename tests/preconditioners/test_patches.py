"""Sums over the patches of convolutions against patches that are written out."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers import assert_close
from shf.preconditioners import layerfactors, patches

LAYERS = {
    "rows shared by all positions": lambda: nn.Conv2d(2, 3, 3),
    "no row shared": lambda: nn.Conv2d(2, 3, 2, stride=3),
    "some rows shared": lambda: nn.Conv2d(2, 3, (4, 2), stride=(2, 1), padding=(3, 1)),
    "rows between rows": lambda: nn.Conv2d(2, 3, (2, 3), stride=(3, 1), dilation=(2, 2), padding=1),
    "one position": lambda: nn.Conv2d(2, 3, (7, 8)),
}


@pytest.mark.parametrize("at_once", [1, 2**21])
@pytest.mark.parametrize("name", LAYERS)
def test_sums_and_projections(name, at_once, monkeypatch):
    monkeypatch.setattr(patches, "_AT_ONCE", at_once)
    layer, a = LAYERS[name](), torch.randn(5, 2, 7, 8, dtype=torch.float64)
    written = F.unfold(a, layer.kernel_size, layer.dilation, layer.padding, layer.stride).transpose(1, 2)
    p = written.flatten(0, 1)
    outer, total, positions = patches.sum_patches(layer, a)
    assert positions == len(p)
    assert_close(outer, p.t() @ p)
    assert_close(total, p.sum(0))
    v = torch.randn(p.shape[1], dtype=torch.float64)
    assert_close(patches.project_patches(layer, a, v), written @ v)


@pytest.mark.parametrize("columns", [1, 64, 65, 257, 300])
def test_an_outer_product_by_blocks(columns):
    x = torch.randn(7, columns, dtype=torch.float64)
    assert_close(layerfactors._outer(x), x.t() @ x)
