"""The arithmetic of reports, on numbers worked out by hand."""

import math

import numpy as np
import pytest

from hpctk.stats import metrics


def test_amounts_that_make_no_sense_count_as_nothing_and_are_counted():
    values, bad = metrics.clean([1.5, -1, math.nan, math.inf, -math.inf, 2e18, 3])
    np.testing.assert_array_equal(values, [1.5, 0, 0, 0, 0, 0, 3])
    assert bad == 5
    values, bad = metrics.clean(np.array([2**62, 7], np.int64))
    assert (values.tolist(), bad) == ([0.0, 7.0], 1)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (6, 4, 1.5),
        (0, 4, 0),
        (1, 0, None),
        (0, 0, None),
        (math.nan, 1, None),
        (1, math.inf, None),
        (1e300, 1e-300, None),
    ],
)
def test_a_ratio_is_a_number_or_nothing(a, b, expected):
    assert metrics.ratio(a, b) == expected


def test_pop_efficiencies():
    # Four ranks in a run of 10 s: useful 8, 6, 6 and 4 s. POP: 6/8, 8/10, and their product 6/10.
    useful = metrics.useful([10, 10, 10, 10], [2, 4, 4, 6])
    np.testing.assert_array_equal(useful, [8, 6, 6, 4])
    found = metrics.efficiency(useful, 10)
    assert found.load_balance == pytest.approx(0.75)
    assert found.communication == pytest.approx(0.8)
    assert found.parallel == pytest.approx(0.6)
    assert found.load_balance * found.communication == pytest.approx(found.parallel)


def test_pop_without_ranks_or_time():
    assert metrics.efficiency([], 10) == metrics.Efficiency(None, None, None)
    assert metrics.efficiency([0.0, 0.0], 0.0) == metrics.Efficiency(None, None, None)


def test_more_exposed_than_there_was_is_no_negative_work():
    np.testing.assert_array_equal(metrics.useful([1.0], [3.0]), [0.0])


def test_imbalance_is_the_excess_of_the_largest_over_the_mean():
    assert metrics.imbalance([2, 2, 2, 6]) == pytest.approx(1.0)
    assert metrics.imbalance([5, 5]) == 0
    assert metrics.imbalance([0, 0]) is None
    assert metrics.imbalance([]) is None


@pytest.mark.parametrize(
    ("operation", "size", "expected"),
    # nccl-tests' factors are 2(N-1)/N, (N-1)/N, and for an all-gather of N times as many bytes (N-1)/N of them.
    [("allreduce", 4, 1.5), ("reduce_scatter", 4, 0.75), ("allgather", 4, 3.0), ("broadcast", 4, 1.0),
     ("allreduce", 1, 0.0), ("flags", 4, None), ("allreduce", 0, None)],
)  # fmt: skip
def test_bus_factors(operation, size, expected):
    assert metrics.bus_factor(operation, size) == expected


def test_who_waits_most_and_for_whom():
    found = metrics.waiting([4.1, 1.0, 2.0], [10, 10, 10])
    assert found == metrics.Waiting(most=0, share=pytest.approx(0.41), slowest=1)


@pytest.mark.parametrize(("waiting", "communication"), [([1], [2]), ([], []), ([0, 0], [1, 1]), ([1, 1], [0, 0])])
def test_where_nobody_waits_for_anybody(waiting, communication):
    assert metrics.waiting(waiting, communication) is None


def test_a_course_between_its_points():
    assert metrics.at([0, 10, 20], [4, 2, 1], 15) == pytest.approx(1.5)
    assert metrics.at([0, 10], [4, math.nan], 0) == 4
    assert metrics.at([1, 10], [4, 2], 11) is None
    assert metrics.at([1, 10], [4, 2], 0.5) is None
    assert metrics.at([], [], 1) is None


@pytest.mark.parametrize(("n", "most"), [(1, 5), (5, 5), (7, 3), (1000, 64), (0, 4)])
def test_bins_are_even_and_in_order(n, most):
    places = metrics.bins(n, most)
    assert len(places) == n
    if n:
        counts = np.bincount(places)
        assert len(counts) == min(n, most)
        assert counts.max() - counts.min() <= 1
        assert (np.diff(places) >= 0).all()


def test_means_of_bins_leave_out_what_is_no_number():
    found = metrics.bin_means([1.0, 3.0, math.nan, 5.0, math.nan, math.nan], np.array([0, 0, 1, 1, 2, 2]))
    np.testing.assert_array_equal(found, [2.0, 5.0, math.nan])
