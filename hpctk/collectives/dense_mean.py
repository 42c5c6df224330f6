"""The mean or sum of several tensors over all ranks, as they are: small ones together, large ones where they lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from hpctk import torch_private
from hpctk.collectives.allreduce import reduce_in_place
from hpctk.collectives.engine.call_recording import label
from hpctk.collectives.engine.engine import engine_of
from hpctk.comm import buffers
from hpctk.comm.collective import collective
from hpctk.comm.world import World
from hpctk.kernels import rows

Tensors = Mapping[str, torch.Tensor]
#: What is left to do, of this rank alone.
Work = Callable[[], None]

#: From this size on a tensor is reduced where it lies: it fills the network by itself, and copying it costs more.
LARGE_BYTES = 2**20


@collective
def dense_mean(
    here: World,
    tensors: Tensors,
    schedule: str = "auto",
    what: str = "tensors",
    into: Tensors | None = None,
    later: list[Work] | None = None,
) -> None:
    """Replace tensors by their mean over all ranks. In place, unless tensors `into` which to write are given.

    Those are contiguous, and otherwise like them. `what` they are, in the plural: for the statistics. With `later`
    small tensors stay as they are until what is put there is called; before the next mean, that is.
    """
    _dense(here, tensors, "mean", schedule, what, tensors if into is None else into, later)


@collective
def dense_sum(here: World, tensors: Tensors, schedule: str = "auto", what: str = "tensors") -> None:
    """Replace tensors by their sum over all ranks; as `dense_mean`. In place."""
    _dense(here, tensors, "sum", schedule, what, tensors)


def _dense(
    here: World, tensors: Tensors, op: str, schedule: str, what: str, into: Tensors, later: list[Work] | None = None
) -> None:
    engine = engine_of(here)
    # In the order in which they come, which is that of all ranks; a set's order is each rank's own.
    dtypes = list(dict.fromkeys(tensor.dtype for tensor in tensors.values()))
    small = {name: x for name, x in tensors.items() if x.nbytes < LARGE_BYTES or not x.is_contiguous()}
    if len(small) < len(tensors):
        for name, tensor in tensors.items():
            if name not in small:
                target = into[name]
                source = None if target is tensor else tensor.view(-1)
                with engine.span(name):
                    reduce_in_place(here, target.view(-1), buffers.dtype_of(tensor), op, schedule, source)
    for dtype in dtypes:
        named = small if len(dtypes) == 1 else {name: x for name, x in small.items() if x.dtype == dtype}
        if not named:
            continue
        alike = list(named.values())
        targets = alike if into is tensors else [into[name] for name in named]
        with engine.span(label(named, what)) as span:
            if rows.are_rows(alike):
                with span.staging():
                    edges = rows.edges_of(rows.sizes_of(alike))
                    flat = _scratch(here, alike[0], int(edges[-1]))
                    rows.gather(alike, edges, flat.numpy())
                reduce_in_place(here, flat, buffers.dtype_of(flat), op, schedule)
                if later is not None:
                    later.append(partial(rows.scatter, flat.numpy(), targets, edges))
                    continue
                with span.staging():
                    rows.scatter(flat.numpy(), targets, edges)
                continue
            with span.staging():
                out = _scratch(here, alike[0], sum(tensor.numel() for tensor in alike))
                flat = torch.cat([tensor.reshape(-1) for tensor in alike], out=out)
            reduce_in_place(here, flat, buffers.dtype_of(flat), op, schedule)
            parts = flat.split([tensor.numel() for tensor in alike])
            shaped = [part.view_as(one) for part, one in zip(parts, alike, strict=True)]
            if later is not None:
                later.append(partial(torch_private.foreach_copy_, targets, shaped))
                continue
            with span.staging():
                torch_private.foreach_copy_(targets, shaped)


def _scratch(here: World, like: torch.Tensor, n: int) -> torch.Tensor:
    """Return memory to lay n elements in; on the host the same in every step, new pages are slow."""
    if buffers.on_device(like):
        return like.new_empty(n)
    # Of each dtype its own: what is there may be fetched later.
    memory = engine_of(here).workspace(f"dense_mean {like.dtype}", n * like.element_size())
    return torch.from_numpy(memory).view(like.dtype)
