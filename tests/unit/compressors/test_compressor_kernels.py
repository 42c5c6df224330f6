"""Compressing by a compiled kernel and by torch or numpy operations gives the same bits."""

import pytest
import torch
from compressor_cases import bits
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctk.compressors import QSGD, Half, Sign, half, power_sgd, qsgd, sign
from hpctk.compressors.power_sgd import PowerSGD
from hpctk.errors import TensorError

MAKERS = {
    "sign": Sign,
    "half": Half,
    "half-bfloat16": lambda: Half("bfloat16"),
    "qsgd": QSGD,
    "qsgd-2": lambda: QSGD(2, bucket=7),
    "qsgd-3": lambda: QSGD(3, bucket=100),
    "qsgd-8": lambda: QSGD(8, bucket=1),
    "powersgd": lambda: PowerSGD(3),
}
TROUBLE = [0.0, -0.0, 1.0, -1.0, 2.0**-149, 2.0**-24, 1.5 * 2.0**-24, -(2.0**-25), 65504.0, 65520.0, -7e4, 1e30]
TROUBLE += [3.3e38, -3.4e38, float("nan"), float("inf")]
WIDE = [torch.float32, torch.float64]


def by_operations(monkeypatch):
    """Make every compressor take the way of tensors that no kernel serves."""
    for module in (half, power_sgd, qsgd, sign):
        monkeypatch.setattr(module, "is_plain", lambda tensor: False)


def fed(make, tensor, residual):
    """Return the bytes of three packets in a row, the last without the residual, and of what is left after each."""
    compressor, left = make(), residual.clone()
    compressor.set_rank(2)
    seen = []
    ways = [lambda: compressor.feed(tensor, left, "w")] * 2 + [lambda: compressor.compress(tensor, "w")]
    for compress in ways:
        try:
            packet = compress()
            seen += [bits(packet.data), bits(compressor.decompress(packet)), packet.stamp]
        except TensorError as error:
            seen.append(str(error))
        seen.append(bits(left))
    return seen


def both_ways(make, tensor, residual):
    kernels = fed(make, tensor, residual)
    with pytest.MonkeyPatch.context() as monkeypatch:
        by_operations(monkeypatch)
        operations = fed(make, tensor, residual)
    assert kernels == operations


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("key", MAKERS)
@pytest.mark.parametrize("shape", [(0,), (1,), (9, 7), (70, 1000), (600, 701)], ids=str)
def test_feeding(key, shape, dtype):
    source = torch.Generator().manual_seed(5)
    tensor = torch.randn(shape, generator=source, dtype=dtype)
    residual = torch.randn(shape, generator=source, dtype=dtype) * 1e-3
    both_ways(MAKERS[key], tensor, residual)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(sorted(MAKERS)),
    st.sampled_from(WIDE),
    st.lists(st.sampled_from(TROUBLE), max_size=40),
    st.integers(0, 9),
)
def test_feeding_what_makes_trouble(key, dtype, values, bad):
    tensor = torch.tensor(values, dtype=dtype)
    if bad:
        tensor = tensor.nan_to_num(1.0, 2.0)
    residual = torch.linspace(-1, 1, len(values), dtype=dtype)
    both_ways(MAKERS[key], tensor, residual)


@pytest.mark.parametrize("key", MAKERS)
def test_magnitudes_at_the_end_of_the_range(key):
    for dtype in WIDE:
        limit = torch.finfo(dtype).max
        tensor = torch.full((40, 60), limit, dtype=dtype)
        tensor[torch.rand(40, 60, generator=torch.Generator().manual_seed(4)) < 0.5] *= -1
        both_ways(MAKERS[key], tensor, torch.zeros(40, 60, dtype=dtype))


@pytest.mark.parametrize("key", MAKERS)
@pytest.mark.parametrize("place", [0, 299_999, 400_000])
def test_nothing_is_changed_where_a_sum_is_not_finite(key, place):
    tensor, residual = torch.full((401, 1001), 3e38), torch.full((401, 1001), 1.0)
    residual.view(-1)[place] = 3e38
    before = bits(residual)
    with pytest.raises(TensorError, match=f"'w': element {place} of 401401"):
        MAKERS[key]().feed(tensor, residual, "w")
    assert bits(residual) == before


def test_power_sgd_forms_no_copy_of_what_surely_fits(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "__add__", lambda *_: pytest.fail("a sum beside the residual"))
    residual = torch.zeros(40, 60)
    PowerSGD(2).feed(torch.ones(40, 60), residual, "w")
    assert residual.abs().max() < 1e-5
