"""A checkpoint of another number of ranks: what every new rank goes on from.

model      gradient and update methods: the parameters are the same on all ranks (SAEF writes its own);
model methods: the mean of the workers. Floating point buffers: their mean; others: rank 0's
optimizer  gradient methods: the same on all ranks; others: the mean of its tensors, numbers of rank 0
method     as it says itself (`Run.resized_state`): residuals keep the mean, or the sum, that it applies
random     an earlier rank's own; ranks that were not there keep the generators that their program has seeded
extra      rank 0's
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from hpctk.checkpoint import training, tree
from hpctk.checkpoint.training import Trainer
from hpctk.methods.core import replay
from hpctk.methods.core.resharding import reshard
from hpctk.ways_in.counters import Stats

#: Opens the file of an earlier rank.
Opener = Callable[[int], AbstractContextManager[Any]]


class EarlierRanks:
    """The states of the ranks of an earlier run, those under the key `root`, read when they are asked for."""

    def __init__(self, size: int, opener: Opener, *root: str) -> None:
        self.size, self._opener, self._root = size, opener, root

    def each(self, *path: str) -> Iterator[Any]:
        """Yield what every rank had under a key, in rank order."""
        return (self.of(rank, *path) for rank in range(self.size))

    def first(self, *path: str) -> Any:
        """Return what rank 0 had under a key."""
        return self.of(0, *path)

    def of(self, rank: int, *path: str) -> Any:
        """Return what a rank had under a key."""
        with self._opener(rank) as file:
            return tree.read(file, *self._root, *path)


def put_back(opt: Trainer, model: torch.nn.Module, size: int, opener: Opener) -> dict[str, Any]:
    """Let this rank go on from what `size` ranks were; return the extra of rank 0."""
    whole = EarlierRanks(size, opener)
    rank, kind = opt.world.rank, opt.method.kind
    training.load_model(model, _model(whole, dict(model.named_parameters()), kind))
    opt.load_state_dict(_optimizer(whole, kind))
    opt.load_local_state_dict(opt.resized_local_state_dict(EarlierRanks(size, opener, "method")))
    stats = Stats(**whole.of(rank if rank < size else 0, "stats"))
    if rank >= size:
        # This rank has sent nothing yet, but steps and rounds are everybody's.
        stats = Stats(stats.steps, 0, 0, 0, 0.0, 0, stats.counts)
    opt.load_stats(stats)
    if rank < size:
        replay.restore_random_state(whole.of(rank, "random"))
    extra: dict[str, Any] = whole.first("extra")
    return extra


def _model(whole: EarlierRanks, parameters: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the model to go on from."""
    state: dict[str, Any] = whole.first("model")
    for part, values in state.items():
        averaged = {
            name
            for name, value in values.items()
            if isinstance(value, torch.Tensor) and value.is_floating_point()
            if kind == "model" or name not in parameters
        }
        # Without a pass over all files where all ranks hold the same.
        if averaged:
            rows = ({name: x[name] for name in averaged} for x in whole.each("model", part))
            values |= reshard(rows, whole.size)
    return state


def _optimizer(whole: EarlierRanks, kind: str) -> dict[str, Any]:
    """Return the base optimizer's state to go on from; what a rank had no momentum of counts as zeros."""
    kept: dict[str, Any] = whole.first("optimizer")
    # Of nobody, where the optimizer is not hpctk's.
    if kind != "gradient" and kept:

        def rows() -> Iterator[dict[tuple[int, str], torch.Tensor]]:
            for state in whole.each("optimizer", "state"):
                # What is no mean, such as a number of steps, is that of the first rank which has it.
                kept["state"] = {**state, **kept["state"]}
                yield _large(state)

        for (number, key), mean in reshard(rows(), whole.size).items():
            kept["state"][number][key] = mean
    return kept


def _large(state: dict[int, dict[str, Any]]) -> dict[tuple[int, str], torch.Tensor]:
    """Return the tensors of an optimizer; not those without dimensions: a mean of steps is no number of steps."""
    return {
        (number, key): value
        for number, one in state.items()
        for key, value in one.items()
        if isinstance(value, torch.Tensor) and value.dim()
    }
