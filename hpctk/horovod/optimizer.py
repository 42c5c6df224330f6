"""DistributedOptimizer in the place of Horovod's: every method, and what Horovod's users expect of an optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

import hpctk.optimizer
from hpctk.errors import SettingError
from hpctk.horovod.install import horovod
from hpctk.horovod.process_sets import communicator
from hpctk.methods.core.method import Method
from hpctk.methods.core.run import Closure

if TYPE_CHECKING:
    from mpi4py import MPI


class _StateMaker(hpctk.optimizer.DistributedOptimizer):
    """What hvd.broadcast_optimizer_state sees of the optimizer: a step that makes the base optimizer's state."""

    def step(self, closure: Closure | None = None, *, loss: Any = None, grad_scaler: Any = None) -> Any:
        """Let the base optimizer make its state on the zeros that Horovod put into .grad. Local.

        The parameters are put back: weight decay moves them even then, and not on ranks that have state already.
        """
        with self._replica.float32():
            kept = self._replica.copies()
            self._base.step()
            self._replica.load(kept)


class DistributedOptimizer(_StateMaker):
    """An optimizer whose steps are shared by all ranks of Horovod, or of a process set.

    Does what hpctk.DistributedOptimizer does, see there for the parameters. hvd.init() may come before or after;
    hvd.broadcast_parameters and hvd.broadcast_optimizer_state work. What a rank alone knows (residuals) is in
    local_state_dict(), where no broadcast finds it.

    Parameters
    ----------
    process_set : hvd.ProcessSet, optional
        Train on these ranks only; only they may make the optimizer.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        method: Method,
        *,
        model: torch.nn.Module | None = None,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
        process_set: Any = None,
        comm: MPI.Intracomm | None = None,
        **settings: Any,
    ) -> None:
        if settings.setdefault("on_lost_rank", "raise") != "raise":
            raise SettingError(
                "on_lost_rank='shrink': not under Horovod, whose own communicators do not outlive a rank"
            )
        members = communicator(horovod(), process_set, comm)
        if members is None:
            raise SettingError(
                f"process_set={process_set}: this rank is not in it. Make the optimizer on its ranks only."
            )
        super().__init__(optimizer, method, model=model, named_parameters=named_parameters, comm=members, **settings)
        # How hvd.broadcast_optimizer_state tells optimizers whose step() is collective: it calls their parent's then.
        self.__module__ = "horovod.torch.optimizer"

    def step(self, closure: Closure | None = None, *, loss: Any = None, grad_scaler: Any = None) -> Any:
        """Do one step, and return what the closure returns; see hpctk.DistributedOptimizer.step."""
        return hpctk.optimizer.DistributedOptimizer.step(self, closure, loss=loss, grad_scaler=grad_scaler)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Do nothing: step() knows by itself that synchronize() was called. As Horovod's users write it."""
        yield
