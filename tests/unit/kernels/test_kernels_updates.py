"""The passes that update methods make over a model, against plain numpy."""

import numpy as np
import pytest

from hpctk.kernels import updates


def rows(count, n, dtype):
    return [np.random.default_rng(k).standard_normal(n).astype(dtype) for k in range(count)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [0, 1, 1000, 300_001])
@pytest.mark.parametrize("moves", [True, False])
def test_move_ahead(dtype, n, moves):
    point, move, held = rows(3, n, dtype)
    wanted = point - move if moves else point.copy()
    ahead, kept = wanted - held, move.copy()
    updates.move_ahead(point, move if moves else None, held, threads=3)
    assert np.array_equal(point, wanted)
    assert np.array_equal(held, ahead)
    assert np.array_equal(move, kept)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [0, 1, 1000, 300_001])
def test_take_back(dtype, n):
    before, after, out = rows(3, n, dtype)
    wanted, kept = before - after, before.copy()
    updates.take_back(before, after, out, threads=3)
    assert np.array_equal(out, wanted)
    assert np.array_equal(after, kept)
    assert np.array_equal(before, kept)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [0, 1, 1000, 300_001])
def test_squared_distance(dtype, n):
    a, b = rows(2, n, dtype)
    assert updates.squared_distance(a, b, threads=3) == pytest.approx(
        float(np.square(a - b, dtype=np.float64).sum()), rel=1e-12
    )
    assert updates.squared_distance(a, None) == pytest.approx(float(np.square(a, dtype=np.float64).sum()), rel=1e-12)
    assert updates.squared_distance(a, a) == 0


def test_squares_of_float32_do_not_overflow():
    large = np.full(3, 1e30, np.float32)
    assert updates.squared_distance(large, -large) == pytest.approx(1.2e61, rel=1e-6)
    bad = np.array([1, np.nan], np.float32)
    assert np.isnan(updates.squared_distance(bad, None))


def test_lengths_must_fit():
    a, b = rows(2, 5, np.float32)
    with pytest.raises(ValueError, match="5 and 4 elements"):
        updates.squared_distance(a, b[:4])
    with pytest.raises(ValueError, match="5, 5 and 4 elements"):
        updates.move_ahead(a, b, b[:4])


@pytest.mark.parametrize("n", [0, 1, 65_536, 65_537, 700_001])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sum_of_magnitudes(n, dtype):
    a = np.random.default_rng(n).standard_normal(n).astype(dtype)
    sums = {updates.sum_of_magnitudes(a, threads=threads) for threads in (1, 2, 3)}
    assert len(sums) == 1
    np.testing.assert_allclose(sums.pop(), np.abs(a.astype(np.float64)).sum(), rtol=1e-12)
