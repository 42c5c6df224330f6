"""Sparse all-reduce: the sum of sparse vectors, on all ranks, for bytes that follow the elements, not the length.

Exact, by three plans on lists of (index, value) pairs, or dense where the union of all lists fills up:

| schedule | how |
|---|---|
| allgather | everyone gets everyone's list and sums them up |
| recursive_doubling | partners exchange and merge what they have, at distance 1, 2, 4, ... |
| split | each rank sums one range of indices; the ranges are cut so that all have equally much to do |
| dense | a vector of all n elements, by the best dense schedule |

With `keep` only the k largest of the sum come back. What was dropped is given back to those who sent it,
as a mask over their own elements: sum over ranks of what they sent = what was kept + what they got back.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpctk.collectives.allreduce import reduce_in_place
from hpctk.collectives.engine.elements import InPlace
from hpctk.collectives.engine.engine import engine_of
from hpctk.collectives.engine.gather_messages import gather_messages
from hpctk.collectives.engine.gather_rows import gather_rows
from hpctk.collectives.sparse import balance
from hpctk.collectives.sparse.blocks import Pairs, SparseBlocks
from hpctk.collectives.sparse.keep import largest
from hpctk.collectives.tuning import auto
from hpctk.comm import buffers
from hpctk.comm.buffers import DTYPES
from hpctk.comm.collective import collective
from hpctk.comm.world import World, world
from hpctk.compressors.core import sparse
from hpctk.errors import SettingError, TensorError
from hpctk.kernels.merge import merge, not_in, scatter, take
from hpctk.kernels.packing import index_dtype
from hpctk.kernels.select import top_k
from hpctk.schedules import build, cached_plan, ring, rotation
from hpctk.schedules.core.plan import Plan
from hpctk.schedules.core.registry import names
from hpctk.schedules.cost import sparse as sparse_cost
from hpctk.schedules.cost.sparse import Offer

if TYPE_CHECKING:
    from hpctk.comm.world import Comm

#: Seconds per element of the dense way, beside its all-reduce: room for the vector, and a look for what is not zero.
DENSE_ELEMENT_S = 2e-9
#: Lists are given up where they move more than this part of a dense vector's bytes.
DENSE_FROM = 0.5


class SparseSum(NamedTuple):
    """The sum of all ranks' sparse vectors.

    Attributes
    ----------
    indices, values
        The same on every rank, indices ascending.
    dropped
        For each of this rank's own elements, as it gave them, whether it is missing in the sum.
    """

    indices: Any
    values: Any
    dropped: Any


@collective
def sparse_allreduce(
    indices: Any, values: Any, size: int, *, keep: int | None = None, schedule: str = "auto", comm: Comm | None = None
) -> SparseSum:
    """Return the sum of all ranks' sparse vectors: ascending indices, their values, and what was dropped.

    Not in place. Ranks may give different numbers of elements, none too.
    Indices whose values cancel may be listed, with a zero, or not.

    Parameters
    ----------
    indices : torch.Tensor or numpy.ndarray
        Whole numbers from 0 to size - 1, each once, in any order.
    values : torch.Tensor or numpy.ndarray
        One for each index: float32 or float64; float16 and bfloat16 travel and are summed as float32.
    size : int
        Length of the vector.
    keep : int, optional
        Return only the `keep` largest magnitudes of the sum, ties lowest index first. `dropped` tells which
        of one's own elements are not in it: add those to a residual, and nothing is lost.
    schedule : str
        "allgather", "recursive_doubling", "split", "dense" or "auto".
    comm : MPI.Intracomm or torch.distributed.ProcessGroup, optional
        COMM_WORLD where not given.
    """
    here = world(comm)
    kind = getattr(values, "dtype", type(values).__name__)
    valueless = [buffers.is_uninitialised(x) or bool(getattr(x, "is_meta", False)) for x in (indices, values)]
    with here.one_thread:
        settings = [("dtype", kind), ("size", size), ("keep", keep), ("schedule", schedule)]
        here.agree("sparse_allreduce", [*settings, ("without values", valueless)])
        for given in (indices, values):
            buffers.check_values(given)
            if buffers.on_device(given):
                here.note_staging(given)
        _check_settings(size, keep, schedule)
        with here.shared_errors("sparse_allreduce"):
            own, own_values, order = _own_pairs(indices, values, size)
        with engine_of(here).span(elements=size, dense_bytes=size * own_values.itemsize):
            found, total, dropped = reduce_pairs(here, own, own_values, size, keep, schedule)
    if order is not None:
        as_given = np.empty_like(dropped)
        as_given[order] = dropped
        dropped = as_given
    return _like(indices, values, found, total, dropped)


@collective
def reduce_pairs(
    here: World,
    indices: Any,
    values: Any,
    n: int,
    keep: int | None = None,
    schedule: str = "auto",
    *,
    as_many: bool = False,
) -> tuple[Any, Any, Any]:
    """Return indices, values and what was dropped, of host arrays that all ranks know to belong together.

    Not in place. Indices, of `index_dtype(n)`, ascend without duplicates below n, the
    length of the vector; values are float32 or float64. `keep` and `schedule` as in `sparse_allreduce`. Where all ranks
    are known to give `as_many` elements a schedule is chosen without asking them.
    """
    samples: Any = None
    if schedule == "auto" and as_many:
        schedule = choose_lists(here, n, len(indices), keep, values.itemsize)
    if schedule in ("auto", "split"):
        samples = gather_rows(here, balance.sample(indices))
    if schedule == "auto":
        schedule = choose_lists(here, n, int(samples[:, 0].max()), keep, values.itemsize)
    if schedule == "dense":
        found, total = _dense(here, indices, values, n, keep)
    elif schedule == "split" and keep is not None:
        blocks = SparseBlocks(balance.edges(samples, n, here.size), indices, values)
        payload_bytes = sparse.wire_bytes(len(indices), n, values.itemsize)
        found, total = _split_and_keep(here, blocks, keep, payload_bytes)
    else:
        plan = cached_plan(schedule, "sparse_allreduce", here.size, nodes=here.nodes)
        found, total = _by_plan(here, plan, indices, values, n, samples, as_many=as_many)
        if keep is not None:
            found, total = _kept(found, total, keep)
    if keep is None:
        return found, total, np.zeros(len(indices), bool)
    return found, total, not_in(indices, found)


def _by_plan(here: World, plan: Plan, indices: Any, values: Any, n: int, samples: Any, *, as_many: bool) -> Pairs:
    if plan.kind == "allgather":
        mine = sparse.write(indices, values, n)
        everyone = _gather_alike(here, plan, mine) if as_many else gather_messages(here, plan, mine)
        return summed_lists(everyone, n, values.dtype.name)
    ranges = balance.edges(samples, n, plan.blocks) if plan.blocks > 1 else [0, n]
    blocks = SparseBlocks(ranges, indices, values)
    payload_bytes = sparse.wire_bytes(len(indices), n, values.itemsize)
    engine_of(here).run_ragged(plan, blocks, payload_bytes=payload_bytes)
    return blocks.result()


def summed_lists(messages: Sequence[Any], n: int, dtype: str) -> Pairs:
    """Return the sum of sparse vectors in their wire form.

    Neighbours first, so that each element is merged log2(ranks) times.
    """
    return _merged([sparse.read(data, n, dtype) for data in messages])


def summed_pairs(lists: Sequence[Pairs], n: int, keep: int | None, own: Any) -> tuple[Any, Any, Any]:
    """Return what `reduce_pairs` does by an all-gather, of the lists of all ranks that are known here already.

    Local; the same bits. `own` are this rank's indices.
    """
    itemsize = lists[0][1].itemsize
    if any(sparse.turns_dense(len(indices), n, itemsize) for indices, _ in lists):
        # By way of the wire form, in which a list that is almost full has its zeros listed, too.
        name = lists[0][1].dtype.name
        lists = [sparse.read(sparse.write(*pairs, n), n, name) for pairs in lists]
    found, total = _merged(list(lists))
    if keep is None:
        return found, total, np.zeros(len(own), bool)
    found, total = _kept(found, total, keep)
    return found, total, not_in(own, found)


def _merged(lists: list[Pairs]) -> Pairs:
    while len(lists) > 1:
        odd = lists[len(lists) // 2 * 2 :]
        lists = [merge(*a, *b) for a, b in zip(lists[::2], lists[1::2], strict=False)] + odd
    return lists[0]


def _gather_alike(here: World, plan: Plan, mine: Any) -> list[Any]:
    """Return all ranks' messages, which are of one length: nobody has to say how long theirs is."""
    everyone = np.empty((here.size, len(mine)), np.uint8)
    everyone[here.rank] = mine
    engine_of(here).run(plan, InPlace(everyone.reshape(-1), 1), payload_bytes=len(mine))
    return list(everyone)


