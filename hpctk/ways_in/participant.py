"""What all ways in have in common once a method is at work: its ranks, its statistics, what this rank alone knows."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, TypeVar

import torch

from hpctk.collectives.dense_mean import dense_mean
from hpctk.comm.world import World
from hpctk.log import log
from hpctk.methods.core.masters import HALVES
from hpctk.methods.core.replica import Replica
from hpctk.methods.core.resharding import SavedRanks
from hpctk.methods.core.run import Run
from hpctk.metrics import OnStep
from hpctk.ways_in.counters import Counters, Stats

T = TypeVar("T")


def note_one_rank(world: World) -> None:
    """Say, once in a process, where a rank is alone that nothing is exchanged."""
    if world.size == 1:
        _say_alone()


@cache
def _say_alone() -> None:
    log.warning(
        "one rank, so there is nothing to exchange. Start more with `hpctk mpirun -n 4 python train.py`, "
        "under torch.distributed with `torchrun --nproc-per-node 4 train.py`."
    )


class Participant:
    """A rank's part in a method, as checkpoints and statistics see it."""

    _replica: Replica
    _counters: Counters
    _run: Run

    @property
    def world(self) -> World:
        """The ranks that train together."""
        return self._replica.world

    def together(self, attempt: Callable[[], T]) -> T:
        """Return what `attempt` returns, a collective function of yours that may be called again.

        Collective over the communicator. With on_lost_rank="shrink" it is called anew, on the ranks that are left,
        where one was lost before all had done it; otherwise this is a call like any other.
        """
        return self._replica.together(attempt)

    @contextmanager
    def averaged_model(self) -> Iterator[None]:
        """Let the model hold what the method wants evaluated, on every rank; afterwards what it held before.

        Collective over the communicator at its beginning. Floating point buffers are averaged, too, where the model
        is known.
        """
        with averaged_model(self._run, self._counters.counting):
            yield

    def consensus(self) -> AbstractContextManager[None]:
        """Do as `averaged_model`, whose earlier name this is."""
        warnings.warn("consensus() is averaged_model() now", DeprecationWarning, stacklevel=2)
        return self.averaged_model()

    @property
    def stats(self) -> Stats:
        """What was done on this rank so far."""
        return self._counters.stats(self._run.counts.copy())

    def load_stats(self, stats: Stats) -> None:
        """Go on counting from what an earlier run had counted on this rank."""
        self._counters.load(stats)
        self._run.counts = Counter(stats.counts)

    def add_metrics(self, on_step: OnStep) -> None:
        """Call a function with the hpctk.metrics.StepMetrics of this rank after every step from now on. Local.

        Any function of one argument, hpctk.metrics.TensorBoard or hpctk.metrics.OpenTelemetry.
        """
        self._counters.add_metrics(on_step, self._run.counts)

    def close_stats(self) -> None:
        """Close this rank's statistics file, if there is one. Local; done at exit otherwise."""
        self._counters.close()

    def begin(self) -> None:
        """Do nothing: the method was begun when this was made. For checkpoints."""

    def local_state_dict(self) -> dict[str, Any]:
        """Return what this rank alone knows, such as residuals, by parameter names; not copies."""
        with self._replica.float32():
            return self._run.local_state()

    def load_local_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `local_state_dict` returned on this rank, by this way in or another."""
        with self._replica.float32():
            self._run.load_local_state(state)

    def resized_local_state_dict(self, earlier: SavedRanks) -> dict[str, Any]:
        """Return what to give to `load_local_state_dict` where another number of ranks saved their states."""
        return self._run.resized_state(earlier)


@contextmanager
def averaged_model(run: Run, counting: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Let the model hold what the method wants evaluated, on every rank; afterwards what it held before.

    Collective over the communicator at its beginning. Floating point buffers are averaged, too, where the model is
    known. `counting` returns a context in which collectives are counted.
    """
    replica = run.replica
    kept_buffers = {name: x.clone() for name, x in replica.buffers.items()}

    def average() -> tuple[list[torch.Tensor] | None, dict[str, torch.Tensor]]:
        with counting():
            # Not every method exchanges anything here: ranks that are elsewhere are to hear of it all the same.
            replica.world.barrier("averaged_model()")
        with counting(), replica.world.calling("averaged_model"):
            target = run.evaluated_parameters()
            averaged = {name: _wide_copy(x) for name, x in kept_buffers.items() if x.is_floating_point()}
            dense_mean(replica.world, averaged, replica.schedule, "buffers")
        return target, averaged

    with replica.float32():
        target, averaged = replica.together(average)
        # Not before: where ranks were lost, they may have changed.
        kept = replica.copies()
        if target is not None:
            replica.load(target)
    _load(replica.buffers, averaged)
    run.set_aside = kept
    try:
        yield
    finally:
        run.set_aside = None
        with replica.float32():
            replica.load(kept)
        _load(replica.buffers, kept_buffers)


def _wide_copy(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.to(torch.float32 if buffer.dtype in HALVES else buffer.dtype, copy=True)


def _load(buffers: dict[str, torch.Tensor], values: dict[str, torch.Tensor]) -> None:
    """Overwrite buffers in place, by name: a module may hold another tensor under the same name by now."""
    for name, value in values.items():
        buffers[name].copy_(value)
