"""The ranks of an MPI communicator, and every question about communicators.

    the user's communicator (COMM_WORLD unless given)
      │ world(comm): made once, collectively, and kept as an attribute of that communicator
      ├── data      Dup: what tensors travel on
      ├── control   Dup: agreements between ranks, and roll calls; never in the way of data
      │                  (roll calls have a Dup of their own)
      └── node      Split_type(COMM_TYPE_SHARED): the ranks that share this rank's memory

Those that are left after a loss have a single one, by MPI_Comm_shrink, for data, control and roll calls: the more are
made, the longer does it take, and the more often is a rank lost meanwhile. tags.py keeps them apart.

Freed when the user frees their communicator (a collective call, and MPI tells us in it), else at
exit in creation order; never by the garbage collector, which runs when it likes on each rank.

Waits are polled against a deadline (watchdog.py), or block in MPI while a thread watches over them (guard.py). Beside
these only Split_type and Free block in MPI, and they come when all ranks are known to be there.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Iterable, Sequence
from functools import partial
from struct import pack, unpack
from typing import Any

import numpy as np
from mpi4py import MPI

from hpctk.comm import environment, forked, gpu, launcher, postmortem
from hpctk.comm.agreement import OneThread
from hpctk.comm.buffers import Stager
from hpctk.comm.mpi import small_messages, tags
from hpctk.comm.mpi.abort import fault_tolerant, note_status
from hpctk.comm.mpi.allreduce import MpiAllreduce
from hpctk.comm.mpi.guard import GuardedCalls
from hpctk.comm.mpi.shared_window import MpiSharedWindow, shared_window
from hpctk.comm.mpi.survivors import TimeLimit, agreed, completed, finalize, meet_survivors, settle
from hpctk.comm.mpi.watchdog import NAP_S, ONE_IN_MPI, WATCHED, Waiter, Watchdog
from hpctk.comm.shared_decisions import SharedDecisions
from hpctk.comm.world import World
from hpctk.errors import PeerError, SettingError
from hpctk.telemetry.recorder import Recorders

#: The tag of "here" on the user's communicator, the highest MPI guarantees.
HERE = 32767
#: Seconds a leaving rank gives the others to leave too, so that communicators can be freed together.
LEAVE_S = 1.0
NOT_TOLERANT = (
    "MPI would end the job with the first rank that is lost. Start it with `hpctk mpirun --with-ft`, on Open MPI 5; "
    "Open MPI 4.1, MPICH and srun have no such thing."
)
#: The most ranks of one node that share a window, of 2 MB each.
MOST_SHARING = 64


_BYTE, _FIRST = MPI.BYTE, tags.DATA
_testsome = MPI.Request.Testsome


class MpiWorld(World):
    """The ranks of an MPI communicator. Made by `world()`, which keeps it; attributes as in World.

    Attributes
    ----------
    data, control, node : MPI.Intracomm
        See above.
    guarded : GuardedCalls
        The calls on `data` that block.
    """

    losses = (PeerError, MPI.Exception)

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.one_thread, self.recorders = OneThread(), Recorders(MpiAllreduce.name)
        self.name = comm.Get_name() or f"{self.size} ranks"
        self.library = MPI.Get_library_version().partition("\n")[0].strip(" \0")
        self._neighbours: dict[int, postmortem.Process] = {}
        #: What belonged to the ranks before some were lost.
        self._before: list[Any] = []
        #: Whether these ranks are to outlive each other.
        self.expects_losses = False
        self._rolls = first_meeting(comm, environment.readable_timeout_s())
        self._watchdog = Watchdog(self._rolls, environment.readable_timeout_s(), self._show_missing)
        self.data, self.control = self._copy(comm), self._copy(comm)
        with self.shared_errors("reading the settings"):
            environment.read("HPCTK_TIMEOUT_S")
            environment.read("HPCTK_GPU_AWARE")
        self._check_launcher(comm)
        self.node = self.control.Split_type(MPI.COMM_TYPE_SHARED, key=self.rank)
        self.local_rank, self.local_size = self.node.Get_rank(), self.node.Get_size()
        self.nodes = self._find_nodes()
        self.gpu = self._agree_on_gpu()
        self.stager = Stager(self.gpu.aware, self.note_staging)
        self.guarded = GuardedCalls(self.data, self._watchdog, self.wait_name, self.one_thread)
        self.native = MpiAllreduce(self)
        self.background = self._watchdog.background
        self.attached = {}
        self._window: MpiSharedWindow | None = None
        self._window_failed = False
        #: How ranks decide that share memory, once they have found out by MPI that they do.
        self._decisions: SharedDecisions | None = None
        if self.size > 1:
            self._meet_neighbours()
            postmortem.watch(self.rank, self.size)

    def _copy(self, comm: MPI.Intracomm) -> MPI.Intracomm:
        """Return a duplicate. Collective over the communicator.

        One at a time: Open MPI 5.0 loses one of two that are under way where another thread, Horovod's, is in MPI, too.
        """
        copy, made = comm.Idup()
        self.wait([made], "duplicating the communicator")
        return copy

    @property
    def timeout_s(self) -> float:
        """Seconds this rank waits for others (HPCTK_TIMEOUT_S)."""
        return self._watchdog.timeout_s

    def wait(self, requests: Sequence[MPI.Request], operation: str, peers: Iterable[int] = ()) -> None:
        """Wait for MPI requests; raise PeerError that names `operation` and the missing rank at the deadline."""
        comm = self.control if self.expects_losses else None
        self._watchdog.wait(requests, self.wait_name(operation), peers, comm)

    def waiter(self, operation: str) -> Waiter:
        """Return what to do between two looks at requests that are polled elsewhere."""
        return self._watchdog.waiter(self.wait_name(operation))

    def _minimum(self, values: Sequence[int], operation: str) -> list[int]:
        """Return the smallest of all ranks' `values` at each position. Collective over the communicator."""
        if self.expects_losses:
            with self.one_thread:
                return small_messages.minimum(self.control, values, partial(self.wait, operation=operation))
        # Packed: an array of numpy's takes longer to make than the message to travel.
        n = len(values)
        least = bytearray(pack(f"{n}q", *values))
        with self.one_thread:
            request = self.control.Iallreduce(MPI.IN_PLACE, (least, n, MPI.INT64_T), MPI.MIN)
            self.wait((request,), operation)
        return list(unpack(f"{n}q", least))

    def _broadcast(self, data: bytearray, root: int, operation: str) -> None:
        """Overwrite `data` by root's. Collective over the communicator. In place."""
        with self.one_thread:
            if self.expects_losses:
                small_messages.broadcast(self.control, data, root, partial(self.wait, operation=operation))
            else:
                self.wait([self.control.Ibcast([data, MPI.BYTE], root)], operation, [root])

    def barrier(self, operation: str = "barrier") -> None:
        """Return once every rank is here. Collective over the communicator."""
        self.minimum([], operation)

    def transport(self) -> MpiTransport:
        """Return what moves bytes between these ranks."""
        return MpiTransport(self)

    @property
    def shares_memory(self) -> bool:
        """Whether all ranks lie on one node, and are not too many for the memory that this takes."""
        return len(self.nodes) == 1 < self.size <= MOST_SHARING

    @property
    def nodes_share_memory(self) -> bool:
        """Whether there are several nodes, some with several ranks, and none with too many."""
        return len(self.nodes) > 1 and 1 < max(map(len, self.nodes)) <= MOST_SHARING

    def shared_window(self) -> MpiSharedWindow | None:
        """Return the memory that this node's ranks share, made at the first call. Collective then."""
        if self._window is None and not self._window_failed and (self.shares_memory or self.nodes_share_memory):
            self._window = shared_window(self)
            self._window_failed = self._window is None
        return self._window

    def _gather(self, mine: Any, operation: str) -> Any:
        everyone = np.empty((self.size, *mine.shape), np.int64)
        request = self.control.Iallgather([mine, MPI.INT64_T], [everyone, MPI.INT64_T])
        self.wait([request], operation)
        return everyone

    def _check_launcher(self, comm: MPI.Intracomm) -> None:
        if MPI.Comm.Compare(comm, MPI.COMM_WORLD) not in (MPI.IDENT, MPI.CONGRUENT):
            return
        complaint = launcher.complaint(os.environ, self.size, MPI.get_vendor()[0])
        with self.shared_errors("starting MPI"):
            if complaint:
                raise SettingError(complaint)

    def _find_nodes(self) -> tuple[tuple[int, ...], ...]:
        leader = np.array([self.rank], np.int64)
        request = self.node.Ibcast([leader, MPI.INT64_T], 0)
        self.wait([request], "finding the nodes")
        members: dict[int, list[int]] = {}
        for rank, its_leader in enumerate(self._gather(leader, "finding the nodes")[:, 0]):
            members.setdefault(int(its_leader), []).append(rank)
        return tuple(tuple(ranks) for _, ranks in sorted(members.items()))

    def _agree_on_gpu(self) -> gpu.GpuAware:
        mine = gpu.decide(MPI)
        if self.minimum([int(mine.aware)], "agreeing on GPU-aware MPI")[0] or not mine.aware:
            return mine
        return gpu.GpuAware(False, f"another rank says no (here: {mine.because})")

    def _meet_neighbours(self) -> None:
        me = postmortem.Process.of(os.getpid())
        mine = np.array([self.rank, me.pid, me.namespace, me.start_ticks], np.int64)
        everyone = np.empty((self.local_size, 4), np.int64)
        request = self.node.Iallgather([mine, MPI.INT64_T], [everyone, MPI.INT64_T])
        self.wait([request], "meeting the ranks of this node")
        self._neighbours = {int(row[0]): postmortem.Process(*map(int, row[1:])) for row in everyone}

    def _show_missing(self, missing: list[int]) -> None:
        postmortem.show_stuck({r: self._neighbours[r] for r in missing if r in self._neighbours})

    def cannot_shrink(self) -> str:
        """Return why these ranks cannot go on without one that is lost; "" where they can."""
        if fault_tolerant():
            return ""
        by = ", and srun has started it" if launcher.by_srun(os.environ) else ""
        return f"{NOT_TOLERANT} This is {self.library}{by}."

    def is_broken(self) -> bool:
        """Return whether a rank is known to be lost, here or by a peer that has revoked a communicator. Local."""
        return any(comm.Is_revoked() for comm in self._comms()) or bool(self.control.Get_failed().Get_size())

    def decide(self, *, done: bool) -> bool:
        """Return whether all ranks are `done`. Collective over the communicator, also where it is broken."""
        if not done:
            # Others may still wait for what will never come.
            self._revoke()
        with self.one_thread, TimeLimit(self.timeout_s, "deciding on what all ranks have done"):
            if self._decisions is not None:
                return self._decisions.decide(done=done)
            return self._agree(done)

    def _agree(self, done: bool) -> bool:
        """Decide by MPI; from then on in shared memory where all ranks have such."""
        window = None
        try:
            if done and self.shares_memory:
                window = self.shared_window()
        except self.losses:
            self._revoke()
            done = False
        with ONE_IN_MPI:
            answers = agreed(self.control, done | (window is not None) << 1)
        if window is not None and answers == 0b11:
            self._decisions = SharedDecisions(window, self._lost)
        return bool(answers & 1)

    def _lost(self) -> list[int]:
        """Return the ranks that are known to be dead. Local."""
        with ONE_IN_MPI:
            # MPI learns of them meanwhile; nobody has revoked this one.
            MPI.COMM_SELF.Iprobe(0, tags.QUESTION)
            return self._watchdog.dead()

    def _revoke(self) -> None:
        for comm in self._comms():
            comm.Revoke()

    def _comms(self) -> list[MPI.Intracomm]:
        """Return what these ranks exchange messages on, each once."""
        return [self.control] if self.data is self.control else [self.data, self.control, self._rolls]

    def shrink(self) -> list[int]:
        """Let these be the ranks that live; return the numbers that they had, in the order of their new ones."""
        self._revoke()
        group = self.control.Get_group()
        settle(self._lost)
        with self.one_thread, ONE_IN_MPI, TimeLimit(self.timeout_s, "meeting the ranks that are left"):
            comm = meet_survivors(self.control)
        kept: list[int] = list(comm.Get_group().Translate_ranks(list(range(comm.Get_size())), group))
        # A message that is still on its way may write into what these hold.
        self._before += [self._watchdog, self.attached, self._window]
        self.lost_ranks += self.size - len(kept)
        nodes, abandoned = self.nodes, self._watchdog.abandoned
        self._neighbours = {i: self._neighbours[old] for i, old in enumerate(kept) if old in self._neighbours}
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self._rolls = self.data = self.control = comm
        self.node = MPI.COMM_NULL
        self._watchdog = Watchdog(comm, self.timeout_s, self._show_missing)
        self._watchdog.quiet, self._watchdog.abandoned = self.expects_losses, abandoned
        places = {old: new for new, old in enumerate(kept)}
        left = [tuple(places[old] for old in node if old in places) for node in nodes]
        self.nodes = tuple(sorted(node for node in left if node))
        mine = next(node for node in self.nodes if self.rank in node)
        self.local_rank, self.local_size = mine.index(self.rank), len(mine)
        self.guarded = GuardedCalls(comm, self._watchdog, self.wait_name, self.one_thread)
        self.native = MpiAllreduce(self)
        self.background = self._watchdog.background
        self.attached = {}
        self._window, self._window_failed, self._decisions = None, False, None
        return kept

    def expect_losses(self) -> None:
        """Let a lost rank be found out without asking the others what they do. Local."""
        self.expects_losses = self._watchdog.quiet = True

    def leave(self) -> bool:
        """Say farewell and free the communicators if the others leave too; return whether they do. At exit only."""
        if self.size > 1:
            self._watchdog.farewell(postmortem.reason_for_leaving())
            try:
                if self.expects_losses:
                    small_messages.minimum(self.control, [], _wait_to_leave, tags.LEAVING)
                else:
                    # Not on control: there it would match a barrier that the others still wait in.
                    _wait_to_leave((self._rolls.Ibarrier(),))
                self._watchdog.listen("leaving the program")
            except (TimeoutError, MPI.Exception):
                # Others stay, or a rank has died and this job outlives it: nothing can be freed together.
                return False
        self.free()
        return True

    def free(self) -> None:
        """Free the communicators. Collective over the communicator."""
        for comm in (*self._comms(), self.node):
            if comm != MPI.COMM_NULL:
                comm.Free()