def _split_and_keep(here: World, blocks: SparseBlocks, keep: int, payload_bytes: int) -> Pairs:
    run = engine_of(here).run_ragged
    run(rotation.reduce_scatter(here.size), blocks, payload_bytes=payload_bytes)
    indices, values = blocks.pairs(here.rank)
    taken = largest(here, values, keep)
    blocks.put(here.rank, indices[taken], values[taken])
    run(ring.allgather(here.size), blocks, payload_bytes=0)
    found, total = blocks.result()
    # A range that is almost full travels as a dense one, zeros and all: those were not kept.
    there = total != 0
    return found[there], total[there]


def _dense(here: World, indices: Any, values: Any, n: int, keep: int | None) -> Pairs:
    dense = np.zeros(n, values.dtype)
    scatter(dense, indices, values)
    reduce_in_place(here, dense, DTYPES[dense.dtype.name], "sum", "auto")
    if keep is not None:
        found = top_k(dense.view(f"u{dense.itemsize}"), min(keep, n))
        found = found[dense[found] != 0]
    else:
        found = np.flatnonzero(dense).astype(index_dtype(n))
    return found, take(dense, found)


def _kept(indices: Any, values: Any, keep: int) -> Pairs:
    chosen = top_k(values.view(f"u{values.itemsize}"), min(keep, len(values)))
    return indices[chosen], values[chosen]


