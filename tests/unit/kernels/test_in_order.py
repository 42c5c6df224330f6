"""Sums of numbers, to the same bits on every Python and numpy."""

import numpy as np
import pytest

from hpctk.kernels.in_order import add_in_order, add_pairwise


def test_every_addition_is_rounded():
    """`sum` gives 1.0 since Python 3.12."""
    assert add_in_order([0.1] * 10) == 0.9999999999999999
    assert add_in_order(iter([])) == 0.0


@pytest.mark.parametrize("n", [0, 1, 129, 8192])
def test_short_rows_are_added_as_numpy_does(n):
    rows = np.random.default_rng(n).random((3, n))
    np.testing.assert_array_equal(add_pairwise(rows), rows.sum(1))


@pytest.mark.parametrize("n", [8193, 20_000, 70_001])
def test_long_rows_are_added_alike_among_others_and_alone(n):
    rows = np.random.default_rng(n).random((3, n))
    np.testing.assert_array_equal(add_pairwise(rows), [add_pairwise(row[None].copy())[0] for row in rows])
