"""Many small arrays in one call: the same bits as one by one."""

import numpy as np
import pytest
import torch

from hpctk.kernels import magnitude, many, rows, select

DTYPES = [np.float32, np.float64]
LENGTHS = (1, 5, 0, 100, 64, 3, 1000, 1, 2, 7)


def arrays(dtype, seed=0):
    """Numbers of which many are equal, zeros of both signs too, and numbers of which none are."""
    rng = np.random.default_rng(seed)
    few = np.array([-2, -1, 0, 1, 2.5, -0.0], dtype)
    return [rng.choice(few, n) if n % 2 else rng.normal(size=n).astype(dtype) for n in LENGTHS]


def edges_of(parts):
    return np.cumsum([0, *map(len, parts)])


def addresses(parts):
    return np.array([part.ctypes.data for part in parts])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gathering_and_scattering(dtype):
    parts = arrays(dtype)
    edges, flat = edges_of(parts), np.empty(sum(LENGTHS), dtype)
    many.gather(addresses(parts), edges, flat)
    assert flat.tobytes() == np.concatenate(parts).tobytes()
    others = [np.zeros_like(part) for part in parts]
    many.scatter(flat, addresses(others), edges)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(parts, others, strict=True))


@pytest.mark.parametrize("density", [0.01, 0.3, 1.0])
@pytest.mark.parametrize("fed", [True, False], ids=["with residuals", "without"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_of_each_as_one_by_one(dtype, fed, density):
    gradients, residuals = arrays(dtype), arrays(dtype, 1)
    counts = np.array([min(n, max(1, int(density * n))) for n in LENGTHS])
    edges, places = edges_of(gradients), np.cumsum([0, *counts])
    wanted, after = [], [residual.copy() for residual in residuals]
    for i, k in enumerate(counts):
        indices, values = np.empty(k, np.int32), np.empty(k, dtype)
        if fed and k:
            magnitude.feed_small(after[i], gradients[i], select.INFINITY[np.dtype(dtype).char], indices, values)
        elif k:
            indices = select.top_k(gradients[i].view(f"u{gradients[i].itemsize}"), int(k))
            values = gradients[i][indices]
        wanted.append((indices + edges[i], values))
    indices, values = np.empty(places[-1], np.int32), np.empty(places[-1], dtype)
    kept = addresses(residuals) if fed else np.zeros(len(LENGTHS), np.int64)
    before = np.concatenate(gradients).tobytes()
    which = np.arange(len(LENGTHS))
    many.take_largest(kept, addresses(gradients), edges, which, counts, places, indices, values)
    assert indices.tolist() == np.concatenate([found for found, _ in wanted]).tolist()
    assert values.tobytes() == np.concatenate([taken for _, taken in wanted]).tobytes()
    assert np.concatenate(residuals).tobytes() == np.concatenate(after).tobytes()
    assert np.concatenate(gradients).tobytes() == before


@pytest.mark.parametrize("clear", [True, False])
def test_writing_sparse_elements(clear):
    parts = arrays(np.float32)
    edges = edges_of(parts)
    flat = np.concatenate(parts)
    indices = np.array([0, 3, 7, edges[-1] - 1], np.int32)
    values = np.array([9, 8, 7, 6], np.float32)
    if clear:
        flat[:] = 0
    flat[indices] = values
    many.write_sparse(addresses(parts), edges, indices, values, clear)
    assert np.concatenate(parts).tobytes() == flat.tobytes()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_first_bad_row(dtype, value):
    tensors = [torch.full((n,), -0.5, dtype=dtype) for n in LENGTHS]
    tensors[3][1] = -3.5
    sizes = rows.sizes_of(tensors)
    assert rows.largest(tensors, sizes) == (None, 3.5)
    assert rows.first_bad_sum([None] * len(tensors), tensors, sizes) is None
    tensors[6][70] = value
    tensors[8][0] = value
    assert rows.largest(tensors, sizes)[0] == 6
    assert rows.first_bad_sum([None] * len(tensors), tensors, sizes) == (6, 70)


def test_a_sum_that_overflows():
    largest = torch.finfo(torch.float32).max
    tensors, residuals = ([torch.full((3,), largest / 2) for _ in range(4)] for _ in range(2))
    residuals[1] = None
    sizes = rows.sizes_of(tensors)
    assert rows.first_bad_sum(residuals, tensors, sizes) is None
    residuals[2][1] = largest
    assert rows.first_bad_sum(residuals, tensors, sizes) == (2, 1)


def test_what_is_no_row():
    plain = torch.zeros(4)
    for other in (torch.zeros(4, 4).t()[1:], torch.zeros(4, dtype=torch.float64), torch.zeros(4).to_sparse()):
        assert not rows.are_rows([plain, other])
    assert not rows.are_rows([torch.zeros(4, dtype=torch.float16)])
    assert rows.are_rows([])
    assert rows.are_rows([plain, torch.zeros(2, 3)])
