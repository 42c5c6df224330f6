"""The k largest magnitudes: exact for every input, whatever the threads, and nothing changed on a refusal."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctk.kernels import magnitude, select
from hpctk.kernels import threads as kernel_threads
from hpctk.kernels.select import NotFinite, feed_top_k, first_not_finite, pick_top_k, top_k

few = settings(deadline=None, max_examples=60)
UNSIGNED = {2: np.uint16, 4: np.uint32, 8: np.uint64}


@pytest.fixture(autouse=True, scope="module")
def _small_is_large():
    """Let arrays of some hundred elements take the ways of large ones: threads, sample, candidates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_threads, "WORTH_A_THREAD", 64)
        patch.setattr(select, "WORTH_A_SAMPLE", 256)
        yield


def bits(values):
    return values.view(UNSIGNED[values.itemsize])


def oracle(values, k):
    """Return the indices of the k largest magnitudes the slow way."""
    mask = UNSIGNED[values.itemsize](2 ** (8 * values.itemsize - 1) - 1)
    return np.sort(np.argsort(mask - (bits(values) & mask), kind="stable")[:k])


def normal(rng, n):
    return rng.standard_normal(n)


def finite_bits(rng, n):
    """Return values of all exponents, as many tiny as huge ones."""
    return rng.choice([-1.0, 1.0], n) * np.exp2(rng.uniform(-148, 126, n))


KINDS = {
    "normal": normal,
    "all exponents": finite_bits,
    "denormal": lambda rng, n: rng.integers(-50, 50, n) * 2.0**-149,
    "zero": lambda rng, n: np.zeros(n),
    "signed zeros": lambda rng, n: rng.choice([0.0, -0.0], n),
    "equal": lambda rng, n: np.full(n, 0.1),
    "equal magnitudes": lambda rng, n: rng.choice([-0.1, 0.1], n),
    "few distinct": lambda rng, n: rng.integers(-2, 3, n) * 0.5,
    "nearly all zero": lambda rng, n: normal(rng, n) * (rng.random(n) < 0.01),
    "ascending": lambda rng, n: np.sort(normal(rng, n)),
    "falling magnitudes": lambda rng, n: np.sort(np.abs(normal(rng, n)))[::-1].copy(),
    "heavy tail": lambda rng, n: np.clip(rng.standard_cauchy(n) ** 3, -1e37, 1e37),
    "largest at the end": lambda rng, n: normal(rng, n) * np.where(np.arange(n) < 0.9 * n, 1, 1e6),
    "period of seven": lambda rng, n: normal(rng, n) * np.where(np.arange(n) % 7, 1e-3, 1),
}
cases = st.tuples(st.sampled_from(sorted(KINDS)), st.integers(0, 3000), st.floats(0, 1.1), st.integers(0, 2**32 - 1))


def drawn(case, dtype):
    kind, n, density, seed = case
    # Half of the cases at the densities of practice.
    k = int(density * n) if seed % 2 else int(density * n / 10)
    return KINDS[kind](np.random.default_rng(seed), n).astype(dtype), k


@few
@given(cases, st.sampled_from(["float16", "float32", "float64"]), st.sampled_from([1, 2, 3]))
def test_top_k_is_exact(case, dtype, threads):
    with np.errstate(over="ignore"):
        values, k = drawn(case, dtype)
    before = values.tobytes()
    indices = top_k(bits(values), k, threads=threads)
    assert indices.dtype == np.int32
    assert indices.tolist() == oracle(values, k).tolist()
    assert values.tobytes() == before


@few
@given(st.integers(0, 2**32 - 1), st.integers(0, 2000), st.integers(0, 300), st.sampled_from([1, 3]))
def test_top_k_orders_all_patterns_of_bits(seed, n, k, threads):
    # bfloat16 comes like this; NaN lies above inf.
    pattern = np.random.default_rng(seed).integers(0, 2**16, n).astype(np.uint16)
    assert top_k(pattern, k, threads=threads).tolist() == oracle(pattern, k).tolist()


@few
@given(cases, cases, st.sampled_from(["float32", "float64"]), st.sampled_from([1, 2, 3]), st.booleans())
def test_feeding_is_adding_and_taking_out(case, other, dtype, threads, alone):
    residual, k = drawn(case, dtype)
    gradient = None if alone else drawn((other[0], len(residual), *other[2:]), dtype)[0]
    total = residual.copy() if alone else residual + gradient
    before = None if alone else gradient.tobytes()
    expected = oracle(total, k)
    indices, values = feed_top_k(residual, gradient, k, threads=threads)
    assert indices.dtype == np.int32
    assert indices.tolist() == expected.tolist()
    assert values.tobytes() == total[expected].tobytes()
    total[expected] = 0.0
    assert residual.tobytes() == total.tobytes()
    assert alone or gradient.tobytes() == before


