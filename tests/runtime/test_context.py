"""Kernels inside a step: those that can be differentiated twice, there and nowhere else, and a word about it."""

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from helpers import mlp
from shf.runtime.context import is_recurrent, set_aside, twice_differentiable_kernels

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("recurrent", [True, False])
def test_cudnn_is_set_aside_for_recurrent_layers_alone(recurrent):
    assert torch.backends.cudnn.enabled
    with twice_differentiable_kernels(CPU, recurrent=recurrent):
        assert torch.backends.cudnn.enabled != recurrent
    assert torch.backends.cudnn.enabled


def test_attention_is_the_mathematical_one_inside_and_as_before_outside():
    flags = torch.backends.cuda
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        with twice_differentiable_kernels(CPU):
            assert (flags.flash_sdp_enabled(), flags.math_sdp_enabled()) == (False, True)
        assert (flags.flash_sdp_enabled(), flags.math_sdp_enabled()) == (True, True)


def test_what_is_set_aside_is_said():
    recurrent = nn.Sequential(nn.GRU(2, 3))
    assert is_recurrent(recurrent)
    assert not is_recurrent(mlp())
    (words,) = set_aside(recurrent, CUDA)
    assert "cuDNN" in words
    assert set_aside(recurrent, CPU) == set_aside(mlp(), CUDA) == []
    with torch.backends.cudnn.flags(enabled=False):
        assert set_aside(recurrent, CUDA) == []
