"""The same training in a plain loop and with Accelerate's prepared model, loader and optimizer."""

import pytest
import torch

import plain_loop
import shf
from helpers import theta

EPOCHS = 2


def train(epochs, save=None, resume=None):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = plain_loop.network()
    optimizer = shf.SHF(model, plain_loop.LOSS, **plain_loop.OPTIONS)
    model, loader, optimizer = accelerator.prepare(model, plain_loop.batches(), optimizer)
    if resume is not None:
        accelerator.load_state(str(resume))
    for _ in range(epochs):
        for inputs, targets in loader:
            optimizer.step(shf.batch(inputs, targets))
            info = optimizer.optimizer.info
            assert info.loss_after <= info.loss_before
        optimizer.optimizer.next_epoch()
    if save is not None:
        accelerator.save_state(str(save))
    return accelerator.unwrap_model(model), optimizer


def test_the_same_steps_and_on_from_a_saved_state(tmp_path):
    assert torch.equal(theta(train(EPOCHS, save=tmp_path)[0]), theta(plain_loop.main(EPOCHS)))
    assert torch.equal(theta(train(1, resume=tmp_path)[0]), theta(plain_loop.main(EPOCHS + 1)))


def test_a_step_without_a_batch_is_answered_with_the_page():
    _, optimizer = train(0)
    with pytest.raises(TypeError, match=r"^step got no batch: .*docs/integrations\.md#accelerate$"):
        optimizer.step()
