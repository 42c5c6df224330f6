"""Packets of all ranks, and what they come to: a mean over all ranks, or over those that have sent an element."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from hpctk import torch_private
from hpctk.collectives.engine.gather_rows import gather_rows
from hpctk.collectives.engine.gather_tensors import gather_tensors
from hpctk.comm.world import World
from hpctk.compressors.core.compressor import Residuals
from hpctk.compressors.core.packet import Packet
from hpctk.compressors.core.sparse import SparseCompressor
from hpctk.kernels import many, rows

Tensors = Mapping[str, torch.Tensor]
Packets = Mapping[str, Packet]


def gather(here: World, mine: Packets, *, lengths_differ: bool) -> list[dict[str, Packet]]:
    """Return the packets of all ranks, in rank order. Collective over the communicator.

    `lengths_differ` says that a rank cannot tell from its own packets how long those of the others are.
    """
    whole = torch.cat([packet.data for packet in mine.values()])
    lengths = np.array([[packet.nbytes for packet in mine.values()]])
    if lengths_differ:
        lengths = gather_rows(here, lengths[0])
    ends = np.broadcast_to(lengths.cumsum(1), (here.size, len(mine)))
    messages = gather_tensors(here, whole, ends[:, -1])
    return [
        {
            name: replace(packet, data=part)
            for (name, packet), part in zip(mine.items(), data.tensor_split(cuts[:-1]), strict=True)
        }
        for data, cuts in zip(messages, ends.tolist(), strict=True)
    ]


def add_up(tensors: Tensors, compressor: Any, messages: Sequence[Packets]) -> None:
    """Replace tensors by the mean of what the ranks' packets stand for. In place."""
    for tensor in tensors.values():
        tensor.zero_()
    for packets in messages:
        for name, tensor in tensors.items():
            compressor.add_to(tensor.view(-1), packets[name])
    for tensor in tensors.values():
        tensor /= len(messages)


def add_up_by_contributors(tensors: Tensors, compressor: Any, messages: Sequence[Packets]) -> None:
    """Replace tensors by sums, each element's divided by the number of ranks that have sent it. In place."""
    for name, tensor in tensors.items():
        total, senders = tensor.zero_().view(-1), np.zeros(tensor.numel(), np.int32)
        for packets in messages:
            compressor.add_to(total, packets[name])
            senders[compressor.places(packets[name])] += 1
        total /= torch.from_numpy(np.maximum(senders, 1, out=senders)).to(tensor.device)


def select_one(
    compressor: SparseCompressor, name: str, tensor: torch.Tensor, residuals: Residuals | None
) -> tuple[Any, Any]:
    """Return the elements of one tensor that are sent, as host arrays; they are taken out of its residual, in place.

    Values in half precision are returned in float32, in which they are summed.
    """
    found, taken = compressor.select(tensor, None if residuals is None else residuals.of(name, tensor), name)
    indices, values = (x.cpu().numpy() if isinstance(x, torch.Tensor) else x for x in (found, taken))
    if values.itemsize > 2:
        return indices, values
    return indices, torch.from_numpy(values).view(tensor.dtype).float().numpy()


def put(tensors: list[torch.Tensor], edges: Any, indices: Any, values: Any, *, clear: bool = False) -> None:
    """Write the elements of a sparse vector into tensors, laid one after the other; with `clear` zeros elsewhere."""
    if rows.are_rows(tensors) and tensors[0].element_size() == values.itemsize:
        many.write_sparse(rows.addresses_of(tensors), edges, indices, values, clear)
        return
    if clear:
        torch_private.foreach_zero_(tensors)
    cuts = np.searchsorted(indices, edges)
    for tensor, start, (lo, hi) in zip(tensors, edges, pairwise(cuts), strict=False):
        if lo == hi:
            continue
        where = torch.from_numpy(indices[lo:hi].astype(np.int64) - int(start))
        tensor.view(-1)[where.to(tensor.device)] = torch.from_numpy(values[lo:hi]).to(tensor)
