"""The sparse all-reduce on real ranks: exact, alike everywhere, counted to the byte, and nothing lost."""

import hashlib
from itertools import pairwise

import numpy as np
import pytest
import torch

import hpctk
from hpctk.collectives.engine.engine import engine_of
from hpctk.collectives.sparse import balance
from hpctk.collectives.sparse.blocks import SparseBlocks
from hpctk.collectives.sparse_allreduce import Choices, reduce_pairs
from hpctk.compressors.core.sparse import wire_bytes
from hpctk.errors import MismatchError, PeerError, SettingError
from hpctk.schedules import build
from hpctk.schedules.core.registry import names

SCHEDULES = ["allgather", "recursive_doubling", "split", "dense", "auto"]
LENGTH_BYTES = 8


def pairs_of(rank, n, k, seed=0, dtype=np.float64, skewed=False):
    """This rank's elements: k different indices below n; skewed, most of them lie close together."""
    generator = np.random.default_rng([seed, rank, n, k])
    if skewed:
        pool = np.unique((n * generator.random(4 * k) ** 8).astype(np.int64))
        indices = np.sort(generator.choice(pool, min(k, len(pool)), replace=False))
    else:
        indices = np.sort(generator.choice(n, k, replace=False))
    return indices.astype(np.int32), generator.standard_normal(len(indices)).astype(dtype)


def dense_sum(lists, n, dtype=np.float64):
    total = np.zeros(n, dtype)
    for indices, values in lists:
        total[indices] += values
    return total


def as_dense(indices, values, n):
    dense = np.zeros(n, np.float64)
    dense[np.asarray(indices)] = np.asarray(values)
    return dense


def sent_bytes(world, call):
    before = engine_of(world).counter.sent_bytes
    result = call()
    return engine_of(world).counter.sent_bytes - before, result


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (7, 3), (1000, 10), (1000, 1000), (50_000, 500), (40_000, 30_000)])
def test_exact(world, schedule, n, k):
    lists = [pairs_of(rank, n, k) for rank in range(world.size)]
    found, total, dropped = hpctk.ops.sparse_allreduce(*lists[world.rank], n, schedule=schedule)
    assert (np.diff(found) > 0).all()
    np.testing.assert_allclose(as_dense(found, total, n), dense_sum(lists, n), rtol=1e-12, atol=1e-14)
    assert not dropped.any()
    assert len(dropped) == k


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_same_bits_on_all_ranks(world, schedule):
    # 20000 of 30000 elements on each rank: lists turn dense on their way, at different ranks at different times.
    for k in (300, 20_000 + 100 * world.rank):
        mine = pairs_of(world.rank, 30_000, k, dtype=np.float32)
        found, total, _ = hpctk.ops.sparse_allreduce(*mine, 30_000, schedule=schedule)
        digests = [hashlib.sha256(row.tobytes()).hexdigest() for row in (found, total)]
        world.agree("the same bits", [("indices", digests[0]), ("values", digests[1])])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_torch_tensors_keep_their_dtype(world, schedule, dtype):
    lists = [pairs_of(rank, 600, 40) for rank in range(world.size)]
    # Small whole numbers: exact in every dtype.
    lists = [(indices, np.round(values * 4)) for indices, values in lists]
    mine = torch.from_numpy(lists[world.rank][0]), torch.from_numpy(lists[world.rank][1]).to(dtype)
    result = hpctk.ops.sparse_allreduce(*mine, 600, schedule=schedule)
    assert result.values.dtype == dtype
    np.testing.assert_array_equal(as_dense(result.indices, result.values.double(), 600), dense_sum(lists, 600))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_unequal_and_empty_lists(world, schedule):
    counts = [0 if rank == 0 else 100 * rank for rank in range(world.size)]
    lists = [pairs_of(rank, 1000, k) for rank, k in enumerate(counts)]
    found, total, _ = hpctk.ops.sparse_allreduce(*lists[world.rank], 1000, schedule=schedule)
    np.testing.assert_allclose(as_dense(found, total, 1000), dense_sum(lists, 1000), atol=1e-14)
    nothing = np.empty(0, np.int32), np.empty(0, np.float32)
    for size in (0, 10):
        found, total, dropped = hpctk.ops.sparse_allreduce(*nothing, size, schedule=schedule)
        assert len(found) == len(total) == len(dropped) == 0