class Choices(dict[tuple[int, int, int | None, int], str]):
    """What was chosen so far: (length, most elements of a rank, keep, bytes of a value) -> schedule."""


def choose_lists(here: World, n: int, k: int, keep: int | None, itemsize: int) -> str:
    """Return the schedule that "auto" stands for, where no rank gives more than k of n elements.

    Collective over the communicator at its first call.
    """
    made = here.attached.setdefault(Choices, Choices())
    # Lists whose lengths vary a little are alike: otherwise every call would be priced, and remembered.
    coarse = max(0, k.bit_length() - 3)
    k = min(n, -(-k >> coarse) << coarse)
    if (n, k, keep, itemsize) not in made:
        known, nodes = auto.calibration(here), here.nodes
        offered = offers(here.size, n, k, keep, itemsize, lambda plan, nbytes: known.seconds(plan, nbytes, nodes))
        bound = None if keep is None else 6 * max(k, keep) * itemsize * (here.size - 1) / here.size
        made[n, k, keep, itemsize] = cheapest(offered, bound)
    return str(made[n, k, keep, itemsize])


def cheapest(offered: dict[str, Offer], bound: float | None = None) -> str:
    """Return the fastest way; the dense one only once the union fills up, not to save a few messages.

    With a `bound` on the bytes only ways that keep to it, and split, which does unless lists are very short.
    """
    dense = offered["dense"]
    lists = {
        name: offer
        for name, offer in offered.items()
        if name != "dense" and (bound is None or name == "split" or offer.sent_bytes <= bound)
    }
    best = min(lists, key=lambda name: lists[name].seconds)
    filled = lists[best].sent_bytes >= DENSE_FROM * dense.sent_bytes
    return "dense" if filled and dense.seconds < lists[best].seconds else best


def offers(size: int, n: int, k: int, keep: int | None, itemsize: int, pay: sparse_cost.Pay) -> dict[str, Offer]:
    """Return the cost of every way to sum vectors of n elements, k of them on each rank."""
    wire = partial(sparse.wire_bytes, itemsize=itemsize)
    made = {name: sparse_cost.offer(name, size, n, k, keep, wire, pay) for name in names("sparse_allreduce")}
    plans = [build(name, "allreduce", size) for name in names("allreduce")]
    cheapest = min(plans, key=lambda plan: pay(plan, n * itemsize))
    made["dense"] = Offer(((cheapest, n * itemsize),), pay(cheapest, n * itemsize) + DENSE_ELEMENT_S * n)
    return made


def _check_settings(size: int, keep: int | None, schedule: str) -> None:
    if not isinstance(size, int) or size < 0:
        raise SettingError(f"size={size!r}: need the length of the vector, a whole number")
    if keep is not None and (not isinstance(keep, int) or keep < 0):
        raise SettingError(f"keep={keep!r}: need a whole number of elements, or None for all")
    allowed = [*names("sparse_allreduce"), "dense", "auto"]
    if schedule not in allowed:
        raise SettingError(f"schedule={schedule!r}: allowed are {', '.join(allowed)}")


def _own_pairs(indices: Any, values: Any, size: int) -> tuple[Any, Any, Any]:
    """Return checked host arrays, ascending, and the order they were brought into (None: as they were)."""
    indices, values = _host(indices), _host(values)
    if indices.ndim != 1 or values.shape != indices.shape:
        raise TensorError(
            f"need one value for each index, both 1-D, not {list(indices.shape)} and {list(values.shape)}"
        )
    if indices.dtype.kind not in "iu":
        raise TensorError(f"indices of dtype {indices.dtype}: need whole numbers")
    if values.dtype.name not in ("float16", "float32", "float64"):
        raise TensorError(f"values of dtype {values.dtype}: need float16, bfloat16, float32 or float64")
    if values.dtype == np.float16:
        values = values.astype(np.float32)
    order = None
    if len(indices) > 1 and not (indices[1:] > indices[:-1]).all():
        order = np.argsort(indices, kind="stable")
        indices, values = indices[order], values[order]
        if (indices[1:] == indices[:-1]).any():
            raise TensorError("indices occur twice: sum their values first")
    if len(indices) and (indices[0] < 0 or indices[-1] >= size):
        raise TensorError(f"indices from {indices[0]} to {indices[-1]} for a vector of {size} elements")
    return np.ascontiguousarray(indices, index_dtype(size)), np.ascontiguousarray(values), order


def _host(array: Any) -> Any:
    if not buffers.is_torch(array):
        return np.asarray(array)
    array = array.detach().cpu()
    import torch

    return (array.float() if array.dtype == torch.bfloat16 else array).numpy()


def _like(indices: Any, values: Any, found: Any, total: Any, dropped: Any) -> SparseSum:
    """Return a result in the kind, dtype and place of what the caller gave."""
    if not buffers.is_torch(values):
        return SparseSum(found, total.astype(np.asarray(values).dtype, copy=False), dropped)
    import torch

    home = values.device
    return SparseSum(
        torch.from_numpy(found).to(home),
        torch.from_numpy(total).to(home, values.dtype),
        torch.from_numpy(dropped).to(home),
    )