@few
@given(cases, st.sampled_from(["float32", "float64"]), st.data())
def test_not_finite_is_refused_and_nothing_changed(case, dtype, data):
    residual, k = drawn((case[0], case[1] + 1, *case[2:]), dtype)
    gradient = residual[::-1].copy()
    n = len(residual)
    bad = data.draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=3))
    for index in bad:
        way = data.draw(st.sampled_from(["inf", "-inf", "nan", "residual", "overflow", "opposite"]))
        largest = np.finfo(dtype).max
        residual[index], gradient[index] = {
            "residual": (np.nan, 1),
            "overflow": (largest, largest),
            "opposite": (np.inf, -np.inf),
        }.get(way, (1, float(way) if way.strip("-") in ("inf", "nan") else 1))
    before = residual.tobytes(), gradient.tobytes()
    for threads in (1, 3):
        with pytest.raises(NotFinite, match=f"element {min(bad)} is not finite") as caught:
            feed_top_k(residual, gradient, k, threads=threads)
        assert caught.value.index == min(bad)
    assert (residual.tobytes(), gradient.tobytes()) == before


def test_the_largest_finite_values_pass():
    residual = np.full(300, np.finfo(np.float32).max, np.float32)
    indices, values = feed_top_k(residual, np.zeros_like(residual), 2)
    assert indices.tolist() == [0, 1]
    assert values.tolist() == [np.finfo(np.float32).max] * 2


@pytest.mark.parametrize("name", ["float32", "float64"])
def test_the_first_bad_element_is_the_first_inf_or_nan(name):
    for value in (np.inf, -np.inf, np.nan):
        assert first_not_finite(np.array([1, np.finfo(name).max, value, value], name), None) == 2
    assert first_not_finite(np.array([np.finfo(name).max, -0.0], name), None) == -1
    assert first_not_finite(np.full(2, np.finfo(name).max, name), np.array([0, np.finfo(name).max], name)) == 1
    assert first_not_finite(np.empty(0, name), None) == -1


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_first_bad_element_is_found_in_any_thread(threads):
    values = np.ones(5000, np.float32)
    for index in (4999, 2500, 1700, 0):
        values[index] = np.nan
        assert first_not_finite(values, None, threads=threads) == index


@pytest.mark.parametrize("n", [0, 1, 2, 31, 32, 33, 300])
@pytest.mark.parametrize("more", [0, 1, 10**12])
def test_all_of_them(n, more):
    residual = np.arange(n, dtype=np.float32)
    assert top_k(bits(residual), n + more).tolist() == list(range(n))
    indices, values = feed_top_k(residual, None, n + more)
    assert indices.tolist() == values.tolist() == list(range(n))
    assert residual.tobytes() == np.zeros(n, np.float32).tobytes()


def test_none_of_them_still_adds():
    residual, gradient = np.ones(500, np.float32), np.ones(500, np.float32)
    indices, values = feed_top_k(residual, gradient, 0)
    assert len(indices) == len(values) == len(top_k(bits(residual), 0)) == 0
    assert values.dtype == np.float32
    assert (residual == 2).all()


def test_minus_zero_may_be_taken_and_leaves_plus_zero():
    residual = np.array([-0.0, 0.0, -0.0], np.float32)
    indices, values = feed_top_k(residual, None, 1)
    assert indices.tolist() == [0]
    assert np.signbit(values).tolist() == [True]
    assert np.signbit(residual).tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((np.zeros(3, np.float16), None, 1), "float32 or float64, not float16"),
        ((np.zeros(3, np.float32), np.zeros(4, np.float32), 1), "does not fit"),
        ((np.zeros(3, np.float32), np.zeros(3), 1), "does not fit"),
        ((np.zeros((2, 2)), None, 1), "flat, contiguous"),
        ((np.zeros(6)[::2], None, 1), "flat, contiguous"),
        ((np.zeros(3), None, -1), "k=-1"),
    ],
)
def test_what_cannot_be_fed(arguments, words):
    with pytest.raises(ValueError, match=words):
        feed_top_k(*arguments)


def test_top_k_takes_unsigned_views():
    for wrong in (np.zeros(3, np.int32), np.zeros(3, np.uint8)):
        with pytest.raises(ValueError, match="give an unsigned view"):
            top_k(wrong, 1)


# Each of the ways through the selection, by name, so that none is only believed to be tested.


