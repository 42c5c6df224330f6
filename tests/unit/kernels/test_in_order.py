"""Sums of numbers, to the same bits on every Python."""

from hpctk.kernels.in_order import add_in_order


def test_every_addition_is_rounded():
    """`sum` gives 1.0 since Python 3.12."""
    assert add_in_order([0.1] * 10) == 0.9999999999999999
    assert add_in_order(iter([])) == 0.0
