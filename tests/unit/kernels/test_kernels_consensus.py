"""AdaCons's inner products and weighted sum, against plain numpy."""

import numpy as np
import pytest

from hpctk.kernels.consensus import BLOCK, add_products, weighted_sum


def taken_out(parts, lo, rank):
    """Return a rank's elements from `lo` on, of which nothing is left in the parts, and the rank."""
    own = parts[rank, lo:].copy()
    parts[rank] = np.nan
    return own, rank


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize(("lo", "hi"), [(0, 0), (3, 4), (0, BLOCK), (5, 3 * BLOCK + 2)])
def test_products_are_added_to_what_is_there(dtype, ranks, lo, hi):
    parts = np.random.default_rng(ranks).standard_normal((ranks, 4 * BLOCK)).astype(dtype)
    exact = parts[:, lo:hi].astype(np.float64)
    inner, squared = np.full(ranks, 2.0), np.full(ranks, 3.0)
    add_products(parts, lo, hi, inner, squared, *taken_out(parts, lo, ranks // 2))
    np.testing.assert_allclose(inner, 2 + exact @ exact.sum(0), rtol=1e-13)
    np.testing.assert_allclose(squared, 3 + (exact**2).sum(1), rtol=1e-13)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_weighted_sum_is_written_in_the_order_of_ranks(rank):
    parts = np.random.default_rng(0).standard_normal((3, 1000)).astype(np.float32)
    weights = np.array([0.25, -3.0, 0.1], np.float32)
    wanted = parts[0] * weights[0]
    wanted += parts[1] * weights[1]
    wanted += parts[2] * weights[2]
    rest = parts[rank, 900:].copy()
    out, _ = taken_out(parts, 100, rank)
    weighted_sum(parts, 100, 900, weights, out, rank)
    assert out[:800].tobytes() == wanted[100:900].tobytes()
    assert out[800:].tobytes() == rest.tobytes()