def test_any_order_and_int64_indices(world):
    lists = [pairs_of(rank, 5000, 50) for rank in range(world.size)]
    order = np.random.default_rng(1).permutation(50)
    indices, values = lists[world.rank]
    given = torch.from_numpy(indices[order].astype(np.int64)), torch.from_numpy(values[order])
    result = hpctk.ops.sparse_allreduce(*given, 5000, keep=20)
    np.testing.assert_array_equal(result.dropped.numpy(), ~np.isin(given[0].numpy(), result.indices.numpy()))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("keep", [0, 1, 37, 10_000])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_keep_returns_the_largest_and_gives_back_the_rest(world, schedule, keep, dtype):
    n, k = 3000, 60
    lists = [pairs_of(rank, n, k, dtype=dtype) for rank in range(world.size)]
    found, total, dropped = hpctk.ops.sparse_allreduce(*lists[world.rank], n, keep=keep, schedule=schedule)
    exact = dense_sum(lists, n)
    assert len(found) <= keep
    if len(found):
        others = np.delete(np.abs(exact), found)
        assert np.abs(exact)[found].min() >= others.max(initial=0) * (1 - 1e-6)
        assert len(found) == min(keep, np.count_nonzero(exact))
    # Conservation over all ranks together: sent = kept + given back.
    indices, values = lists[world.rank]
    returned = np.zeros(n)
    returned[indices[dropped]] = values[dropped]
    back = hpctk.allreduce(torch.from_numpy(returned), op="sum").numpy()
    np.testing.assert_allclose(as_dense(found, total, n) + back, exact, rtol=1e-6, atol=1e-6)
    assert not (back[found] != 0).any()


@pytest.mark.parametrize("schedule", ["allgather", "recursive_doubling", "split"])
def test_ties_go_to_the_lowest_index(world, schedule):
    indices = np.arange(world.rank, 400, world.size, dtype=np.int32)
    values = np.where(indices % 2, -2.0, 2.0)
    found, total, _ = hpctk.ops.sparse_allreduce(indices, values, 400, keep=101, schedule=schedule)
    np.testing.assert_array_equal(found, np.arange(101))
    np.testing.assert_array_equal(total, np.where(found % 2, -2.0, 2.0))


