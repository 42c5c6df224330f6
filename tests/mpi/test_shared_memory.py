"""The all-reduce through memory that all ranks share, and MPI's own where it blocks."""

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import hpctk
from hpctk.collectives import consensus
from hpctk.collectives.allreduce import iallreduce, reduce_in_place
from hpctk.collectives.engine.engine import engine_of
from hpctk.collectives.shared_consensus import SharedPart
from hpctk.collectives.tuning import auto
from hpctk.collectives.tuning.calibration import Calibration
from hpctk.comm.buffers import DTYPES
from hpctk.comm.mpi import shared_window

FLOAT32 = DTYPES["float32"]


@pytest.fixture
def narrow(world, monkeypatch):
    """Slots of a few elements, in a window of its own."""
    if not world.shares_memory:
        return
    monkeypatch.setattr(shared_window, "SLOT_BYTES", 96)
    monkeypatch.setattr(shared_window, "RANK_BYTES", 8192)
    monkeypatch.setattr("hpctk.collectives.engine.shared_memory_run.LEAST_BYTES", 48)
    monkeypatch.setattr(world, "_window", shared_window.shared_window(world))


def inputs(size, n):
    return [np.random.default_rng([3, rank]).standard_normal(n).astype(np.float32) for rank in range(size)]


@pytest.mark.parametrize("n", [1, 2, 5, 24, 25, 1000])
@pytest.mark.parametrize("op", ["sum", "mean", "max"])
def test_sums_are_in_the_order_of_ranks_on_all(world, narrow, n, op):
    everyone = inputs(world.size, n)
    result = hpctk.allreduce(everyone[world.rank], op=op, schedule="shared_memory")
    wanted = everyone[0].copy()
    for part in everyone[1:]:
        wanted = np.maximum(wanted, part) if op == "max" else wanted + part
    if op == "mean":
        wanted /= np.float32(world.size)
    assert result.tobytes() == wanted.tobytes()


def test_several_are_under_way_at_once_and_waited_for_in_any_order(world, narrow):
    handles = [
        iallreduce(torch.full((n,), float(world.rank)), op="sum", schedule="shared_memory") for n in (50, 7, 200)
    ]
    total = sum(range(world.size))
    # Every rank waits for another one first.
    for i in range(3):
        handle = handles[(i + world.rank) % 3]
        assert handle.wait().unique().tolist() == [total]


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("scale", ["mean_norm", "coefficients"])
def test_a_consensus_equals_that_by_messages(world, narrow, monkeypatch, layerwise, scale):
    generator = torch.Generator().manual_seed(world.rank)
    gradients = [1 + torch.randn(n, generator=generator, dtype=torch.float64) for n in (1, 40, 0, 300, 7)]
    counter, found, sent = engine_of(world).counter, [], []
    # The second step has momentum, too.
    for least in (10**9, 1):
        monkeypatch.setattr(consensus, "SHARED_FROM_BYTES", least)
        state, before = hpctk.ops.ConsensusState(), counter.sent_bytes
        for step in range(2):
            aggregate = hpctk.ops.adacons_aggregate(
                [t + step for t in gradients], state, momentum=0.5, scale=scale, layerwise=layerwise
            )
        found.append(torch.cat(aggregate))
        sent.append(counter.sent_bytes - before)
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)
    world.agree("consensus", [("bits", found[1].numpy().tobytes().hex())])
    # Shares of chunks come to a few elements more or less than shares of the whole.
    assert abs(sent[1] - sent[0]) <= 0.05 * sent[0]