class MpiTransport:
    """Moves bytes between the ranks of a World."""

    waits = False

    def __init__(self, world: MpiWorld) -> None:
        self.world = world
        self.rank, self.size = world.rank, world.size
        self._comm = world.data
        self.tag_limit = int(world.data.Get_attr(MPI.TAG_UB) or 32767) - tags.DATA

    def isend(self, data: Any, peer: int, tag: int) -> MPI.Request:
        """Start sending the bytes of `data` to `peer`."""
        return self._comm.Isend([data, len(data), _BYTE], peer, tag + _FIRST)

    def irecv(self, data: Any, peer: int, tag: int) -> MPI.Request:
        """Start receiving exactly the bytes of `data` from `peer`."""
        return self._comm.Irecv([data, len(data), _BYTE], peer, tag + _FIRST)

    def complete(self, requests: list[MPI.Request], wait: bool = False) -> list[int]:
        """Return the positions of requests that are complete now."""
        try:
            if self.world.expects_losses:
                return completed(self._comm, requests)
            return _testsome(requests) or []
        except MPI.Exception as error:
            raise PeerError(
                f"rank {self.rank} of {self.size}: MPI says {error.Get_error_string()!r} of a message. "
                "Did the ranks give tensors of different sizes?"
            ) from error

    def waiter(self, operation: str) -> Waiter:
        """Return what to do while nothing is complete."""
        return self.world.waiter(operation)


