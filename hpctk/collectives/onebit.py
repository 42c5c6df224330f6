"""One-bit all-reduce, both ways: packed signs to the rank that owns a shard, packed signs back.

As in 1-bit Adam and in SAEF with a server: every rank is the server of one shard.

1. every rank's scale is gathered (N numbers), its packed signs go to the shards' owners by rotation;
2. the owner of a shard forms c = mean_k scale_k * sign_k there and adds what it could not send before:
   z = c + s, s its server residual;
3. the shards' 1-norms are gathered, so that one scale = ||z||_1 / n holds for all of them; o = sign(z) * scale
   stands for z, and s = z - o stays with the owner;
4. the packed signs of o go round a ring.

With B = ceil(n/8) bytes of signs, a rank sends about 2(N-1)/N B and 2(N-1) numbers of 8 bytes. Shards are whole
bytes of signs. Sums over ranks are in rank order, so all ranks come to the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hpctk.collectives.engine.elements import InPlace
from hpctk.collectives.engine.engine import engine_of
from hpctk.collectives.engine.gather_rows import gather_rows
from hpctk.comm.collective import collective
from hpctk.comm.world import World
from hpctk.errors import TensorError
from hpctk.kernels import lean, packing
from hpctk.schedules import bounds, ring, rotation
from hpctk.telemetry.recorder import Span


class Parts:
    """All ranks' signs of this rank's shard, one row each; those of the others are received here."""

    def __init__(self, here: World, signs: Any) -> None:
        self._lo, hi = bounds(len(signs), here.size, range(here.rank, here.rank + 1))
        self.signs = np.empty((here.size, hi - self._lo), np.uint8)
        self.signs[here.rank] = signs[self._lo : hi]

    def room(self, peer: int, lo: int, hi: int) -> Any:
        """Return the memory for the peer's bytes lo .. hi-1."""
        return self.signs[peer, lo - self._lo : hi - self._lo]

    def arrived(self, peer: int, lo: int, hi: int) -> None:
        """Do nothing: the signs are used when all are there."""


def shard_bounds(here: World, n: int) -> tuple[int, int]:
    """Return the first element of the shard that this rank serves, and the one after its last."""
    lo, hi = bounds(sign_bytes(n), here.size, range(here.rank, here.rank + 1))
    return min(8 * lo, n), min(8 * hi, n)


def sign_bytes(n: int) -> int:
    """Return how many bytes the signs of n elements take."""
    return -(-n // 8)


@collective
def onebit_allreduce(here: World, signs: Any, scale: float, n: int, server: Any) -> tuple[Any, float]:
    """Return the packed signs and the scale of the compressed mean over all ranks.

    `signs`, this rank's, of n elements, 8 to a byte (`kernels.packing.pack_signs`), is
    overwritten. `server`, the server residual of this rank's shard (elements `shard_bounds(here, n)`, zeros at first),
    is updated in place.
    """
    lo, hi = shard_bounds(here, n)
    if signs.size != sign_bytes(n) or server.size != hi - lo:
        raise TensorError(
            f"one-bit all-reduce of {n} elements needs {sign_bytes(n)} bytes of signs and a server residual of "
            f"{hi - lo} on rank {here.rank}, not {signs.size} and {server.size}"
        )
    with engine_of(here).span(compressor="Sign", elements=n, dense_bytes=n * server.itemsize) as span:
        return _reduced(here, signs, scale, n, server, span)


def _reduced(here: World, signs: Any, scale: float, n: int, server: Any, span: Span) -> tuple[Any, float]:
    scales = gather_rows(here, np.array([scale], np.float64))[:, 0]
    everyone = Parts(here, signs)
    engine_of(here).run(rotation.reduce_scatter(here.size, keep=True), InPlace(signs, 1), kept=everyone)
    byte_lo, byte_hi = bounds(sign_bytes(n), here.size, range(here.rank, here.rank + 1))
    with span.decompressing():
        norm = lean.add_and_pack(server, everyone.signs, scales / here.size, signs[byte_lo:byte_hi])
    norms = gather_rows(here, np.array([norm], np.float64))[:, 0]
    # In the elements' precision at once: every rank must subtract the same number.
    common = float(server.dtype.type(norms.sum() / n)) if n else 0.0
    with span.compressing():
        packing.add_signs(signs[byte_lo:byte_hi], len(server), -common, server)
    engine_of(here).run(ring.allgather(here.size), InPlace(signs, 1))
    return signs, common
