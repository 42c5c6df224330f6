"""The ranks of a torch.distributed process group: no MPI needed.

    the user's process group (gloo, NCCL or any other)
      │ world(group): made once, collectively, and kept as long as that group lives
      ├── devices  the group itself, for whole tensors on devices that its backend serves (device_group.py)
      ├── group    new_group(the same ranks, gloo): messages of the engine, agreements, torch's own all-reduce
      └── store    that group's key-value store: words that all ranks add to, and the roll call of a lost job

Gloo moves host memory: device tensors that go there are staged, and a warning says so once. A lost connection is an
error at once. What gloo does not know, whom a rank has waited for in vain, the ranks tell each other through the store
when the deadline has passed.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from hpctk.comm import environment, forked, postmortem
from hpctk.comm.agreement import OneThread
from hpctk.comm.buffers import Stager
from hpctk.comm.gpu import GpuAware
from hpctk.comm.torch.allreduce import TorchAllreduce
from hpctk.comm.torch.device_group import DeviceGroup
from hpctk.comm.torch.transport import TorchTransport, end_threads
from hpctk.comm.world import World
from hpctk.errors import PeerError, SettingError
from hpctk.telemetry.recorder import Recorders

#: Between two looks at a collective, and at what goes on in the background.
PAUSE = timedelta(milliseconds=1)
#: Seconds in which a process that has closed its connections is gone.
LEAVE_S = 1.0
#: Seconds that other ranks have at the deadline to say that they wait, too.
ROLL_CALL_S = 1.0


class TorchWorld(World):
    """The ranks of a process group. Made by `world()`, which keeps it; attributes as in World.

    Attributes
    ----------
    group : ProcessGroup
        Gloo, of the same ranks as the user's.
    devices : DeviceGroup
        The user's.
    """

    def __init__(self, theirs: dist.ProcessGroup) -> None:
        self.rank, self.size = dist.get_rank(theirs), dist.get_world_size(theirs)
        self.one_thread = OneThread("torch.distributed.new_group()")
        self.recorders = Recorders(TorchAllreduce.name)
        self.name = "WORLD" if theirs is dist.group.WORLD else f"group {theirs.group_name}"
        self.library = f"torch.distributed {torch.__version__}, gloo"
        self._timeout_s = environment.readable_timeout_s()
        self._neighbours: dict[int, postmortem.Process] = {}
        self._keys = 0
        #: Collectives of the gloo group that were started, and not waited for to a good end.
        self._under_way = 0
        self.background, self.attached = [], {}
        self._ranks = dist.get_process_group_ranks(theirs)
        self.devices = DeviceGroup(self, theirs)
        self.group = self._meet()
        self._store: Any = _get_process_group_store(self.group)
        with self.shared_errors("reading the settings"):
            environment.read("HPCTK_TIMEOUT_S")
        self.nodes = self._find_nodes()
        mine = next(ranks for ranks in self.nodes if self.rank in ranks)
        self.local_rank, self.local_size = mine.index(self.rank), len(mine)
        self.gpu = GpuAware(False, "messages go through gloo, which moves host memory")
        self.stager = Stager(gpu_aware=False, note=self.note_staging)
        self.native = TorchAllreduce(self)
        if self.size > 1:
            postmortem.watch(self.rank, self.size)

    def _meet(self) -> Any:
        try:
            return dist.new_group(
                self._ranks, timeout=timedelta(seconds=self._timeout_s), backend="gloo", use_local_synchronization=True
            )
        except RuntimeError as error:
            raise PeerError(
                f"rank {self.rank} of {self.size} waited for all ranks to start using hpctk: {error}. Every rank must "
                "call hpctk; HPCTK_TIMEOUT_S sets how long to wait."
            ) from error

    @property
    def timeout_s(self) -> float:
        """Seconds this rank waits for others (HPCTK_TIMEOUT_S)."""
        return self._timeout_s

    def device_group(self, tensor: Any) -> DeviceGroup | None:
        """Return the collectives that take a device tensor where it lies, None where none does."""
        return self.devices if tensor.device.type in self.devices.served else None

    def why_staged(self, device: str) -> str:
        """Return why tensors of a type of device come to the host, and what to do, as a sentence."""
        backend = self.devices.served.get(device)
        if backend is None:
            other = "nccl" if device == "cuda" else "the backend of that device"
            return (
                f"{self.name} has no backend that takes them. Give it one: "
                f"init_process_group('cpu:gloo,{device}:{other}')"
            )
        return (
            f"what this method or schedule sends is cut up on the host, {backend} moves whole tensors only. Mean with "
            "any compressor but TopK(keep=True), and all that sums models, go by it with schedule='auto'"
        )

    def transport(self) -> TorchTransport:
        """Return what moves bytes between these ranks."""
        return TorchTransport(self)

    def _minimum(self, values: Sequence[int], operation: str) -> list[int]:
        """Return the smallest of all ranks' `values` at each position. Collective over the communicator."""
        least = torch.tensor(values, dtype=torch.int64)
        self._do(operation, lambda: dist.all_reduce(least, dist.ReduceOp.MIN, group=self.group, async_op=True))
        return list(least.tolist())

    def _broadcast(self, data: bytearray, root: int, operation: str) -> None:
        """Overwrite `data` by root's. Collective over the communicator. In place."""
        tensor = torch.frombuffer(data, dtype=torch.uint8)

        def start() -> Any:
            return dist.broadcast(tensor, self._ranks[root], group=self.group, async_op=True)

        self._do(operation, start, [root])

    def barrier(self, operation: str = "barrier") -> None:
        """Return once every rank is here. Collective over the communicator."""
        self.minimum([], operation)

    def _do(self, operation: str, start: Callable[[], Any], peers: Iterable[int] = ()) -> None:
        if self.size == 1:
            return
        with self.one_thread:
            try:
                work = self.begin(start)
            except RuntimeError as error:
                raise self.lost(operation, peers, error) from error
            self.wait(work, operation, peers)

    def begin(self, start: Callable[[], Any]) -> Any:
        """Start a collective of the gloo group; return what `wait` wants. Collective over the communicator."""
        self._under_way += 1
        return start()

    def wait(self, work: Any, operation: str, peers: Iterable[int] = ()) -> None:
        """Wait for a collective that was begun, once; raise PeerError that names `operation` at the deadline."""
        waiter = self.waiter(operation, lambda: _look(work))
        while not work.is_completed():
            waiter.pause(lambda: peers)
        try:
            work.wait()
        except RuntimeError as error:
            raise self.lost(operation, peers, error) from error
        self._under_way -= 1

    def close(self) -> None:
        """Let gloo's threads end, unless they wait for somebody. Local; nothing can be sent afterwards.

        They free tensors for which they need the GIL. A thread that asks for it while the interpreter ends takes the
        process down.
        """
        if self._under_way == 0:
            group, self.group, self._store = self.group, None, None
            # Unless the program has done so itself.
            if dist.is_initialized():
                with contextlib.suppress(RuntimeError, ValueError):
                    dist.destroy_process_group(group)

    def waiter(self, operation: str, pause: Callable[[], None]) -> Waiter:
        """Return what to do between two looks at messages; `pause` waits for a moment, or until one is there."""
        return Waiter(self, operation, pause)

    def work(self) -> bool:
        """Go on with everything in the background; return whether anything got done."""
        done = False
        for step in self.background:
            done |= step()
        return done

    def new_key(self, what: str) -> str:
        """Return a key of the store that nobody uses; the same on all ranks, which ask in the same order."""
        self._keys += 1
        return f"hpctk/{what}/{self._keys}"

    def add_to_key(self, key: str, value: int, operation: str) -> int:
        """Add to a number in the store in one atomic step, and return the sum. Not collective."""
        try:
            return int(self._store.add(key, value))
        except RuntimeError as error:
            raise self.lost(operation, (), error) from error

    def lost(self, operation: str, peers: Iterable[int], error: Exception | None = None) -> PeerError:
        """Return the error for a wait in vain: for a lost connection, or at the deadline."""
        operation = self.wait_name(operation)
        who, named = f"rank {self.rank} of {self.size}", list(peers)
        broken = error is not None and not _timed_out(error)
        dead = self._dead(LEAVE_S if broken else 0.0)
        if dead:
            return PeerError(
                f"{who} waits in {operation}, but rank {_shown(dead)} has ended and will never come. Every rank must "
                "make the same collective calls."
            )
        if broken:
            whom = f"rank {_shown(named)}" if named else "another rank"
            return PeerError(f"{who} has lost {whom} in {operation}: {error}")
        lines = [f"{who} waited {self.timeout_s:g} s in {operation}", *self._missing_ranks(operation)]
        return PeerError("; ".join([*lines, "HPCTK_TIMEOUT_S sets how long to wait"]) + ".")

    def _dead(self, patience_s: float) -> list[int]:
        """Return the ranks of this node whose processes have ended, or do so soon."""
        deadline = time.monotonic() + patience_s
        while True:
            dead = [rank for rank, process in self._neighbours.items() if not process.is_alive()]
            if dead or time.monotonic() >= deadline:
                return dead
            time.sleep(0.01)

    def _missing_ranks(self, operation: str) -> list[str]:
        """Return who did not come to say that they wait, too, and who waits elsewhere."""
        keys = {rank: f"hpctk/gave up/{rank}" for rank in range(self.size) if rank != self.rank}
        try:
            first = not any(self._store.check([key]) for key in keys.values())
            self._store.set(f"hpctk/gave up/{self.rank}", operation)
            deadline = time.monotonic() + ROLL_CALL_S
            while (missing := [r for r in keys if not self._store.check([keys[r]])]) and time.monotonic() < deadline:
                time.sleep(0.01)
            answers = {r: self._store.get(key).decode() for r, key in keys.items() if r not in missing}
        except RuntimeError:
            return ["who did not come is not known, the store does not answer"]
        if first:
            # The first to give up has the stuck ranks shown; the others would only repeat it.
            postmortem.show_stuck({r: self._neighbours[r] for r in missing if r in self._neighbours})
        lines = (
            [f"rank {_shown(missing)} did not come and does not answer: stuck, computing or dead"] if missing else []
        )
        return lines + [f"rank {r} waits in {text}" for r, text in list(answers.items())[:8] if text != operation]

    def _find_nodes(self) -> tuple[tuple[int, ...], ...]:
        me = postmortem.Process.of(os.getpid())
        mine = torch.tensor([_machine(), me.pid, me.namespace, me.start_ticks])
        everyone = torch.empty(self.size, 4, dtype=torch.int64)
        everyone[self.rank] = mine
        rows = list(everyone)
        self._do("finding the nodes", lambda: dist.all_gather(rows, mine, group=self.group, async_op=True))
        members: dict[int, list[int]] = {}
        for rank, row in enumerate(everyone.tolist()):
            members.setdefault(row[0], []).append(rank)
            if row[0] == int(mine[0]) and rank != self.rank:
                self._neighbours[rank] = postmortem.Process(*row[1:])
        return tuple(tuple(ranks) for ranks in members.values())


