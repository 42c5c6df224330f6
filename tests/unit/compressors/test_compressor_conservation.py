"""Nothing is lost: what a packet carries and what stays in the residual add up to what was given."""

import pytest
import torch
from compressor_cases import DTYPES, MAKERS, bits, is_exact, lay_out, rounding, tensors
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctk.compressors import Residuals
from hpctk.errors import TensorError

KEYS = list(MAKERS)
EDGES = {
    "empty": torch.zeros(0),
    "empty matrix": torch.zeros(3, 0, 2),
    "scalar": torch.tensor(-1.5),
    "one element": torch.tensor([0.25]),
    "zeros": torch.zeros(4, 33),
    "minus zeros": torch.full((17,), -0.0),
    "all equal": torch.full((6, 50), 0.1),
    "ties": torch.tensor([1.0, -1.0, 1.0, 0.5, -1.0, 0.5, -0.5, 0.5, 0.0]),
    "denormals": torch.tensor([6e-8, -1.2e-7, 0.0, 6e-8, 1.8e-7] * 8).reshape(8, 5),
    "tiny": torch.full((5, 40), 1e-40),
    "more than a block": torch.linspace(-3, 3, 2**16 + 13),
    "wide range": torch.logspace(-30, 4, 60).reshape(6, 10),
    "rank one": torch.outer(torch.arange(1.0, 21), torch.arange(-7.0, 13)),
}


def check(key, compressor, tensor, residual):
    """Feed once and compare; the sum may be beyond what PowerSGD's factors can hold."""
    total = residual + tensor
    given_bits, before = bits(tensor), bits(residual)
    refusal = ""
    try:
        packet = compressor.feed(tensor, residual, "w")
    except TensorError as error:
        refusal = str(error)
    if refusal:
        assert bits(residual) == before
        assert not total.isfinite().all() or (key.startswith("powersgd") and "range" in refusal)
        return
    assert total.isfinite().all()
    assert bits(tensor) == given_bits
    decoded = compressor.decompress(packet)
    assert decoded.shape == tensor.shape
    assert decoded.dtype == tensor.dtype == residual.dtype
    assert residual.isfinite().all()
    if is_exact(key):
        # Adding 0.0 turns -0.0 into 0.0 on both sides.
        assert bits(decoded + residual) == bits(total + 0.0)
    else:
        assert rounding(decoded, residual, total) <= 1


@pytest.mark.parametrize("key", KEYS)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_sent_and_left_add_up(key, data):
    tensor = data.draw(tensors())
    residual = data.draw(tensors(dtype=tensor.dtype, shape=tuple(tensor.shape)))
    compressor = MAKERS[key]()
    check(key, compressor, tensor, residual)
    check(key, compressor, tensor, residual)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("key", KEYS)
def test_sent_and_left_add_up_at_the_edges(key, edge, dtype):
    tensor = EDGES[edge].to(dtype)
    compressor, residual = MAKERS[key](), torch.zeros_like(tensor)
    for _ in range(3):
        check(key, compressor, tensor, residual)
        assert residual.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("key", KEYS)
def test_the_largest_numbers_do_not_overflow(key, dtype):
    limit = torch.finfo(dtype).max
    for tensor in (
        torch.full((3, 50), limit, dtype=dtype),
        torch.tensor([limit, -limit, 0.0, limit / 2] * 10, dtype=dtype).reshape(4, 10),
        torch.full((600,), limit, dtype=dtype),
    ):
        check(key, MAKERS[key](), tensor, torch.zeros_like(tensor))


@pytest.mark.parametrize("layout", ["turned", "spread"])
@pytest.mark.parametrize("key", KEYS)
def test_layout_makes_no_difference(key, layout):
    plain = torch.randn(6, 30, generator=torch.Generator().manual_seed(3))
    odd = lay_out(plain, layout)
    assert not odd.is_contiguous()
    one, other = MAKERS[key](), MAKERS[key]()
    assert bits(one.compress(plain, "w").data) == bits(other.compress(odd, "w").data)
    left, odd_left = torch.ones(6, 30), lay_out(torch.ones(6, 30), layout)
    assert bits(one.feed(plain, left, "w").data) == bits(other.feed(odd, odd_left, "w").data)
    assert bits(left) == bits(odd_left)


@pytest.mark.parametrize("key", KEYS)
def test_an_expanded_gradient_is_taken_and_an_expanded_residual_refused(key):
    gradient = torch.tensor(0.5).expand(6, 40)
    check(key, MAKERS[key](), gradient, torch.zeros(6, 40))
    with pytest.raises(TensorError, match="expanded"):
        MAKERS[key]().feed(torch.zeros(6, 40), gradient)


