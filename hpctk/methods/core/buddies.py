"""A copy of what each rank alone knows, on the rank after it: what a lost rank had not sent is not lost then.

    every K steps   each rank sends the next one its residuals: all tensors that other ranks would have to share if it
                    were not there (`Run.resized_state`, the rule for checkpoints of another number of ranks)
    after a loss    those that are left share out theirs and the copies of lost ranks' by that rule, so that the mean,
                    or the sum, that the method applies is what it was

What a lost rank has changed of them since the copy is lost, at most that of K steps; all of it where its neighbour is
lost, too. Survivors' own tensors are those of now.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from hpctk.collectives.broadcast import broadcast_in_place
from hpctk.collectives.engine.gather_rows import gather_rows
from hpctk.collectives.engine.shift_messages import shift_messages
from hpctk.comm.world import World
from hpctk.errors import SettingError
from hpctk.log import log
from hpctk.methods.core.run import Run
from hpctk.methods.core.survival import Undo, copied

Path = tuple[str, ...]
Tensors = dict[str, torch.Tensor]
#: Of one rank: tensors by name, and where they are in its local state.
Copy = dict[Path, Tensors]


class Buddies:
    """The copies of one optimizer's ranks.

    Parameters
    ----------
    run : Run
    every : int or None
        Steps between two copies; None for no copies: then lost residuals are only counted.
    """

    def __init__(self, run: Run, every: int | None) -> None:
        self._run, self._every = run, every
        #: What became of lost residuals since this was asked last, and in the attempt that is under way.
        self._norms: dict[str, float] = {}
        self._attempted: dict[str, float] = {}
        self._steps = 0
        #: Of the rank before this one, and how many ranks there were; 0 where there are no copies.
        self._held: Copy = {}
        self._size = 0
        #: The numbers that the ranks that are left had then.
        self._ranks: list[int] = []
        #: Ranks there are, and those lost since the residuals were shared out last.
        self._left = run.replica.world.size
        self._lost = 0
        self._due = False

    @staticmethod
    def check(every: int | None, on_lost_rank: str) -> None:
        """Raise SettingError where copies cannot be made, or are of no use."""
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise SettingError(f"buddy={every!r}: need a number of steps, at least 1")
        if every is not None and on_lost_rank != "shrink":
            raise SettingError(f"buddy={every}: is of use with on_lost_rank='shrink' only")

    @property
    def pending(self) -> bool:
        """Whether ranks were lost whose residuals nobody has cared for yet."""
        return self._lost > 0

    def end_step(self, steps: int) -> None:
        """Make copies where they are due; `steps` are those so far, the same on all ranks. Collective then."""
        if self._every is None or self._left == 1 or not (self._due or steps - self._steps >= self._every):
            return
        here = self._run.replica.world

        def exchange() -> Copy:
            return _decoded(shift_messages(here, _encoded(own_copy(self._run))))

        self._held = self._run.replica.together(exchange)
        self._size, self._ranks = here.size, list(range(here.size))
        self._steps, self._due = steps, False

    def forget(self, kept: list[int]) -> None:
        """Take note that ranks are lost, and count them. Local."""
        if self._size:
            self._ranks = [self._ranks[old] for old in kept]
        lost, self._left = self._left - len(kept), len(kept)
        self._lost += lost
        self._run.counts["lost_ranks"] += lost

    def keep(self) -> Undo:
        """Return what puts back what `recover` changes. Local."""
        if not self._found():
            # Nothing: what the attempt itself takes out of residuals is put back by the method, which makes no copy.
            return lambda: None
        run, state = self._run, copied(self._run.kept_state())
        return lambda: run.load_local_state(state)

    def recover(self) -> None:
        """Share out the residuals of all ranks anew, those of lost ones as of their copies. Collective."""
        found = self._found()
        self._attempted = self._measured(found)
        if found:
            earlier = _LiveRanks(self._run, self._held, found)
            self._run.load_recovered(copied(self._run.resized_state(earlier)))

    def _measured(self, found: list[int]) -> dict[str, float]:
        """Return how much there is in the copies, and how much is lost without one. Collective.

        That nobody can know: it is taken for as much as the ranks that are left have themselves, in the mean.
        """
        here = self._run.replica.world
        copies = squared_norm(self._held) if here.rank in found else 0.0
        rows = gather_rows(here, np.array([squared_norm(own_copy(self._run)), copies]))
        lost = (self._lost - len(found)) * float(rows[:, 0].mean())
        return {"lost_residual_norm": lost**0.5, "restored_residual_norm": float(rows[:, 1].sum()) ** 0.5}

    def take_norms(self) -> dict[str, float]:
        """Return the 2-norms of residuals that were lost and restored since this was called last. Local."""
        if not self._norms:
            return self._norms
        norms, self._norms = self._norms, {}
        return norms

    def _found(self) -> list[int]:
        """Return for each lost rank that can be restored who has its copy now."""
        if not self._size:
            return []
        holders = {(old + 1) % self._size: old for old in range(self._size) if old not in self._ranks}
        return [place for place, old in enumerate(self._ranks) if old in holders]

    def commit(self) -> None:
        """Take the residuals for shared out: count what was lost. Local."""
        found, counts = len(self._found()), self._run.counts
        if own_copy(self._run):
            counts["restored_residuals"] += found
            counts["lost_residuals"] += self._lost - found
            for name, norm in self._attempted.items():
                self._norms[name] = (self._norms.get(name, 0.0) ** 2 + norm**2) ** 0.5
            if self._run.replica.world.rank == 0:
                log.warning(
                    "residuals of lost ranks: %d restored from copies (2-norm %.3g), %d lost (about %.3g)",
                    found, self._attempted["restored_residual_norm"],
                    self._lost - found, self._attempted["lost_residual_norm"],
                )  # fmt: skip
        self._held, self._size, self._ranks, self._lost = {}, 0, [], 0
        # Those of before are of other residuals.
        self._due = True


class _Asked:
    """One rank as the only one that has saved: notes what is asked of every rank."""

    size = 1

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state
        self.found: Copy = {}

    def each(self, *path: str) -> Iterator[Any]:
        value = self.first(*path)
        if isinstance(value, dict):
            self.found[path] = value
        return iter([value])

    def first(self, *path: str) -> Any:
        return _at(self._state, path)


class _LiveRanks:
    """The states of the ranks that live, and copies of lost ones': what `Run.resized_state` asks. Collective.

    What is not tensors by name stays this rank's own: it is no share of anything.
    """

    def __init__(self, run: Run, held: Copy, holders: list[int]) -> None:
        self._run, self._held, self._holders = run, held, holders
        self._here, self._state = run.replica.world, run.kept_state()
        self.size = self._here.size + len(holders)

    def each(self, *path: str) -> Iterator[Any]:
        mine = self.first(*path)
        if not isinstance(mine, dict):
            yield mine
            return
        for rank in range(self._here.size):
            yield _shared(self._here, rank, mine)
        for holder in self._holders:
            theirs = self._run.of_now(path, self._held) if self._here.rank == holder else {}
            yield _shared(self._here, holder, theirs)

    def first(self, *path: str) -> Any:
        return _at(self._state, path)


def _at(state: Any, path: Path) -> Any:
    for key in path:
        state = state[key]
    return state


def own_copy(run: Run) -> Copy:
    """Return what this rank alone knows and others would have to share, in a form that lasts. Local."""
    asked = _Asked(run.kept_state())
    run.resized_state(asked)
    return {path: run.lasting(path, tensors) for path, tensors in asked.found.items() if tensors}


def squared_norm(copy: Copy) -> float:
    """Return the squared 2-norm of all tensors of a copy, summed in float64. Local."""
    return sum(float(x.double().square().sum()) for tensors in copy.values() for x in tensors.values())


def _shared(here: World, root: int, tensors: Tensors) -> Tensors:
    """Return root's tensors. Collective over the communicator. Not in place."""
    described = [(name, str(x.dtype).removeprefix("torch."), list(x.shape)) for name, x in tensors.items()]
    text = here.broadcast_bytes(json.dumps(described).encode(), root, "sharing residuals")
    copies = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in json.loads(text.decode())}
    if here.rank == root:
        copies = {name: x.detach().clone(memory_format=torch.contiguous_format) for name, x in tensors.items()}
    broadcast_in_place(here, list(copies.values()), root)
    return copies


def _encoded(copy: Copy) -> Any:
    """Return tensors as one row of bytes: the length of a JSON text, the text, and what it describes."""
    rows = [(path, name, x.detach().cpu().contiguous()) for path, named in copy.items() for name, x in named.items()]
    described = [(path, name, str(x.dtype).removeprefix("torch."), list(x.shape)) for path, name, x in rows]
    text = json.dumps(described).encode()
    parts = [np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8)]
    return np.concatenate([*parts, *(x.reshape(-1).view(torch.uint8).numpy() for *_, x in rows)])


def _decoded(data: Any) -> Copy:
    """Return what `_encoded` was given."""
    raw = torch.from_numpy(np.array(data, np.uint8))
    at = 8 + int.from_bytes(data[:8].tobytes(), "little")
    copy: Copy = {}
    for path, name, kind, shape in json.loads(data[8:at].tobytes()):
        dtype = getattr(torch, kind)
        nbytes = torch.empty((), dtype=dtype).element_size() * int(np.prod(shape, dtype=np.int64))
        copy.setdefault(tuple(path), {})[name] = raw[at : at + nbytes].clone().view(dtype).view(shape)
        at += nbytes
    return copy
