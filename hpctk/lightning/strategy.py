"""A strategy of Lightning's Trainer whose optimizer is a hpctk.ddp.DistributedOptimizer.

Lightning's DDP strategy does what is not about gradients: it starts processes or finds those that torchrun or Slurm
have started, joins them, deals out the data. The model is not wrapped in DistributedDataParallel, which would average
all gradients in full before a method sees them.

A checkpoint of Lightning holds what rank 0 knows. What each rank alone knows, residuals and the like, goes into a
folder beside it, NAME.ckpt.hpctk, by hpctk.save_checkpoint, and is removed with it.
"""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy

from hpctk import ddp
from hpctk.checkpoint import load_checkpoint, save_checkpoint
from hpctk.errors import SettingError
from hpctk.log import log
from hpctk.methods.core.method import Method
from hpctk.metrics import OnStep


# Lightning is Any to mypy, which does not look into it.
class Strategy(DDPStrategy):  # type: ignore[misc]
    """Train by a method, one process per device.

    With `gradient_clip_val` of the Trainer a gradient method exchanges first, and what comes of it is clipped, the same
    on all ranks. Other methods exchange what local steps have changed: there it is refused, CELGC and EPISODE clip by
    themselves. One optimizer, automatic optimization.

    Parameters
    ----------
    method : Method
        Such as hpctk.SAEF(hpctk.TopK(0.01)).
    metrics : callable or sequence of callables
        Told of every step, see hpctk.metrics.
    options : mapping, optional
        Of hpctk.ddp.DistributedOptimizer: schedule, overlap, stats, on_bad_gradient, check_every.
    **ddp_strategy
        Of Lightning's DDPStrategy: process_group_backend, timeout, cluster_environment, start_method.
    """

    strategy_name = "hpctk"
    optimizers: Any

    def __init__(self, method: Method, *, metrics: Any = (), options: Any = None, **ddp_strategy: Any) -> None:
        if not isinstance(method, Method):
            raise SettingError(f"method={method!r}: need a method such as hpctk.AdaCons()")
        super().__init__(**ddp_strategy)
        self.method = method
        self._metrics: tuple[OnStep, ...] = (metrics,) if callable(metrics) else tuple(metrics)
        self._options = dict(options or {})
        #: The optimizer that exchanges, once training has begun.
        self.distributed: ddp.DistributedOptimizer | None = None
        self._loaded_from: Path | None = None

    def configure_ddp(self) -> None:
        """Leave the model as it is: its gradients are the method's to exchange."""

    def setup_optimizers(self, trainer: Any) -> None:
        """Make the module's optimizer one whose steps all ranks share. Collective over the ranks."""
        super().setup_optimizers(trainer)
        module = self.lightning_module
        self._check(trainer, module)
        self.distributed = ddp.DistributedOptimizer(self.optimizers[0], self.method, model=module, **self._options)
        for on_step in self._metrics:
            self.distributed.add_metrics(on_step)
        self.optimizers = [self.distributed]
        if trainer.gradient_clip_val:
            trainer.callbacks.append(ExchangeBeforeClipping())

    def _check(self, trainer: Any, module: Any) -> None:
        if len(self.optimizers) != 1:
            raise SettingError(
                f"configure_optimizers gives {len(self.optimizers)} optimizers: hpctk.lightning.Strategy takes one, "
                "put all parameters into groups of it"
            )
        if not module.automatic_optimization:
            raise SettingError(
                "automatic_optimization=False: hpctk.lightning.Strategy steps once for each batch, or for as many as "
                "accumulate_grad_batches says"
            )
        if trainer.gradient_clip_val and self.method.kind != "gradient":
            raise SettingError(
                f"gradient_clip_val={trainer.gradient_clip_val}: {type(self.method).__name__} exchanges no gradients, "
                "Lightning would clip each rank's own. Use a method that clips, hpctk.CELGC or hpctk.EPISODE, or a "
                "gradient method, such as hpctk.Mean with a compressor"
            )

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write Lightning's checkpoint, and beside it what each rank alone knows. Collective over the ranks."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self.distributed is not None and "optimizer_states" in checkpoint:
            beside = _beside(filepath)
            # A file of the same name is written over, so must the folder be: else two of them lie in it.
            self.distributed.world.run_on_root("removing an old checkpoint", lambda: _remove(beside))
            save_checkpoint(beside, self.distributed, self.lightning_module)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read Lightning's checkpoint, and note where the rest is."""
        self._loaded_from = Path(checkpoint_path)
        read: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        return read

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Load the optimizer's state, and what this rank alone knows. Collective over the ranks."""
        super().load_optimizer_state_dict(checkpoint)
        assert self.distributed is not None
        here, path = self.distributed.world, self._loaded_from
        if path is None:
            return
        if here.run_on_root("looking for a checkpoint", lambda: _beside(path).is_dir()):
            load_checkpoint(_beside(path), self.distributed, self.lightning_module)
        elif here.rank == 0:
            log.warning(
                "%s is not there: training goes on with the model and the optimizer of %s, without residuals or "
                "whatever else %s keeps",
                _beside(path), path, type(self.method).__name__,
            )  # fmt: skip

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, and what lies beside it."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            _remove(_beside(filepath))


# As above.
class ExchangeBeforeClipping(Callback):  # type: ignore[misc]
    """Exchanges gradients right before Lightning clips them. Added by the strategy where they are to be clipped."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Exchange the gradients. Collective over the ranks."""
        trainer.strategy.distributed.synchronize()


# As above.
class AveragedModel(Callback):  # type: ignore[misc]
    """Validate the model that the method wants evaluated: for model methods the mean of all ranks' models.

    ModelCheckpoint saves after validation, when each rank has its own model back.
    """

    def __init__(self) -> None:
        super().__init__()
        self._inside = ExitStack()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Put the averaged model in the place of this rank's. Collective over the ranks."""
        if isinstance(trainer.strategy, Strategy) and trainer.strategy.distributed is not None:
            self._inside.enter_context(trainer.strategy.distributed.averaged_model())

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Put this rank's model back."""
        self._inside.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Put this rank's model back."""
        self._inside.close()


def _beside(path: Any) -> Path:
    given = Path(path)
    return given.with_name(f"{given.name}.hpctk")


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
