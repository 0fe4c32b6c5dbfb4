"""The same training in a plain loop and in Lightning, automatic and manual: the same parameters, counters, checkpoints."""

import warnings

import pytest
import torch

import plain_loop
import shf
from helpers import theta

EPOCHS, BATCHES = 2, 3


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def module(*, automatic, take, bases=None):
    import lightning

    from shf.integrations.lightning import SHFMixin

    class Spirals(*(bases or (SHFMixin, lightning.LightningModule))):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = automatic
            self.network = plain_loop.network()

        def configure_optimizers(self):
            return shf.SHF(self.network, plain_loop.LOSS, **plain_loop.OPTIONS)

        def training_step(self, batch, batch_idx):
            loss = take(self, batch)
            self.log("loss", loss, prog_bar=True)
            return loss

    return Spirals()


def fit(model, directory, epochs=EPOCHS, resume=None, **settings):
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    from shf.integrations.lightning import StepLogger

    saves = ModelCheckpoint(directory, filename="{step}", save_top_k=-1, save_last=True)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        default_root_dir=directory,
        callbacks=[saves, StepLogger()],
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        **settings,
    )
    trainer.fit(model, plain_loop.batches(), ckpt_path=resume)
    return trainer


@pytest.mark.parametrize("automatic", [True, False])
def test_the_same_steps_counted_and_saved(automatic, tmp_path):
    def make():
        return module(automatic=automatic, take=lambda self, batch: self.step(*batch))

    trainer = fit(make(), tmp_path)
    assert torch.equal(theta(trainer.lightning_module), theta(plain_loop.main(EPOCHS)))
    assert trainer.global_step == EPOCHS * BATCHES
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["last.ckpt", "step=3.ckpt", "step=6.ckpt"]
    info = trainer.lightning_module.step_info
    assert trainer.progress_bar_metrics["loss"] == pytest.approx(info.loss_before)
    assert trainer.callback_metrics["shf/damping"].item() == pytest.approx(info.damping)
    assert {f"shf/{name}" for name in info.asdict()} <= set(trainer.callback_metrics)

    # from the last checkpoint on: λ, γ and δ are those of a run without a break
    continued = fit(make(), tmp_path / "on", EPOCHS + 1, resume=tmp_path / "last.ckpt")
    assert continued.global_step == (EPOCHS + 1) * BATCHES
    assert torch.equal(theta(continued.lightning_module), theta(plain_loop.main(EPOCHS + 1)))


def test_its_own_logger_has_the_numbers_of_each_step(tmp_path):
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(tmp_path)
    fit(module(automatic=True, take=lambda self, batch: self.step(*batch)), tmp_path, logger=logger)
    lines = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()
    assert "shf/reduction_ratio" in lines[0]
    assert len(lines) == 1 + EPOCHS * BATCHES


def test_a_closure_through_its_wrapper(tmp_path):
    """Without the mixin; all rows are curvature rows."""
    import lightning

    def take(self, batch):
        x, t = batch
        info = self.optimizers().step(lambda: shf.evaluate(self.network(x), t))
        return torch.tensor(info.loss_before)

    model = module(automatic=False, take=take, bases=(lightning.LightningModule,))
    model.configure_optimizers = lambda: shf.SHF(model.network, plain_loop.LOSS, damping=0.01, seed=0)
    trainer = fit(model, tmp_path, epochs=1)
    plain = plain_loop.network()
    optimizer = shf.SHF(plain, plain_loop.LOSS, damping=0.01, seed=0)
    for batch in plain_loop.batches():
        optimizer.step(*batch)
    assert torch.allclose(theta(model), theta(plain), atol=1e-6)
    assert trainer.global_step == BATCHES


def test_a_loss_in_place_of_a_step_is_answered_with_the_page(tmp_path):
    import lightning

    def loss(self, batch):
        return plain_loop.LOSS(self.network(batch[0]), batch[1])

    bare = module(automatic=True, take=loss, bases=(lightning.LightningModule,))
    with pytest.raises(TypeError, match=r"closure that returns its loss: .*docs/integrations\.md#lightning"):
        fit(bare, tmp_path)
    with pytest.raises(TypeError, match=r"return self\.step\(inputs, targets\) in place of the loss"):
        fit(module(automatic=True, take=loss), tmp_path)


def test_gradients_are_not_accumulated(tmp_path):
    with pytest.raises(ValueError, match=r"accumulate_grad_batches=2\): no gradients are accumulated"):
        fit(module(automatic=True, take=lambda self, batch: self.step(*batch)), tmp_path, accumulate_grad_batches=2)