class Waiter:
    """One wait: call `pause` whenever there is nothing to do, `progress` whenever there was."""

    def __init__(self, here: TorchWorld, operation: str, pause: Callable[[], None]) -> None:
        self._here, self._operation, self._pause = here, operation, pause
        self._began = 0.0

    def progress(self) -> None:
        """Something came: start counting anew."""
        self._began = 0.0

    def pause(self, peers: Callable[[], Iterable[int]] = tuple) -> None:
        """Let some time pass; PeerError when the deadline has passed since the last progress."""
        now = time.monotonic()
        self._began = self._began or now
        if self._here.work():
            self.progress()
        elif now < self._began + self._here.timeout_s:
            self._pause()
        else:
            raise self._here.lost(self._operation, peers())


def _look(work: Any) -> None:
    """Wait for a collective, but not for long."""
    # Unlike a message's, such a wait may end early and harms nobody; if the collective failed, the last one says so.
    with contextlib.suppress(RuntimeError):
        work.wait(PAUSE)


def _machine() -> int:
    """Return a number for this machine, the same in all processes that see it under the same name."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            text = socket.gethostname() + boot.read()
    except OSError:
        text = socket.gethostname()
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def _timed_out(error: Exception) -> bool:
    # Gloo has no class for it. A wait of ours that was too long also ends the others of the group.
    return any(words in str(error) for words in ("Timed out", "timed out", "Application timeout"))


def _shown(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


_worlds: WeakKeyDictionary[dist.ProcessGroup, TorchWorld] = WeakKeyDictionary()


def _leave() -> None:
    if end_threads():
        for one in list(_worlds.values()):
            one.close()


atexit.register(_leave)


def world(group: dist.ProcessGroup) -> TorchWorld:
    """Return the World of a process group, made at the first call. Collective over the group then."""
    kept = _worlds.get(group)
    if kept is None:
        if dist.get_rank(group) < 0:
            raise SettingError("comm: this process is no member of the process group")
        forked.guard()
        kept = _worlds[group] = TorchWorld(group)
    return kept
