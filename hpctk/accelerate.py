"""hpctk under Accelerate: residuals in the checkpoints of an Accelerator.

The model is left out of `accelerator.prepare`, which would wrap it in DistributedDataParallel and average all gradients
in full before a method sees them; loaders go through it. The optimizer is a hpctk.ddp.DistributedOptimizer:

    accelerator = Accelerator()
    loader = accelerator.prepare(loader)
    opt = hpctk.ddp.DistributedOptimizer(opt, hpctk.SAEF(hpctk.TopK(0.01)), model=model)
    hpctk.accelerate.keep(accelerator, opt, model, rates=scheduler)

Then save_state and load_state keep the model, the optimizer, what the method remembers on each rank, and `rates`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hpctk.checkpoint import load_checkpoint, save_checkpoint
from hpctk.checkpoint.training import Trainer
from hpctk.errors import SettingError

#: The folder within a state that holds what hpctk keeps.
FOLDER = "hpctk"


def keep(accelerator: Any, opt: Trainer, model: torch.nn.Module, **extra: Any) -> None:
    """Let `save_state` and `load_state` of an accelerator keep a training by hpctk. Local; on all ranks.

    Parameters
    ----------
    accelerator : accelerate.Accelerator
    opt : hpctk.ddp.DistributedOptimizer
        Or what hpctk.ddp.attach returned for a model that went through `prepare`; its optimizer is then the
        accelerator's affair.
    model : torch.nn.Module
        The bare one.
    **extra
        Objects with state_dict() and load_state_dict(), such as learning rate schedulers that did not go through
        `prepare`.
    """
    for name, value in extra.items():
        if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
            raise SettingError(f"{name}={value!r}: need an object with state_dict() and load_state_dict()")
    if not hasattr(accelerator, "register_save_state_pre_hook"):
        raise SettingError(f"accelerator={accelerator!r}: need an accelerate.Accelerator")

    def save(models: Any, weights: Any, folder: str) -> None:
        save_checkpoint(Path(folder) / FOLDER, opt, model, **extra)

    def load(models: Any, folder: str) -> None:
        kept = load_checkpoint(Path(folder) / FOLDER, opt, model)
        for name, value in extra.items():
            value.load_state_dict(kept[name])

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