def _wait_to_leave(requests: Sequence[MPI.Request]) -> None:
    deadline = time.monotonic() + LEAVE_S
    while not MPI.Request.Testall(requests):
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(1e-3)


def first_meeting(comm: MPI.Intracomm, timeout_s: float) -> MPI.Intracomm:
    """Return a duplicate of `comm`, or raise PeerError that names who did not come.

    Collective over the communicator. There is no communicator of our own yet to hold a roll call on.
    """
    copy, request = comm.Idup()
    deadline = time.monotonic() + timeout_s
    while not request.Test():
        if time.monotonic() > deadline:
            missing = ", ".join(map(str, absent(comm))) or "unknown"
            raise PeerError(
                f"rank {comm.Get_rank()} of {comm.Get_size()} waited {timeout_s:g} s for all ranks to start using "
                f"hpctk; missing: rank {missing}. Every rank must call hpctk; HPCTK_TIMEOUT_S sets how long to wait."
            )
        time.sleep(NAP_S)
    return copy


def absent(comm: MPI.Intracomm) -> list[int]:
    """Return up to 8 ranks that do not say "here" within a second. For a job that fails anyway.

    The one place where hpctk sends on the user's own communicator.
    """
    rank, size, here = comm.Get_rank(), comm.Get_size(), set()
    neighbours = [(rank + i) % size for i in range(1, min(WATCHED, size - 1) + 1)]
    sent = [comm.Isend([b"", MPI.BYTE], (rank - i) % size, HERE) for i in range(1, len(neighbours) + 1)]
    deadline = time.monotonic() + 1.0
    status = MPI.Status()
    while time.monotonic() < deadline:
        if comm.Iprobe(MPI.ANY_SOURCE, HERE, status):
            comm.Recv([bytearray(), MPI.BYTE], status.Get_source(), HERE)
            here.add(status.Get_source())
        time.sleep(NAP_S)
    MPI.Request.Testall(sent)
    return [peer for peer in neighbours if peer not in here][:8]


