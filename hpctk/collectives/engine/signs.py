"""Signs of one long vector, with one scale: the mean of all ranks' signs, and the signs of what all ranks know.

For SAEF without a server every rank sends its packed signs and its scale round a ring, (N-1) bits an element, and
decodes those of all ranks in rank order. For a server whose input is known everywhere nothing but 1-norms travels:
every rank sums up the magnitudes of one shard, so that all ranks use the same scale to the last bit, however many
threads each of them sums with. Two-way one-bit compression, where nobody knows the mean, is in onebit.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from hpctk.collectives.engine.engine import engine_of
from hpctk.collectives.engine.gather_rows import gather_rows
from hpctk.collectives.engine.gather_tensors import gather_tensors
from hpctk.collectives.onebit import shard_bounds
from hpctk.comm.world import World
from hpctk.compressors import sign
from hpctk.compressors.core import arrays
from hpctk.compressors.core.packet import Packet


def sign_packet(scale: float, packed: Any, n: int, dtype: torch.dtype) -> Packet:
    """Return a packet of signs that are packed already; the scale is one of the dtype's numbers."""
    head = np.array([scale], arrays.dtype_name(dtype)).view(np.uint8)
    return Packet(torch.from_numpy(np.concatenate([head, packed])), (n,), dtype)


def gather_signs(here: World, packet: Packet) -> list[tuple[float, torch.Tensor]]:
    """Return all ranks' scales and packed signs, where this rank's lie. Collective over the communicator."""
    dense_bytes = packet.n * packet.dtype.itemsize
    with engine_of(here).span(compressor="Sign", elements=packet.n, dense_bytes=dense_bytes):
        messages = gather_tensors(here, packet.data, np.full(here.size, packet.data.numel()))
        return [sign.read(replace(packet, data=data)) for data in messages]


def mean_of_signs(here: World, packet: Packet, out: torch.Tensor) -> None:
    """Overwrite `out`, of the packet's shape and dtype, by the mean of what all ranks' packets of signs stand for.

    Collective over the communicator. In place.
    """
    with engine_of(here).span() as span:
        everyone = gather_signs(here, packet)
        with span.decompressing():
            out.zero_()
            for scale, signs in everyone:
                sign.add(signs, scale / here.size, out)


def feed_common_signs(here: World, flat: torch.Tensor, residual: torch.Tensor) -> None:
    """Replace a flat tensor that is the same on all ranks by sign(z) * ||z||_1 / n, z its sum with the residual.

    Collective over the communicator. In place: what the result lacks of z is left in the residual.
    """
    n = flat.numel()
    residual += flat
    lo, hi = shard_bounds(here, n)
    norms = gather_rows(here, np.array([sign.one_norm(residual[lo:hi])], np.float64))
    data = sign.write(residual, float(norms.sum() / max(1, n)))
    # Read back: the scale is now in the elements' precision.
    scale, signs = sign.read(Packet(data, (n,), flat.dtype))
    sign.add(signs, -scale, residual)
    flat.zero_()
    sign.add(signs, scale, flat)