def test_a_long_consensus_goes_through_the_window(world, monkeypatch):
    if not world.shares_memory:
        pytest.skip("these ranks share no memory")
    made = []
    monkeypatch.setattr(consensus, "SharedPart", lambda *words: made.append(words) or SharedPart(*words))
    for n in (consensus.SHARED_FROM_BYTES // 4, 1000):
        vector = torch.full((n,), 2.0)
        (result,) = hpctk.ops.adacons_aggregate([vector], hpctk.ops.ConsensusState())
        torch.testing.assert_close(result, vector, rtol=1e-6, atol=0)
    assert len(made) == 1


def test_bytes_are_counted(world):
    if world.size == 1:
        return
    counter = engine_of(world).counter
    before = counter.sent_bytes, counter.received_bytes, counter.messages
    reduce_in_place(world, torch.ones(1000 * world.size), FLOAT32, "sum", "shared_memory")
    sent, received, messages = (
        now - then
        for now, then in zip((counter.sent_bytes, counter.received_bytes, counter.messages), before, strict=True)
    )
    assert sent == received == 2 * (world.size - 1) * 4000
    assert messages == 2 * (world.size - 1)


def test_without_room_for_it_messages_are_sent_instead(world, monkeypatch, caplog):
    def refuse(file, offset, nbytes):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(world, "_window", None)
    monkeypatch.setattr(world, "_window_failed", False)
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    result = hpctk.allreduce(torch.ones(100_000), op="sum", schedule="shared_memory")
    assert result.unique().tolist() == [world.size]
    if world.size > 1 and world.rank == 0:
        assert "No space left on device" in caplog.text


def test_no_file_stays_behind(world, monkeypatch):
    """Nor one with anything in it where a rank is killed while it is made."""
    allocate, named = os.posix_fallocate, []

    def note(file, offset, nbytes):
        named.append(os.readlink(f"/proc/self/fd/{file}"))
        allocate(file, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", note)
    made = shared_window.shared_window(world)
    world.barrier("looking for files")
    assert made is not None
    assert all(name.endswith("(deleted)") for name in named)
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/hpctk-" in line]
    assert maps
    assert all(line.endswith("(deleted)") for line in maps)


def test_auto_takes_it_for_large_tensors_on_one_node(world, monkeypatch):
    monkeypatch.setitem(world.attached, auto.Choice, auto.Choice(Calibration()))
    if not world.shares_memory:
        return
    assert auto.choose(world, "allreduce", 2**26) == "shared_memory"
    assert auto.choose(world, "allreduce", 2**18) == "mpi"
    # A call that returns at once is polled: MPI's own is slow then.
    assert auto.choose(world, "iallreduce", 2**18) == "shared_memory"


def test_mpis_own_blocks_until_something_may_be_under_way(world, monkeypatch):
    """Then it does so on no rank: some may see the handle's end before others, and only calls of one kind match."""
    monkeypatch.setattr(engine_of(world), "overlaps", False)
    tensor, before = torch.ones(10), world.guarded.number
    for collective in (hpctk.ops.allgather, hpctk.ops.reduce_scatter, hpctk.ops.broadcast):
        collective(torch.ones(4))
    reduce_in_place(world, tensor, FLOAT32, "sum", "mpi")
    assert world.guarded.number == before + 1
    for i in range(20):
        handle = iallreduce(torch.ones(200_000), schedule="ring")
        # Over on this rank, perhaps not on the others.
        first = world.rank == i % world.size
        if first:
            handle.wait()
        reduce_in_place(world, tensor, FLOAT32, "sum", "mpi")
        if not first:
            handle.wait()
    assert world.guarded.number == before + 1


def test_a_rank_that_comes_late_into_a_blocking_call_is_waited_for(world):
    if world.rank == world.size - 1:
        # Longer than the guard needs for two looks, and to ask who is there.
        time.sleep(2.5)
    tensor = torch.full((5,), 2.0)
    reduce_in_place(world, tensor, FLOAT32, "mean", "mpi")
    assert tensor.tolist() == [2.0] * 5
    assert sum(thread.name == "hpctk guard" for thread in threading.enumerate()) <= 1


@pytest.mark.parametrize("kind", ["torch", "numpy", "parameter", "transposed", "float16", "fortran"])
def test_mpis_own_takes_every_kind_of_tensor_at_once(world, kind):
    array = np.arange(12, dtype=np.float32).reshape(3, 4) * (world.rank + 1)
    tensor = {
        "torch": lambda: torch.from_numpy(array),
        "numpy": lambda: array,
        "parameter": lambda: torch.nn.Parameter(torch.from_numpy(array)),
        "transposed": lambda: torch.from_numpy(array.T.copy()).T,
        "float16": lambda: torch.from_numpy(array).half(),
        "fortran": lambda: array.copy(order="F"),
    }[kind]()
    dtype = DTYPES["float16" if kind == "float16" else "float32"]
    reduce_in_place(world, tensor, dtype, "mean", "mpi")
    wanted = np.arange(12).reshape(3, 4) * (world.size + 1) / 2
    found = tensor if isinstance(tensor, np.ndarray) else tensor.detach().float().numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-3)
