"""The training of plain_loop.py in Hugging Face Accelerate.

Accelerate prepares model and loader. The optimizer is left as it is: SHF's `step` takes a batch, which Accelerate's wrapper
does not know, and SHF needs neither `accelerator.backward` nor gradient accumulation. With several processes SHF sums over
them by itself. `register_for_checkpointing` makes it part of `save_state` and `load_state`.

pip install '.[integrations]'; accelerate launch examples/with_accelerate.py --epochs 5
"""

from pathlib import Path

from accelerate import Accelerator
from torch import nn

import shf
from plain_loop import LOSS, OPTIONS, batches, epochs, errors, network


def main(count: int, save: Path | None = None, resume: Path | None = None) -> nn.Module:
    """Trains for some epochs, from a saved state if there is one, and saves the state."""
    accelerator = Accelerator(cpu=True)
    model, loader = accelerator.prepare(network(), batches())
    optimizer = shf.SHF(model, LOSS, **OPTIONS)
    accelerator.register_for_checkpointing(optimizer)
    if resume is not None:
        accelerator.load_state(str(resume))
    for _ in range(count):
        for inputs, targets in optimizer.epoch(loader):
            info = optimizer.step(inputs, targets)
        accelerator.print(f"objective {info.loss_after:.4f}, damping {info.damping:.3g}")
    if save is not None:
        accelerator.save_state(str(save))
    return accelerator.unwrap_model(model)


if __name__ == "__main__":
    print(f"{errors(main(epochs(__doc__)))} of 1500 points are wrong")