_worlds: list[MpiWorld] = []
_keyval: int | None = None
#: By the handle of a communicator whose World is being made.
_making: dict[int, OneThread] = {}


def world(comm: MPI.Intracomm | None = None) -> MpiWorld:
    """Return the World of a communicator, made at the first call. Collective over the communicator then.

    Parameters
    ----------
    comm : MPI.Intracomm, optional
        COMM_WORLD where not given.
    """
    global _keyval
    comm = MPI.COMM_WORLD if comm is None else comm
    if not isinstance(comm, MPI.Intracomm):
        raise SettingError(f"comm={comm!r}: need an MPI intracommunicator or a process group of torch.distributed")
    if _keyval is None:
        _keyval = MPI.Comm.Create_keyval(delete_fn=_on_free)
        forked.guard()
        if fault_tolerant():
            note_status()
        atexit.register(_leave_all)
    kept = comm.Get_attr(_keyval)
    if isinstance(kept, MpiWorld):
        return kept
    with _making.setdefault(comm.handle, OneThread()):
        try:
            made = MpiWorld(comm)
            comm.Set_attr(_keyval, made)
        finally:
            del _making[comm.handle]
    _worlds.append(made)
    return made


def _on_free(comm: MPI.Comm, keyval: int, kept: MpiWorld) -> None:
    if kept in _worlds:
        _worlds.remove(kept)
        kept.free()


def _leave_all() -> None:
    if not forked.is_child() and MPI.Is_initialized() and not MPI.Is_finalized():
        left = [kept.leave() for kept in _worlds]
        if all(left) and any(kept.lost_ranks for kept in _worlds):
            finalize()
    _worlds.clear()
