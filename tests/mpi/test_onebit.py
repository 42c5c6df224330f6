"""The one-bit all-reduce on real ranks, against a plain computation of all ranks."""

import numpy as np
import pytest

from hpctk.collectives.engine.engine import engine_of
from hpctk.collectives.onebit import onebit_allreduce, shard_bounds, sign_bytes
from hpctk.errors import TensorError
from hpctk.kernels import packing
from hpctk.schedules import bounds


def delta_of(rank, n, step, dtype):
    return np.random.default_rng([rank, n, step]).standard_normal(n).astype(dtype)


def sign(values):
    return np.where(values < 0, -1.0, 1.0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [1, 7, 8, 9, 1000, 100_003])
def test_against_a_plain_computation(world, n, dtype):
    tolerance = 1e-12 if dtype is np.float64 else 1e-5
    server, plain_server = np.zeros(np.diff(shard_bounds(world, n))[0], dtype), np.zeros(n)
    for step in range(3):
        rows = [delta_of(rank, n, step, dtype) for rank in range(world.size)]
        scales = [float(np.abs(row).mean(dtype=np.float64)) for row in rows]
        signs, scale = onebit_allreduce(world, packing.pack_signs(rows[world.rank]), scales[world.rank], n, server)
        sent = np.mean([sign(row) * s for row, s in zip(rows, scales, strict=True)], axis=0)
        wanted = plain_server + sent
        common = np.abs(wanted).mean()
        assert scale == pytest.approx(common, rel=tolerance)
        got = packing.unpack_signs(signs, n, scale, np.dtype(dtype))
        # Where the sum is so near to zero that rounding decides its sign, either is right.
        clear = np.abs(wanted) > tolerance
        np.testing.assert_array_equal(sign(got)[clear], sign(wanted)[clear])
        plain_server = wanted - sign(got) * common
        lo, hi = shard_bounds(world, n)
        np.testing.assert_allclose(server, plain_server[lo:hi], atol=10 * tolerance)


@pytest.mark.parametrize("n", [5, 4096, 100_003])
def test_counted_bytes_are_one_bit_each_way(world, n):
    shards = [np.diff(bounds(sign_bytes(n), world.size, range(rank, rank + 1)))[0] for rank in range(world.size)]
    server = np.zeros(np.diff(shard_bounds(world, n))[0], np.float32)
    packed = packing.pack_signs(delta_of(world.rank, n, 0, np.float32))
    before = engine_of(world).counter.sent_bytes
    onebit_allreduce(world, packed, 1.0, n, server)
    sent = engine_of(world).counter.sent_bytes - before
    right = (world.rank + 1) % world.size
    others = world.size - 1
    passed_on = sign_bytes(n) - shards[right] if world.size > 1 else 0
    assert sent == sign_bytes(n) - shards[world.rank] + passed_on + 2 * 8 * others
    if n > 10_000:
        assert sent * 8 <= 2 * 1.1 * n


def test_wrong_lengths_are_refused(world):
    with pytest.raises(TensorError, match="server residual"):
        onebit_allreduce(world, np.zeros(2, np.uint8), 1.0, 16, np.zeros(99, np.float32))