@pytest.fixture
def ways(monkeypatch):
    taken = []

    def watch(name):
        function = getattr(select, name)

        def watched(*arguments, **options):
            result = function(*arguments, **options)
            taken.append((name, result))
            return result

        monkeypatch.setattr(select, name, watched)

    for name in ("_collect", "_among", "_threshold_from_guess"):
        watch(name)
    return taken


def sampled_positions(n):
    positions = np.empty(min(select.SAMPLE, n // 16))
    magnitude.sample(np.arange(float(n)), None, 1.0, positions)
    return positions.astype(int)


def feed(residual, k):
    gradient = residual / 3
    total = residual + gradient
    expected = oracle(total, k)
    indices, values = feed_top_k(residual, gradient, k, threads=2)
    assert indices.tolist() == expected.tolist()
    assert values.tobytes() == total[expected].tobytes()
    total[expected] = 0
    assert residual.tobytes() == total.tobytes()


def test_the_usual_way(ways):
    feed(np.random.default_rng(0).standard_normal(20_000).astype(np.float32), 200)
    assert [name for name, _ in ways] == ["_collect", "_among"]
    assert 200 <= len(ways[0][1][0]) < 1000


def test_too_few_candidates(ways):
    residual = np.random.default_rng(0).standard_normal(20_000).astype(np.float32)
    residual[sampled_positions(20_000)] += 100
    feed(residual, 500)
    (_, candidates), (_, lucky) = ways
    assert len(candidates[0]) < 500
    assert lucky is None


def test_too_many_candidates(ways):
    residual = np.random.default_rng(0).standard_normal(20_000).astype(np.float32)
    residual[sampled_positions(20_000)] *= 1e-3
    feed(residual, 200)
    assert ways == [("_collect", None), ("_threshold_from_guess", None)]


def test_more_equal_ones_than_anything_else(ways):
    feed(np.ones(20_000, np.float32), 200)
    assert [name for name, _ in ways] == ["_collect", "_threshold_from_guess"]
    assert ways[1][1][1] == 200


@few
@given(cases, cases, st.sampled_from(["float32", "float64"]), st.sampled_from([1, 2, 3]), st.booleans())
def test_picking_from_sums_and_differences_changes_nothing(case, other, dtype, threads, minus):
    source, k = drawn(case, dtype)
    more = drawn((other[0], len(source), *other[2:]), dtype)[0]
    total = source - more if minus else source + more
    before = source.tobytes(), more.tobytes()
    expected = oracle(total, k)
    indices, values = pick_top_k(source, more, k, minus=minus, threads=threads)
    assert indices.tolist() == expected.tolist()
    assert values.tobytes() == total[expected].tobytes()
    assert (source.tobytes(), more.tobytes()) == before
    if len(source):
        # Equal infinities: their difference is NaN, their sum infinite.
        source[-1] = more[-1] = np.inf
        with pytest.raises(NotFinite, match=f"element {len(source) - 1} is"):
            pick_top_k(source, more, k, minus=minus, threads=threads)


@pytest.mark.parametrize("n", [31, 32, 33, 4096, 65_536, 200_003])
@pytest.mark.parametrize("minus", [True, False])
def test_small_and_large_tensors_pick_alike(n, minus):
    rng = np.random.default_rng(n)
    source, more = (rng.integers(-9, 9, n).astype(np.float32) for _ in range(2))
    k = max(1, n // 50)
    indices, values = np.empty(k, np.int32), np.empty(k, np.float32)
    weight = np.float32(-1 if minus else 1)
    assert magnitude.pick_small(source, more, weight, select.INFINITY["f"], indices, values) == -1
    picked = pick_top_k(source, more, k, minus=minus)
    assert indices.tolist() == picked[0].tolist()
    assert values.tolist() == picked[1].tolist()


def test_fewer_than_k_that_are_not_zero(ways):
    residual = np.zeros(20_000, np.float32)
    residual[[5, 19_999]] = 1
    feed(residual, 200)
    assert ways[1] == ("_threshold_from_guess", (0, 198))


def test_all_candidates_in_one_thread(ways):
    residual = np.random.default_rng(0).standard_normal(40_000).astype(np.float32)
    residual[:20_000] *= 1e-3
    feed(residual, 2000)
    assert [name for name, _ in ways] == ["_collect", "_among"]


@pytest.mark.parametrize(("kind", "part"), [("normal", 0.15), ("equal", 1.0), ("zero", 1.0), ("ascending", 0.15)])
def test_memory(kind, part):
    n = 1_000_000
    residual = KINDS[kind](np.random.default_rng(0), n).astype(np.float32)
    gradient = np.zeros(n, np.float32)
    feed_top_k(residual.copy(), gradient, n // 100, threads=2)
    tracemalloc.start()
    try:
        feed_top_k(residual, gradient, n // 100, threads=2)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < part * residual.nbytes
