"""The prices of sparse all-reduces, and the ranges of indices that balance their load. No MPI."""

import numpy as np
import pytest

from hpctk.collectives.sparse import balance
from hpctk.collectives.sparse_allreduce import cheapest, offers
from hpctk.compressors.core.sparse import wire_bytes
from hpctk.schedules.cost import sparse as sparse_cost
from hpctk.schedules.cost.machine import Machine
from hpctk.schedules.cost.prices import price

MACHINE = Machine()


def pay(plan, nbytes):
    return price(plan, nbytes, MACHINE)


def test_the_union_of_independent_indices():
    generator = np.random.default_rng(0)
    n, k = 10_000, 700
    for ranks in (1, 2, 5, 20):
        found = len(np.unique(np.concatenate([generator.choice(n, k, replace=False) for _ in range(ranks)])))
        assert sparse_cost.union(k, n, ranks) == pytest.approx(found, rel=0.03)
    assert sparse_cost.union(0, 0, 4) == 0
    assert sparse_cost.union(n, n, 4) == n


@pytest.mark.parametrize("size", [2, 3, 4, 8, 12, 64])
def test_volumes_follow_the_closed_forms(size):
    n, k = 1_000_000, 10_000
    made = offers(size, n, k, None, 4, pay)
    own, together = wire_bytes(k, n, 4), wire_bytes(sparse_cost.union(k, n, size), n, 4)
    assert made["allgather"].sent_bytes == (size - 1) * own
    # Besides, the samples that balance the ranges.
    samples = (size - 1) * sparse_cost.SAMPLE_BYTES
    assert made["split"].sent_bytes == pytest.approx((size - 1) / size * (own + together) + samples, rel=1e-6)
    if size & (size - 1) == 0:
        levels = range(size.bit_length() - 1)
        lists = [wire_bytes(sparse_cost.union(k, n, 1 << level), n, 4) for level in levels]
        assert made["recursive_doubling"].sent_bytes == sum(lists)


def test_keep_does_not_grow_with_the_ranks():
    n, k = 10_000_000, 100_000
    volumes = [offers(size, n, k, k, 4, pay)["split"].sent_bytes for size in (4, 8, 16, 64, 256)]
    assert max(volumes) <= 6 * k * 4
    exact = [offers(size, n, k, None, 4, pay)["split"].sent_bytes for size in (4, 8, 16, 64, 256)]
    assert exact == sorted(exact)
    assert exact[-1] > 10 * volumes[-1]


def test_dense_wins_once_the_union_is_full():
    chosen = {k: cheapest(offers(8, 1_000_000, k, None, 4, pay)) for k in (100, 10_000, 900_000)}
    assert chosen[100] != "dense"
    assert chosen[10_000] != "dense"
    assert chosen[900_000] == "dense"


def test_a_short_vector_stays_sparse_although_dense_has_fewer_rounds():
    assert cheapest(offers(4, 17_226, 861, None, 4, pay)) != "dense"


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
@pytest.mark.parametrize("power", [1, 4, 12])
def test_ranges_hold_equally_much(parts, power):
    n = 1_000_000
    lists = [
        np.unique((n * np.random.default_rng([rank, power]).random(5000) ** power).astype(np.int64))
        for rank in range(parts)
    ]
    edges = balance.edges(np.stack([balance.sample(one) for one in lists]), n, parts)
    assert edges[0] == 0
    assert edges[-1] == n
    assert edges == sorted(edges)
    loads = sum(np.histogram(one, edges)[0] for one in lists) if parts > 1 else np.array([1])
    assert loads.max() <= 1.15 * loads.mean()


def test_ranges_of_ranks_that_have_different_parts():
    n, parts = 40_000, 4
    lists = [np.arange(10_000 * rank, 10_000 * rank + 100 * (rank + 1)) for rank in range(parts)]
    edges = balance.edges(np.stack([balance.sample(one) for one in lists]), n, parts)
    loads = sum(np.histogram(one, edges)[0] for one in lists)
    assert loads.max() <= 1.15 * loads.mean()


def test_ranges_of_nothing_are_even():
    nothing = np.stack([balance.sample(np.empty(0, np.int32))] * 3)
    assert balance.edges(nothing, 9, 3) == [0, 3, 6, 9]
