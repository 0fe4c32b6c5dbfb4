"""The same training in a plain loop, in Lightning and in Accelerate: the same parameters; counters and checkpoints work."""

import warnings

import pytest
import torch

import plain_loop
from helpers import theta

EPOCHS, BATCHES = 2, 3


@pytest.fixture(scope="module")
def expected():
    return theta(plain_loop.main(EPOCHS))


def test_the_plain_loop_learns():
    assert plain_loop.errors(plain_loop.main(EPOCHS)) < 0.5 * plain_loop.errors(plain_loop.network())


def test_lightning_takes_the_same_steps_and_counts_them(expected, tmp_path):
    pytest.importorskip("lightning")
    import with_lightning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message=".*manual optimization")  # what Lightning says of checkpoints by step
        trainer = with_lightning.main(EPOCHS, str(tmp_path))
        assert torch.equal(theta(trainer.lightning_module), expected)
        assert trainer.global_step == EPOCHS * BATCHES
        saved = sorted(path.name for path in tmp_path.glob("*.ckpt"))
        assert saved == ["last.ckpt", "step=3.ckpt", "step=6.ckpt"]
        assert trainer.callback_metrics["damping"] > 0

        # from the last checkpoint on: λ, γ and δ are those of a run without a break
        continued = with_lightning.main(EPOCHS + 1, str(tmp_path / "on"), resume=str(tmp_path / "last.ckpt"))
    assert continued.global_step == (EPOCHS + 1) * BATCHES
    assert torch.equal(theta(continued.lightning_module), theta(plain_loop.main(EPOCHS + 1)))


def test_accelerate_takes_the_same_steps_and_goes_on_from_its_state(expected, tmp_path, capsys):
    pytest.importorskip("accelerate")
    import with_accelerate

    assert torch.equal(theta(with_accelerate.main(EPOCHS, save=tmp_path)), expected)
    assert capsys.readouterr().out.count("damping") == EPOCHS
    continued = with_accelerate.main(1, resume=tmp_path)
    assert torch.equal(theta(continued), theta(plain_loop.main(EPOCHS + 1)))
