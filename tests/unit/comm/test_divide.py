"""Dividing by the number of ranks: a multiplication where that gives the same bits."""

import numpy as np
import pytest

from hpctk.comm.buffers import divide


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 64])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_bits_are_those_of_a_division(size, dtype):
    values = np.random.default_rng(0).standard_normal(10_000).astype(dtype)
    values = np.concatenate([values, np.array([0.0, -0.0, np.inf, np.nan, np.finfo(dtype).tiny, 5e-45], dtype)])
    wanted = values / np.asarray(size, dtype)
    divide(values, size)
    assert values.tobytes() == wanted.tobytes()
