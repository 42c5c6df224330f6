"""AdaCons's weights against its worked example, its invariants and its traps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hpctk.collectives.engine.consensus_weights import SCALES, ConsensusState, check, weights
from hpctk.errors import SettingError

EXAMPLE = np.array([[3.0, 4.0], [1.0, 0.0], [0.0, 2.0]])


def aggregate(gradients, state=None, momentum=0.0, scale="unit"):
    gradients = np.asarray(gradients, float)
    w = weights(
        gradients @ gradients.sum(0),
        (gradients**2).sum(1),
        state or ConsensusState(),
        0,
        momentum=momentum,
        scale=scale,
    )
    return w @ gradients


@pytest.mark.parametrize(
    ("scale", "wanted"),
    [
        ("unit", (0.48372093, 0.68372093)),
        ("mean_norm", (1.28992248, 1.82325581)),
        ("coefficients", (0.98578199, 1.39336493)),
    ],
)
def test_worked_example(scale, wanted):
    np.testing.assert_allclose(aggregate(EXAMPLE, scale=scale), wanted, atol=2e-8)


gradients = arrays(
    float, st.tuples(st.integers(2, 6), st.integers(1, 5)), elements=st.floats(0.01, 100, allow_nan=False)
)


@given(gradients, st.randoms(use_true_random=False))
def test_permuting_workers_changes_nothing(given_gradients, random):
    order = list(range(len(given_gradients)))
    random.shuffle(order)
    for scale in SCALES:
        np.testing.assert_allclose(
            aggregate(given_gradients[order], scale=scale), aggregate(given_gradients, scale=scale), rtol=1e-9
        )


@given(gradients)
def test_inner_product_with_the_mean(given_gradients):
    mean = given_gradients.mean(0)
    alpha = given_gradients @ mean / np.linalg.norm(given_gradients, axis=1)
    np.testing.assert_allclose(aggregate(given_gradients) @ mean, (alpha**2).sum() / alpha.sum(), rtol=1e-5)


@given(gradients, st.floats(0.5, 100))
def test_a_common_factor_changes_nothing_in_unit_scale(given_gradients, factor):
    np.testing.assert_allclose(aggregate(given_gradients * factor), aggregate(given_gradients), rtol=1e-5)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_identical_workers(n):
    g = np.array([3.0, 4.0])
    np.testing.assert_allclose(aggregate([g] * n, scale="unit"), g / 5, rtol=1e-8)
    np.testing.assert_allclose(aggregate([g] * n, scale="mean_norm"), g, rtol=1e-8)
    np.testing.assert_allclose(aggregate([g] * n, scale="coefficients"), g, rtol=1e-8)


def test_momentum_is_on_sorted_values_and_unsorted_by_the_inverse():
    state = ConsensusState()
    aggregate(EXAMPLE, state)
    np.testing.assert_allclose(state.sorted_momentum[0], [4 / 3, 2, 2.4], rtol=1e-7)
    # The second step brings the workers in a cyclic order, for which m[idx] and the inverse differ.
    rolled = EXAMPLE[[1, 2, 0]]
    np.testing.assert_allclose(aggregate(rolled, state, momentum=0.5), aggregate(EXAMPLE, momentum=0.0), rtol=1e-7)


@pytest.mark.parametrize("scale", SCALES)
def test_opposed_gradients_fall_back_to_the_mean(scale):
    state = ConsensusState()
    state.sorted_momentum[0] = before = np.array([-1.0, 1.0])
    g = np.array([[1.0, 0.0], [-1.0, 1e-12]])
    np.testing.assert_allclose(aggregate(g, state, momentum=0.99, scale=scale), g.mean(0), atol=1e-15)
    assert state.fallbacks == 1
    assert state.sorted_momentum[0] is before


@pytest.mark.parametrize("scale", SCALES)
def test_all_zero(scale):
    state = ConsensusState()
    np.testing.assert_array_equal(aggregate(np.zeros((3, 4)), state, scale=scale), np.zeros(4))
    assert state.fallbacks == 1


@pytest.mark.parametrize("scale", SCALES)
def test_one_zero_worker_gets_no_weight(scale):
    g = np.array([[3.0, 4.0], [0.0, 0.0], [1.0, 1.0]])
    w = weights(g @ g.sum(0), (g**2).sum(1), ConsensusState(), 0, momentum=0.0, scale=scale)
    assert w[1] == 0
    assert np.isfinite(w).all()
    if scale == "coefficients":
        assert w.sum() == pytest.approx(1)


@pytest.mark.parametrize(("momentum", "scale"), [(1.0, "unit"), (-0.1, "unit"), (float("nan"), "unit"), (0.9, "no")])
def test_settings_are_checked(momentum, scale):
    with pytest.raises(SettingError):
        check(momentum, scale)
