"""The hierarchical all-reduce whose inner level is shared memory, on ranks of one machine taken for several nodes."""

import os

import numpy as np
import pytest
import torch

import hpctk
from hpctk.collectives.allreduce import iallreduce, reduce_in_place
from hpctk.collectives.engine import hierarchical_run, shared_memory_run
from hpctk.collectives.engine.engine import engine_of
from hpctk.collectives.tuning import calibrate
from hpctk.comm.buffers import DTYPES
from hpctk.comm.mpi import shared_window
from hpctk.schedules import build

#: For each number of ranks; nodes of several ranks are needed for memory to be shared.
LAYOUTS = {3: [((0, 1), (2,)), ((0, 2), (1,))], 4: [((0, 3), (1, 2)), ((0, 1, 2), (3,)), ((0,), (1, 2), (3,))]}


@pytest.fixture(params=range(3))
def nodes(request, world, monkeypatch):
    """Several nodes, where there are ranks enough, and slots and pieces of a few elements."""
    layouts = LAYOUTS.get(world.size, [tuple((rank,) for rank in range(world.size))])
    layout = layouts[request.param % len(layouts)]
    monkeypatch.setattr(world, "nodes", layout)
    monkeypatch.setattr(world, "_window", None)
    monkeypatch.setattr(shared_window, "SLOT_BYTES", 96)
    monkeypatch.setattr(shared_window, "RANK_BYTES", 8192)
    monkeypatch.setattr(shared_memory_run, "LEAST_BYTES", 48)
    monkeypatch.setattr(hierarchical_run, "PIECE_BYTES", 320)
    monkeypatch.setattr(hierarchical_run, "MESSAGES", 0)
    return layout


def inputs(size, n):
    return [np.random.default_rng([5, rank]).standard_normal(n).astype(np.float32) for rank in range(size)]


@pytest.mark.parametrize("op", ["sum", "mean", "max"])
def test_nodes_are_summed_first_and_all_ranks_have_the_same_bits(world, nodes, op):
    for n in (1, 2, 5, 24, 81, 1000):
        everyone = inputs(world.size, n)
        result = hpctk.allreduce(everyone[world.rank], op=op, schedule="hierarchical")
        combine = np.maximum if op == "max" else np.add
        wanted = [everyone[ranks[0]].copy() for ranks in nodes]
        for total, ranks in zip(wanted, nodes, strict=True):
            for rank in ranks[1:]:
                combine(total, everyone[rank], out=total)
        whole = wanted[0]
        for total in wanted[1:]:
            whole = combine(whole, total)
        if op == "mean":
            whole = whole / np.float32(world.size)
        if len(nodes) <= 2:
            # Two sums are the same in either order.
            assert result.tobytes() == whole.tobytes()
        np.testing.assert_allclose(result, whole, rtol=1e-5, atol=1e-6)
        world.agree("results", [("bits", result.tobytes().hex())])


def test_every_dtype_is_summed_exactly(world, nodes):
    # 1 + ... + 4, times 0 to 3: what each gives is exact even in a float8 of two bits; the sum is rounded once.
    whole = np.arange(500) % 4
    for name in [name for name, dtype in DTYPES.items() if dtype.unit]:
        tensor = (torch.from_numpy(whole) * (world.rank + 1)).to(getattr(torch, name))
        result = hpctk.allreduce(tensor, op="sum", schedule="hierarchical")
        parts = [(torch.from_numpy(whole) * (rank + 1)).to(tensor.dtype) for rank in range(world.size)]
        wanted = sum(part.to(torch.complex64 if tensor.is_complex() else torch.float32) for part in parts)
        assert torch.equal(result.view(torch.uint8), wanted.to(tensor.dtype).view(torch.uint8)), name


def test_only_what_goes_between_nodes_is_sent(world, nodes):
    """Bytes are those of the plan; inside nodes they go through memory."""
    if not world.nodes_share_memory:
        return
    world.shared_window()
    counter, plan = engine_of(world).counter, build("hierarchical", "allreduce", world.size, nodes=nodes)
    sent, posted = counter.sent_bytes, []
    transport = engine_of(world).transport
    isend = transport.isend
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "isend", lambda data, peer, tag: posted.append(peer) or isend(data, peer, tag))
        n = 24 * plan.blocks
        reduce_in_place(world, torch.ones(n), DTYPES["float32"], "sum", "hierarchical")
    mine = next(ranks for ranks in nodes if world.rank in ranks)
    assert not set(posted) & set(mine)
    total = np.array([counter.sent_bytes - sent])
    reduce_in_place(world, total, DTYPES["int64"], "sum", "mpi")
    assert total[0] == plan.volume.total_sent * n * 4 // plan.blocks


def test_several_are_under_way_at_once_and_waited_for_in_any_order(world, nodes):
    handles = [iallreduce(torch.full((n,), float(world.rank)), op="sum", schedule="hierarchical") for n in (50, 7, 900)]
    handles.append(iallreduce(torch.full((300,), 1.0), op="sum", schedule="ring"))
    wanted = [*([sum(range(world.size))] * 3), world.size]
    for i in range(4):
        which = (i + world.rank) % 4
        assert handles[which].wait().unique().tolist() == [wanted[which]]


def test_without_room_for_memory_messages_are_sent_inside_nodes_too(world, nodes, monkeypatch):
    def refuse(file, offset, nbytes):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(world, "_window_failed", False)
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    result = hpctk.allreduce(torch.ones(1000), op="sum", schedule="hierarchical")
    assert result.unique().tolist() == [world.size]


def test_calibration_measures_it_as_it_is_run(world, nodes, monkeypatch):
    if world.size == 1:
        return
    plans = [build("hierarchical", "allreduce", world.size, nodes=nodes)]
    started = []
    start = engine_of(world).start_hierarchical
    monkeypatch.setattr(engine_of(world), "start_hierarchical", lambda *a: started.append(1) or start(*a))
    calibrate.measure(world, plans, 2**16, {"segment_bytes": 61440, "sends": 24})
    assert bool(started) == world.nodes_share_memory
