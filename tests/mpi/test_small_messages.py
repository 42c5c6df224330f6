"""Collectives of a few numbers that are made of messages, and that jobs which are to outlive a rank use no others."""

import gc
import sys
from functools import partial

import pytest
import torch
from mpi4py import MPI

import hpctk
from hpctk.collectives.allreduce import iallreduce
from hpctk.comm.mpi import counter, small_messages, tags
from hpctk.comm.mpi import world as mpi_world

#: MPI's own that return at once.
RETURNING = ("Iallreduce", "Ibcast", "Iallgather", "Ibarrier", "Idup")


class Spied:
    """A communicator that takes down which collectives of MPI's own are called that return at once."""

    def __init__(self, comm, called):
        self._comm, self._called = comm, called

    def __getattr__(self, name):
        if name in RETURNING:
            self._called.append(name)
        return getattr(self._comm, name)


@pytest.fixture
def tolerant(world, monkeypatch):
    """These ranks as ranks that are to outlive each other, and what is called on their communicators."""
    called = []
    for name in ("control", "data", "_rolls"):
        monkeypatch.setattr(world, name, Spied(getattr(world, name), called))
    monkeypatch.setattr(world.native, "_data", world.data)
    monkeypatch.setattr(world, "expects_losses", True)
    return called


@pytest.mark.parametrize("numbers", [0, 1, 5])
def test_every_rank_has_the_smallest_of_all(world, numbers):
    wait = partial(world.wait, operation="test")
    for turn in range(20):
        # Another rank has the smallest in every turn and at every place.
        mine = [(world.rank + turn + i) % world.size - 2**40 for i in range(numbers)]
        assert small_messages.minimum(world.control, mine, wait) == [-(2**40)] * numbers


def test_everyone_has_what_the_root_gave(world):
    wait = partial(world.wait, operation="test")
    for root in range(world.size):
        data = bytearray(b"from %d" % root if world.rank == root else b"nothing")
        small_messages.broadcast(world.control, data, root, wait)
        assert bytes(data[:6]) == b"from %d" % root


def test_ranks_that_may_be_lost_call_nothing_of_mpis_own_that_returns_at_once(world, tolerant):
    assert world.minimum([world.rank + 3, -world.rank], "test") == [3, 1 - world.size]
    assert world.run_on_root("telling", lambda: "a word") == "a word"
    world.barrier()
    (total,) = hpctk.allreduce(torch.tensor([float(world.rank)]), op="sum").tolist()
    assert total == sum(range(world.size))
    for schedule in ("auto", "mpi"):
        assert iallreduce(torch.ones(1), op="sum", schedule=schedule).wait().tolist() == [world.size]
    assert tolerant == []


def test_others_do(world, tolerant, monkeypatch):
    monkeypatch.setattr(world, "expects_losses", False)
    world.barrier()
    assert tolerant == ["Iallreduce"]


class SendsFail:
    """A communicator whose sends fail at once, as those to a lost rank do; what it was to receive into is kept here."""

    def __init__(self, comm):
        self._comm, self.memory = comm, None

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def Irecv(self, buffer, source, tag):
        self.memory = buffer[0]
        return self._comm.Irecv(buffer, source, tag)

    def Isend(self, buffer, target, tag):
        raise MPI.Exception(MPI.ERR_PROC_FAILED)


def test_a_send_that_fails_leaves_memory_to_what_may_still_come(world):
    if world.size == 1:
        pytest.skip("one rank sends nothing")
    comm = SendsFail(world.control)
    with pytest.raises(MPI.Exception):
        small_messages.minimum(comm, [1], lambda requests: None)
    world.barrier("before the message comes")
    gc.collect()
    (request,) = small_messages._unclaimed
    # By the request, the message's memory is somebody's, besides this test's.
    assert sys.getrefcount(comm.memory) > 2
    world.control.Send([(7).to_bytes(8, "little"), 8, MPI.BYTE], (world.rank + 1) % world.size, tags.MINIMUM)
    request.Wait()
    assert int.from_bytes(comm.memory, "little") == 7
    small_messages._unclaimed.clear()


def test_leaving_waits_no_longer_than_it_may(world, monkeypatch):
    monkeypatch.setattr(mpi_world, "LEAVE_S", 0.05)
    got = bytearray(1)
    request = world.control.Irecv([got, 1, MPI.BYTE], world.rank, tags.LEAVING)
    with pytest.raises(TimeoutError):
        mpi_world._wait_to_leave((request,))
    world.control.Send([b"x", 1, MPI.BYTE], world.rank, tags.LEAVING)
    mpi_world._wait_to_leave((request,))
    assert got == b"x"


def test_a_counter_of_ranks_that_may_be_lost_copies_no_communicator(world, tolerant):
    server = counter._CounterServer(world)
    server.free()
    assert tolerant == []
    world.barrier("after a counter was freed")