@pytest.mark.parametrize("key", KEYS)
def test_a_gradient_that_wants_a_gradient_is_taken(key):
    tensor = torch.ones(6, 40, requires_grad=True)
    packet = MAKERS[key]().compress(tensor)
    assert not packet.data.requires_grad
    assert not MAKERS[key]().decompress(packet).requires_grad
    MAKERS[key]().feed(tensor, torch.zeros(6, 40))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("key", KEYS)
def test_what_is_not_finite_is_refused_by_name_and_index(key, dtype, bad):
    tensor = torch.ones(4, 70, dtype=dtype)
    residual = torch.rand(4, 70, dtype=torch.float32).to(dtype)
    tensor[2, 31], tensor[3, 5] = bad, bad
    before = bits(residual)
    compressor = MAKERS[key]()
    for refused in (lambda: compressor.compress(tensor, "fc.w"), lambda: compressor.feed(tensor, residual, "fc.w")):
        with pytest.raises(TensorError, match=r"'fc\.w': element 171 of 280 "):
            refused()
    assert bits(residual) == before


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("key", KEYS)
def test_a_sum_that_overflows_is_refused(key, dtype):
    tensor = torch.zeros(3, 50, dtype=dtype)
    tensor[1, 7] = torch.finfo(dtype).max
    residual = tensor.clone()
    with pytest.raises(TensorError, match="'w': element 57 of 150 "):
        MAKERS[key]().feed(tensor, residual, "w")
    assert bits(residual) == bits(tensor)


@pytest.mark.parametrize("key", KEYS)
def test_a_bad_element_behind_many_blocks_is_found(key):
    tensor = torch.zeros(3 * 2**16 + 5)
    tensor[-2] = float("nan")
    for refused in (MAKERS[key]().compress, lambda t: MAKERS[key]().feed(t, torch.zeros_like(t))):
        with pytest.raises(TensorError, match=f"element {3 * 2**16 + 3} of"):
            refused(tensor)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("key", KEYS)
def test_other_dtypes_are_spared_and_refused(key, dtype):
    compressor, tensor = MAKERS[key](), torch.zeros(3).to(dtype)
    assert compressor.is_excluded("w", tensor)
    with pytest.raises(TensorError, match="bfloat16"):
        compressor.compress(tensor)
    with pytest.raises(TensorError, match="bfloat16"):
        compressor.feed(tensor, tensor.clone())


def test_what_is_no_tensor_is_refused():
    with pytest.raises(TensorError, match="'w' is a list"):
        MAKERS["sign"]().compress([1.0], "w")


@pytest.mark.parametrize("key", KEYS)
def test_a_residual_that_does_not_fit_is_refused(key):
    for residual in (torch.zeros(4), torch.zeros(5, dtype=torch.float64), torch.zeros(5, 1)):
        with pytest.raises(TensorError, match="its residual"):
            MAKERS[key]().feed(torch.ones(5), residual, "w")


@pytest.mark.parametrize("key", KEYS)
def test_feeding_again_and_again_sends_everything(key):
    """The sum of all that was sent is the sum of all that was given, but for the residual."""
    generator = torch.Generator().manual_seed(1)
    compressor, kept = MAKERS[key](), Residuals()
    shape, given_sum, sent = ((8, 30), torch.zeros(8, 30, dtype=torch.float64), torch.zeros(8, 30, dtype=torch.float64))
    for _ in range(20):
        tensor = torch.randn(shape, generator=generator, dtype=torch.float64)
        given_sum += tensor
        sent += compressor.decompress(kept.feed(compressor, "w", tensor))
    torch.testing.assert_close(sent + kept.of("w", given_sum), given_sum, rtol=1e-9, atol=1e-9)


def test_half_saturates_and_keeps_the_rest():
    residual = torch.zeros(3)
    compressor = MAKERS["half"]()
    packet = compressor.feed(torch.tensor([1e6, -1e6, 1.0]), residual)
    assert packet.data.tolist() == [65504, -65504, 1]
    assert residual.tolist() == [1e6 - 65504, 65504 - 1e6, 0]
    assert MAKERS["half-bfloat16"]().compress(torch.tensor([65504.0]).half()).data.tolist() == [65280]


def test_feeding_does_not_hand_out_the_residual_itself():
    for make in MAKERS.values():
        residual, compressor = torch.zeros(6, 40), make()
        packet = compressor.feed(torch.ones(6, 40), residual)
        left = residual.clone()
        compressor.decompress(packet).fill_(7)
        packet.data.fill_(0)
        assert torch.equal(residual, left)