@pytest.mark.parametrize("name", names("allreduce", with_nodes=True))
def test_every_plan_carries_sparse_blocks(world, name):
    plan = build(name, "allreduce", world.size, nodes=world.nodes)
    n = 20_000
    lists = [pairs_of(rank, n, 700, seed=4) for rank in range(world.size)]
    edges = [block * n // plan.blocks for block in range(plan.blocks + 1)]
    blocks = SparseBlocks(edges, *lists[world.rank])
    engine_of(world).run_ragged(plan, blocks, payload_bytes=8 * n, segment_bytes=1000)
    np.testing.assert_allclose(as_dense(*blocks.result(), n), dense_sum(lists, n), rtol=1e-12, atol=1e-14)


def union_size(lists, lo, hi):
    inside = [indices[(indices >= lo) & (indices < hi)] for indices, _ in lists]
    return len(np.unique(np.concatenate(inside)))


def ring_gather_bytes(world, sizes):
    """What a rank passes on round a ring: every block but its right neighbour's own."""
    if world.size == 1:
        return 0
    return sum(LENGTH_BYTES + nbytes for b, nbytes in enumerate(sizes) if b != (world.rank + 1) % world.size)


def test_bytes_of_the_all_gather(world):
    n, counts = 100_000, [100 * (rank + 1) for rank in range(world.size)]
    mine = pairs_of(world.rank, n, counts[world.rank], dtype=np.float32)
    sent, _ = sent_bytes(world, lambda: reduce_pairs(world, *mine, n, schedule="allgather"))
    assert sent == ring_gather_bytes(world, [wire_bytes(k, n, 4) for k in counts])


def test_bytes_of_recursive_doubling(world):
    if world.size & (world.size - 1):
        pytest.skip("the closed form holds for powers of two")
    n, k = 100_000, 1000
    lists = [pairs_of(rank, n, k, dtype=np.float32) for rank in range(world.size)]
    sent, _ = sent_bytes(world, lambda: reduce_pairs(world, *lists[world.rank], n, schedule="recursive_doubling"))
    expected, width = 0, 1
    while width < world.size:
        first = world.rank // width * width
        expected += LENGTH_BYTES + wire_bytes(union_size(lists[first : first + width], 0, n), n, 4)
        width *= 2
    assert sent == expected


@pytest.mark.parametrize("skewed", [False, True], ids=["even", "skewed"])
@pytest.mark.parametrize("keep", [None, 2000])
def test_bytes_of_split(world, skewed, keep):
    n, k = 200_000, 2000
    lists = [pairs_of(rank, n, k, dtype=np.float32, skewed=skewed) for rank in range(world.size)]
    rows = np.stack([balance.sample(indices) for indices, _ in lists])
    edges = balance.edges(rows, n, world.size)
    sent, result = sent_bytes(world, lambda: reduce_pairs(world, *lists[world.rank], n, keep, "split"))
    found = result[0]
    ranges = list(pairwise(edges))
    mine = lists[world.rank][0]
    small = rows[0].nbytes * (world.size - 1)
    reducing = sum(
        LENGTH_BYTES + wire_bytes(int(((mine >= lo) & (mine < hi)).sum()), hi - lo, 4)
        for owner, (lo, hi) in enumerate(ranges)
        if owner != world.rank
    )
    if keep is None:
        assert len(found) == union_size(lists, 0, n)
    sizes = [wire_bytes(int(((found >= lo) & (found < hi)).sum()), hi - lo, 4) for lo, hi in ranges]
    exact = small + reducing + ring_gather_bytes(world, sizes)
    if keep is None:
        assert sent == exact
        return
    # The selection's counts: 256 numbers of 8 bytes in each of at most 4 rounds, and a number for the ties.
    levels = (world.size - 1).bit_length() + 1
    assert exact <= sent <= exact + 4 * levels * 2048 + 8 * world.size
    assert len(found) == min(keep, union_size(lists, 0, n))


@pytest.mark.parametrize("skewed", [False, True], ids=["even", "skewed"])
def test_ranges_are_balanced(world, skewed):
    n, k = 10_000_000, 20_000
    lists = [pairs_of(rank, n, k, skewed=skewed) for rank in range(world.size)]
    edges = balance.edges(np.stack([balance.sample(i) for i, _ in lists]), n, world.size)
    loads = sum(np.histogram(indices, edges)[0] for indices, _ in lists)
    assert loads.max() <= 1.1 * loads.mean()


def test_keep_stays_below_six_k_whatever_the_ranks(world):
    n, k = 1_000_000, 10_000
    mine = pairs_of(world.rank, n, k, dtype=np.float32)
    sent, _ = sent_bytes(world, lambda: reduce_pairs(world, *mine, n, k, "split"))
    # 6 k elements of 4 bytes, as Ok-Topk counts values and indices.
    assert sent <= 6 * k * 4 * (world.size - 1) / world.size


def test_auto_turns_dense_when_the_union_fills(world):
    if world.size == 1:
        pytest.skip("one rank has nothing to choose")
    n = 200_000
    for k in (200, 150_000):
        reduce_pairs(world, *pairs_of(world.rank, n, k, dtype=np.float32), n)
    made = {key[1]: name for key, name in world.attached[Choices].items() if key[0] == n}
    assert made[max(made)] == "dense"
    assert made[min(made)] != "dense"


def test_wrong_input_is_an_error_on_every_rank(world):
    good = np.array([1, 2], np.int32), np.array([1.0, 2.0])
    cases = [
        (np.array([1, 1], np.int32), good[1], "twice"),
        (np.array([1, 10], np.int32), good[1], "for a vector of 10"),
        (np.array([-1, 2], np.int32), good[1], "for a vector of 10"),
        (good[1], good[1], "whole numbers"),
        (good[0], good[1][:1], "one value for each index"),
    ]
    for indices, values, text in cases:
        # Only the last rank is wrong; all must hear of it.
        mine = (indices, values) if world.rank == world.size - 1 else good
        with pytest.raises((PeerError, TypeError), match=text):
            hpctk.ops.sparse_allreduce(*mine, 10)
    for settings in ({"schedule": "ring"}, {"keep": -1}, {"keep": 1.5}):
        with pytest.raises(SettingError):
            hpctk.ops.sparse_allreduce(*good, 10, **settings)
    if world.size > 1:
        with pytest.raises(MismatchError, match="size"):
            hpctk.ops.sparse_allreduce(*good, 10 + world.rank)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_keep_loses_nothing_where_a_range_is_almost_full(world, schedule):
    """A range of which almost all is kept travels as a dense one; its zeros were not kept."""
    n, k = 100_000, 1000
    indices = np.arange(k, dtype=np.int32)
    rows = [np.random.default_rng(rank).standard_normal(k).astype(np.float32) for rank in range(world.size)]
    mine = rows[world.rank]
    found, total, dropped = hpctk.ops.sparse_allreduce(indices, mine, n, keep=970, schedule=schedule)
    assert len(found) <= 970
    returned = np.zeros(n)
    returned[indices[dropped]] = mine[dropped]
    back = hpctk.allreduce(torch.from_numpy(returned), op="sum").numpy()
    np.testing.assert_allclose((as_dense(found, total, n) + back)[:k], np.sum(rows, 0), atol=1e-5)


@pytest.mark.parametrize("keep", [None, 3])
@pytest.mark.parametrize("schedule", ["allgather", "recursive_doubling", "split"])
def test_vectors_longer_than_32_bits_can_count(world, schedule, keep):
    n = 2**31 + 1000
    indices = np.array([5 + world.rank, 2**31 - 1, 2**31 + 7], np.int64)
    found, total, _ = hpctk.ops.sparse_allreduce(indices, np.array([1.0, 2.0, 4.0]), n, keep=keep, schedule=schedule)
    sums = dict(zip(found.tolist(), total.tolist(), strict=True))
    assert sums[2**31 - 1] == 2.0 * world.size
    assert sums[2**31 + 7] == 4.0 * world.size
