"""Load a training: check every file first, then put everything back, on all ranks or on none."""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hpctk.checkpoint import folder, rank_file, resize, training, tree
from hpctk.checkpoint.folder import Index
from hpctk.checkpoint.rank_file import Header
from hpctk.checkpoint.training import Trainer
from hpctk.collectives.tuning import auto
from hpctk.comm.world import World
from hpctk.errors import PeerError


def load_checkpoint(
    path: str | Path, opt: Trainer, model: torch.nn.Module, *, strict: bool = True
) -> dict[str, Any]:
    """Let training go on from a checkpoint, and return what `save_checkpoint` was given as extra.

    Collective over the optimizer's communicator. With as many ranks as saved it, training goes on bit for bit
    (asynchronous GRAWA excepted). With another number, residuals are dealt out so that what the method applies is
    conserved; see docs/checkpoints.md for the rest. If anything is wrong on any rank, every rank raises the same
    error, and model and optimizer are what they were.

    Parameters
    ----------
    path : str or Path
        A folder of checkpoints, of which the newest whole one is meant, or one of them.
    opt : DistributedOptimizer
        Made with the method that saved it, and its settings.
    model : torch.nn.Module
    strict : bool
        Whether other settings of the method are an error; another method is one in any case.
    """
    here = opt.world
    here.agree("load_checkpoint", [("path", path), ("strict", strict)])
    what = f"loading a checkpoint from {path}"
    auto.current(here)
    opt.begin()
    place, index = found(here, Path(path), what)
    try:
        with here.shared_errors(what):
            opt.check_between_steps("load_checkpoint()")
            training.check_alike(opt, index.settings, strict=strict)
            for rank in range(here.rank, index.ranks, here.size):
                rank_file.check(place / rank_file.name(rank), index.seals[rank])
        return _put_back(here, place, index, opt, model, what)
    except PeerError as error:
        earlier = None
        with suppress(OSError):
            earlier = folder.before(place)
        hint = f" The checkpoint before it is {earlier}; load it by that name." if earlier else ""
        raise PeerError(f"{error}{hint}") from error


def found(here: World, path: Path, what: str) -> tuple[Path, Index]:
    """Return the checkpoint that a path means, and its index, as rank 0 sees them. Collective."""
    name = here.run_on_root(what, lambda: str(folder.newest(path)))
    place = Path(name)
    text = here.run_on_root(what, lambda: folder.read_index(place).to_json())
    return place, folder.index_from_json(place, text)


def _put_back(
    here: World, place: Path, index: Index, opt: Trainer, model: torch.nn.Module, what: str
) -> dict[str, Any]:
    """Read this rank's part and put it back. Collective over the communicator."""
    same = index.ranks == here.size
    opener = partial(_opened, place, index)
    with here.shared_errors(what):
        before = training.copied(training.capture(opt, model, {}))
    try:
        with here.shared_errors(what):
            if same:
                with opener(here.rank) as file:
                    state = tree.read(file)
                training.put_back(opt, model, state)
                extra: dict[str, Any] = state["extra"]
            else:
                extra = resize.put_back(opt, model, index.ranks, opener)
    except PeerError:
        training.put_back(opt, model, before)
        raise
    return extra


def _opened(place: Path, index: Index, rank: int) -> AbstractContextManager[Any]:
    return rank_file.opened(place / rank_file.name(rank), Header(index.checkpoint, rank, index.ranks))
