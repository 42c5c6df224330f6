"""The model that a method wants evaluated, in the place of the one that is trained, for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from hpctk.collectives.compressed_mean import dense_mean
from hpctk.methods.core.method import Run


@contextmanager
def averaged_model(run: Run, counting: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Let the model hold what the method wants evaluated, on every rank; afterwards what it held before.

    Collective over the communicator at its beginning. Floating point buffers are averaged, too, where the model is
    known. `counting` returns a context in which collectives are counted.
    """
    replica = run.replica
    kept, kept_buffers = replica.copies(), {name: x.clone() for name, x in replica.buffers.items()}
    with counting():
        # Not every method exchanges anything here: ranks that are elsewhere are to hear of it all the same.
        replica.world.barrier("averaged_model()")
    with counting(), replica.world.calling("averaged_model"):
        target = run.evaluated_parameters()
        averaged = {name: x.clone() for name, x in kept_buffers.items() if x.is_floating_point()}
        dense_mean(replica.world, averaged, replica.schedule, "buffers")
    if target is not None:
        replica.load(target)
    _load(replica.buffers, averaged)
    try:
        yield
    finally:
        replica.load(kept)
        _load(replica.buffers, kept_buffers)


def _load(buffers: dict[str, torch.Tensor], values: dict[str, torch.Tensor]) -> None:
    """Overwrite buffers in place, by name: a module may hold another tensor under the same name by now."""
    for name, value in values.items():
        buffers[name].copy_(value)
