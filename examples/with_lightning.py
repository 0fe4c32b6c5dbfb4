"""The training of plain_loop.py in Lightning, by manual optimization.

Lightning's wrapper of an optimizer knows `step(closure)` only; SHF's own `step(inputs, targets)` is that of
`self.optimizers(use_pl_optimizer=False)`. Lightning counts global steps by its wrapper, so the step is announced to its
counter: then `trainer.global_step`, logging and the names of checkpoints are as with any other optimizer.

pip install '.[integrations]'; python examples/with_lightning.py --epochs 5
"""

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

import shf
from plain_loop import LOSS, OPTIONS, batches, epochs, errors, network


class Spirals(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.network = network()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return shf.SHF(self.network, LOSS, **OPTIONS)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        if optimizer.epoch_index < self.current_epoch:  # here, because hooks of an epoch are not called on resuming
            optimizer.next_epoch()
        progress = self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
        progress.increment_ready()
        info = optimizer.step(*batch)
        progress.increment_completed()  # this is trainer.global_step
        self.log_dict({"objective": info.loss_after, "damping": info.damping})


def main(count: int, directory: str = "runs/lightning", resume: str | None = None) -> lightning.Trainer:
    """Trains, keeps a checkpoint of every epoch, and returns the trainer."""
    trainer = lightning.Trainer(
        max_epochs=count,
        accelerator="cpu",
        default_root_dir=directory,
        callbacks=[ModelCheckpoint(directory, filename="{step}", save_top_k=-1, save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Spirals(), batches(), ckpt_path=resume)
    return trainer


if __name__ == "__main__":
    done = main(epochs(__doc__))
    print(f"{done.global_step} steps; {errors(done.lightning_module.network)} of 1500 points are wrong")
