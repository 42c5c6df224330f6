"""Save a training: every rank its own file, then the index that makes it count. Load it on all ranks or on none."""

from __future__ import annotations

import json
import uuid
from contextlib import AbstractContextManager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpctk._version import __version__
from hpctk.checkpoint import folder, rank_file, resize, training, tree
from hpctk.checkpoint.folder import Index
from hpctk.checkpoint.rank_file import Header, Seal
from hpctk.checkpoint.training import Trainer
from hpctk.collectives.engine.gather_rows import gather_rows
from hpctk.collectives.tuning import auto
from hpctk.comm.collective import collective
from hpctk.comm.world import World
from hpctk.errors import PeerError


@collective
def save_checkpoint(path: str | Path, opt: Trainer, model: torch.nn.Module, **extra: Any) -> Path:
    """Save all that training goes on from, and return the folder of this checkpoint.

    Between two steps. The last two checkpoints in the folder are kept.
    An error on one rank is raised on all, and leaves the checkpoints that are there as they were. With asynchronous
    GRAWA save right after a round: elsewhere ranks are in different steps and would wait for each other.

    Parameters
    ----------
    path : str or Path
        A folder for checkpoints of this training; made where it is missing.
    opt : DistributedOptimizer
        Or what hpctk.ddp.attach returned, or a hpctk.horovod.Compression; keep their optimizer as an extra.
    model : torch.nn.Module
    **extra
        What else to go on from: numbers, strings, tensors, lists and dicts of them, or objects with a state_dict()
        such as learning rate schedulers. `load_checkpoint` returns it.
    """
    return opt.together(lambda: _save(Path(path), opt, model, extra))


def _save(home: Path, opt: Trainer, model: torch.nn.Module, extra: dict[str, Any]) -> Path:
    """Save; where a rank is lost meanwhile, those that are left begin anew. Collective over the communicator."""
    here = opt.world
    here.agree("save_checkpoint", [("path", home), ("extra", sorted(extra))])
    auto.current(here)
    with here.shared_errors(f"saving a checkpoint in {home}"):
        opt.check_between_steps("save_checkpoint()")
        writer = tree.Writer()
        structure = json.dumps(writer.encode(training.capture(opt, model, extra)))
    chosen = here.run_on_root(f"saving a checkpoint in {home}", lambda: _begin(home, opt.stats.steps))
    # First: what a killed job has left may be what fills the disk.
    _remove(here, home, chosen["unfinished"])
    place: Path = home / chosen["place"]
    mine = place / rank_file.name(here.rank)
    header = Header(chosen["checkpoint"], here.rank, here.size)
    try:
        with here.shared_errors(f"saving a checkpoint in {home}"):
            # On a disk of its own, where ranks share none.
            place.mkdir(parents=True, exist_ok=True)
            seal = rank_file.write(mine, header, structure, writer.arrays)
    except PeerError:
        mine.unlink(missing_ok=True)
        if here.rank == 0:
            folder.remove(place)
        raise
    # From here on nobody removes anything: rank 0 may be lost, and the index be there all the same.
    rows = gather_rows(here, np.array([seal.nbytes, seal.crc32], np.int64))
    seals = tuple(Seal(int(nbytes), int(crc32)) for nbytes, crc32 in rows)
    index = Index(
        header.checkpoint, opt.stats.steps, here.size, datetime.now(UTC).isoformat(timespec="seconds"),
        __version__, training.settings(opt), seals,
    )  # fmt: skip
    here.run_on_root(f"saving a checkpoint in {home}", lambda: folder.write_index(place, index))
    _remove(here, home, here.run_on_root("looking for old checkpoints", lambda: folder.outdated(home)))
    return place


def _remove(here: World, home: Path, names: list[str]) -> None:
    """Remove checkpoints, by one rank on each node: nodes may have disks of their own."""
    if here.local_rank == 0:
        for name in names:
            folder.remove(home / name)


def _begin(home: Path, step: int) -> dict[str, Any]:
    """Make the folder of the next checkpoint, on rank 0's disk; name those that did not come to their end."""
    home.mkdir(parents=True, exist_ok=True)
    place, unfinished = folder.next_place(home, step), folder.unfinished(home)
    place.mkdir()
    return {"place": place.name, "checkpoint": uuid.uuid4().hex, "unfinished": unfinished}


@collective
def load_checkpoint(path: str | Path, opt: Trainer, model: torch.nn.Module, *, strict: bool = True) -> dict[str, Any]:
    """Let training go on from a checkpoint, and return what `save_checkpoint` was given as extra.

    With as many ranks as saved it, training goes on bit for bit
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
    place = Path(here.run_on_root(what, lambda: str(folder.newest(Path(path)))))
    # As rank 0 sees it: ranks may have disks of their own.
    text = here.run_on_root(what, lambda: folder.read_index(place).to_json())
    index = folder.index_from_json(place, text)
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
