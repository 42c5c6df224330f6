"""Signs in one bit, codes in 1 to 16."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from hpctk.kernels import packing as kernel
from hpctk.kernels import threads as kernel_threads
from hpctk.kernels.packing import add_signs, pack, pack_signs, packed_length, unpack_signs

few = settings(deadline=None, max_examples=60)
signed = npst.arrays(
    st.sampled_from(["float32", "float64"]),
    st.integers(0, 70),
    elements=st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0**-149, -(2.0**-149), np.inf, -np.inf, np.nan]),
)


@pytest.fixture(params=[1, 2, 3])
def threads(request, monkeypatch):
    """Small arrays are cut into as many parts as there are threads."""
    monkeypatch.setattr(kernel_threads, "WORTH_A_THREAD", 8)
    return request.param


def bits_of(data):
    return [byte >> i & 1 for byte in data.tolist() for i in range(8)]


@few
@given(signed)
def test_signs_bit_by_bit(values):
    data = pack_signs(values)
    expected = [int(v < 0) for v in values] + [0] * (-len(values) % 8)
    assert data.dtype == np.uint8
    assert bits_of(data) == expected


@few
@given(signed, st.floats(0, 100, width=32))
def test_signs_come_back_scaled(values, scale):
    n = len(values)
    decoded = unpack_signs(pack_signs(values), n, scale, values.dtype)
    expected = np.where(values < 0, -values.dtype.type(scale), values.dtype.type(scale))
    assert decoded.dtype == values.dtype
    assert decoded.tobytes() == expected.tobytes()
    out = np.arange(n, dtype=values.dtype) / 3
    total = out + expected
    add_signs(pack_signs(values), n, scale, out)
    assert out.tobytes() == total.tobytes()


def test_signs_do_not_depend_on_threads(threads):
    values = np.random.default_rng(1).standard_normal(1003).astype(np.float32)
    data = pack_signs(values, threads=threads)
    assert data.tobytes() == np.packbits(values < 0, bitorder="little").tobytes()
    out = np.zeros(1003)
    add_signs(data, 1003, 0.1, out, threads=threads)
    assert out.tobytes() == unpack_signs(data, 1003, 0.1, "float64", threads=threads).tobytes()
    assert out.tobytes() == np.where(values < 0, -0.1, 0.1).tobytes()


def test_long_signs_are_packed_in_pieces():
    values = np.random.default_rng(1).standard_normal(300_001)
    assert pack_signs(values, threads=2).tobytes() == np.packbits(values < 0, bitorder="little").tobytes()


def unpack(data, bits, n, threads=None):
    codes = np.empty(n, np.uint8 if bits <= 8 else np.uint16)
    kernel.unpack(data, bits, codes, threads=threads)
    return codes


def oracle(codes, bits):
    number = sum(int(code) << (bits * i) for i, code in enumerate(codes))
    return number.to_bytes((len(codes) * bits + 7) // 8, "little")


@few
@given(st.integers(1, 16), st.data())
def test_codes_are_one_long_number(bits, data):
    codes = data.draw(st.lists(st.integers(0, 2**bits - 1), max_size=150))
    array = np.array(codes, data.draw(st.sampled_from(["uint16", "int64"] + ["uint8"] * (bits <= 8))))
    packed = pack(array, bits)
    assert packed.dtype == np.uint8
    assert len(packed) == packed_length(len(codes), bits)
    assert packed.tobytes() == oracle(codes, bits)
    back = unpack(packed, bits, len(codes))
    assert back.tolist() == codes


@pytest.mark.parametrize("bits", [1, 3, 8, 13])
def test_codes_do_not_depend_on_threads(bits, threads):
    codes = np.random.default_rng(bits).integers(0, 2**bits, 1003).astype(np.uint16)
    packed = pack(codes, bits, threads=threads)
    assert packed.tobytes() == oracle(codes, bits)
    assert (unpack(packed, bits, 1003, threads=threads) == codes).all()


def test_one_bit_is_a_sign():
    values = np.random.default_rng(2).standard_normal(77)
    assert pack((values < 0).astype(np.uint8), 1).tobytes() == pack_signs(values).tobytes()


def test_bytes_may_start_anywhere():
    codes = np.arange(100, dtype=np.uint16) * 7 % 512
    packed = pack(codes, 9)
    buffer = np.zeros(len(packed) + 3, np.uint8)
    for offset in range(4):
        buffer[offset : offset + len(packed)] = packed
        assert (unpack(buffer[offset : offset + len(packed)], 9, 100) == codes).all()


@pytest.mark.parametrize("code", [8, 255, -1])
def test_a_code_too_large_is_refused(code):
    with pytest.raises(ValueError, match="does not fit into 3 bits"):
        pack(np.array([0, code, 1], np.int16), 3)


@pytest.mark.parametrize("length", [0, 1, 3, 4])
def test_wrong_lengths_are_refused(length):
    data = np.zeros(length, np.uint8)
    for read in (
        lambda: unpack(data, 3, 5),
        lambda: unpack_signs(data, 12, 1.0, np.float32),
        lambda: add_signs(data, 12, 1.0, np.zeros(12)),
    ):
        with pytest.raises(ValueError, match=f"2 bytes, not {length}"):
            read()
    with pytest.raises(ValueError, match="12 signs cannot be added to 11 elements"):
        add_signs(np.zeros(2, np.uint8), 12, 1.0, np.zeros(11))


@pytest.mark.parametrize("bit", [7, 6, 4])
def test_bits_after_the_last_must_be_zero(bit):
    data = np.array([0, 1 << bit], np.uint8)
    out = np.zeros(12)
    for read in (
        lambda: unpack(data, 3, 4),
        lambda: unpack_signs(data, 12, 1.0, np.float32),
        lambda: add_signs(data, 12, 1.0, out),
    ):
        with pytest.raises(ValueError, match="not zero"):
            read()
    assert not out.any()


def test_nothing_in_no_bytes():
    nothing = np.empty(0, np.uint8)
    assert len(pack_signs(np.empty(0))) == len(pack(nothing, 5)) == 0
    assert len(unpack_signs(nothing, 0, 1.0, np.float32)) == len(unpack(nothing, 5, 0)) == 0
