"""What goes on the wire: exactly how many bytes, and what becomes of bytes that are wrong."""

import struct

import numpy as np
import pytest
import torch
from compressor_cases import DTYPES, MAKERS, bits
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctk.compressors import QSGD, Half, Packet, PowerSGD, RandomK, Sign, TopK
from hpctk.compressors.core import sparse
from hpctk.compressors.core.compressor import kept_elements as kept
from hpctk.errors import HpctkError

KEYS = list(MAKERS)


def normal(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(dtype)


def with_data(packet, data):
    return Packet(data, packet.shape, packet.dtype, packet.stamp)


def from_bytes(wire, dtype=torch.uint8):
    return torch.tensor(list(wire), dtype=torch.uint8).view(dtype)


def refused(compressor, packet, data, words=None):
    if isinstance(data, (bytes, bytearray)):
        data = from_bytes(data)
    with pytest.raises(HpctkError, match=words):
        compressor.decompress(with_data(packet, data))


# Sizes.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 1000, 4097])
def test_sizes_are_exact(n, dtype):
    tensor, size = normal(n, dtype=dtype), dtype.itemsize
    wide = max(4, size)
    k = kept(0.01, n)
    expected = {
        MAKERS["identity"](): n * size,
        Half(): 2 * n,
        RandomK(0.01): k * size,
        TopK(0.01): sparse.wire_bytes(k, n, size),
        Sign(): wide + (n + 7) // 8,
        QSGD(4): -(-n // 512) * wide + (4 * n + 7) // 8,
        QSGD(3, bucket=10): -(-n // 10) * wide + (3 * n + 7) // 8,
        PowerSGD(2): n * size,
    }
    for compressor, nbytes in expected.items():
        packet = compressor.compress(tensor, "w")
        assert packet.nbytes == nbytes == len(bits(packet.data)), compressor
        assert packet.n == n
        assert packet.data.dim() == 1
        assert packet.data.is_contiguous()
        residual = torch.zeros_like(tensor)
        assert compressor.feed(tensor, residual, "w").nbytes == nbytes


def test_power_sgd_sends_two_thin_matrices():
    for dtype, size in ((torch.float32, 4), (torch.float16, 4), (torch.float64, 8)):
        assert PowerSGD(3).compress(normal(20, 5, 6, dtype=dtype)).nbytes == 3 * (20 + 30) * size


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_signs_take_one_bit(dtype):
    for n in (1000, 1001, 12345):
        assert Sign().compress(normal(n, dtype=dtype)).nbytes * 8 <= 1.1 * n


def test_top_k_takes_six_bytes_per_kept_element():
    for n in (10_000, 1_000_000):
        packet = TopK(0.01).compress(normal(n))
        assert packet.nbytes <= 6 * kept(0.01, n)


def test_a_density_keeps_what_a_reader_expects():
    assert [kept(0.1, 30), kept(0.29, 100), kept(0.07, 100), kept(1.0, 7), kept(0.01, 5), kept(0.5, 0)] == [
        3, 29, 7, 7, 1, 0,
    ]  # fmt: skip
    assert kept(0.01, 25_000_000) == 250_000


# What they say, by hand.


def test_sign_of_zero_is_plus_and_the_scale_is_the_mean_magnitude():
    packet = Sign().compress(torch.tensor([0.0, -0.0, -3.0, 1.0]))
    assert bits(packet.data) == struct.pack("<f", 1.0) + bytes([0b0100])
    assert Sign().decompress(packet).tolist() == [1, 1, -1, 1]


def test_sign_adds_magnitudes_up_in_double_precision():
    tensor = torch.full((3_000_000,), 0.1)
    tensor[0] = 1e7
    exact = (1e7 + 2_999_999 * float(torch.tensor(0.1))) / 3_000_000
    assert struct.unpack("<f", bits(Sign().compress(tensor).data)[:4])[0] == np.float32(exact)


def test_top_k_takes_the_largest_and_of_equals_the_first():
    tensor = torch.tensor([1.0, -5.0, 3.0, -3.0, 3.0, 0.5, 0.0, 0.1, 0.2, 0.3])
    for dtype in DTYPES:
        indices, values = TopK(0.3).select(tensor.to(dtype))
        assert indices.tolist() == [1, 2, 3]
        assert len(values) == 3
        assert TopK(0.3).decompress(TopK(0.3).compress(tensor.to(dtype))).tolist() == [0, -5, 3, -3] + [0] * 6


def test_top_k_selects_from_the_sum_with_the_residual():
    for dtype in DTYPES:
        residual = torch.tensor([1.0, 0.0, 2.0, -4.0], dtype=dtype)
        indices, _ = TopK(0.5).select(torch.tensor([1.0, 0.5, 2.0, 4.0], dtype=dtype), residual, "w")
        assert indices.tolist() == [0, 2]
        assert residual.tolist() == [0, 0.5, 0, 0]


def test_top_k_equals_a_sort():
    tensor = normal(200_000)
    indices, values = TopK(0.01).select(tensor)
    expected = torch.sort(tensor.abs(), descending=True, stable=True).indices[:2000].sort().values
    assert indices.tolist() == expected.tolist()
    assert values.tolist() == tensor[expected].tolist()


def test_qsgd_levels_are_multiples_of_the_norm():
    packet = QSGD(2, bucket=4).compress(torch.tensor([3.0, -4.0, 0.0, 0.0, 2.0]))
    norms = struct.unpack("<2f", bits(packet.data)[:8])
    assert norms == (5.0, 2.0)
    decoded = QSGD(2, bucket=4).decompress(packet).tolist()
    assert decoded[4] == 2.0
    assert decoded[2:4] == [0, 0]
    assert set(decoded[:2]) <= {0.0, 5.0, -5.0}


# Bytes that are wrong.


@pytest.mark.parametrize("shape", [(), (9,), (6, 40), (0,)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("key", KEYS)
def test_other_lengths_are_refused(key, dtype, shape):
    compressor = MAKERS[key]()
    packet = compressor.compress(normal(*shape, dtype=dtype))
    for data in (packet.data[:-1], torch.cat([packet.data, packet.data.new_zeros(1)])):
        if data.numel() != packet.data.numel():
            refused(compressor, packet, data)
    refused(compressor, packet, packet.data.to(torch.int64))
    refused(compressor, packet, packet.data.reshape(1, -1))


@pytest.mark.parametrize("key", KEYS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_random_bytes_are_refused_or_decoded(key, data):
    dtype = data.draw(st.sampled_from(DTYPES))
    shape = data.draw(st.sampled_from([(), (1,), (13,), (6, 40), (300,), (0, 3)]))
    compressor = MAKERS[key]()
    packet = compressor.compress(normal(*shape, dtype=dtype))
    wire = bytearray(bits(packet.data))
    if data.draw(st.booleans()) and wire:
        for _ in range(data.draw(st.integers(1, 4))):
            wire[data.draw(st.integers(0, len(wire) - 1))] = data.draw(st.integers(0, 255))
    else:
        wire = bytearray(data.draw(st.binary(min_size=len(wire), max_size=len(wire) + 1)))
    if len(wire) % packet.data.element_size():
        return
    other = from_bytes(wire, packet.data.dtype)
    try:
        decoded = compressor.decompress(with_data(packet, other))
    except HpctkError:
        return
    assert decoded.shape == shape
    assert decoded.dtype == dtype


@pytest.mark.parametrize("scale", [-1.0, float("nan"), float("inf"), -float("inf")])
def test_wrong_scales_are_refused(scale):
    packet = Sign().compress(normal(20))
    refused(Sign(), packet, struct.pack("<f", scale) + bits(packet.data)[4:], "scale")
    packet = QSGD().compress(normal(20))
    refused(QSGD(), packet, struct.pack("<f", scale) + bits(packet.data)[4:], "norm")


def test_a_scale_beyond_the_dtype_is_refused():
    for compressor in (Sign(), QSGD()):
        packet = compressor.compress(normal(20, dtype=torch.float16))
        refused(compressor, packet, struct.pack("<f", 7e4) + bits(packet.data)[4:], "finite")


def test_bits_after_the_last_are_refused():
    for compressor in (Sign(), QSGD(3)):
        packet = compressor.compress(normal(21))
        wire = bytearray(bits(packet.data))
        wire[-1] |= 0x80
        refused(compressor, packet, wire)


@pytest.mark.parametrize("width", [2, 4, 8])
def test_minus_zero_is_refused(width):
    compressor = QSGD(width)
    packet = compressor.compress(torch.zeros(16))
    wire = bytearray(bits(packet.data))
    assert set(wire) == {0}
    wire[4] |= 1 << (width - 1)
    refused(compressor, packet, wire, "minus zero")


def test_wrong_sparse_headers_and_indices_are_refused():
    compressor = TopK(0.02)
    packet = compressor.compress(normal(100))
    good = bytearray(bits(packet.data))

    def plain(indices, n=100, header=None):
        values = struct.pack(f"<{len(indices)}f", *range(len(indices)))
        head = struct.pack("<Q", (len(indices) << 8) if header is None else header)
        wire = head + values + struct.pack(f"<{len(indices)}i", *indices)
        return Packet(from_bytes(wire), (n,), torch.float32)

    assert compressor.decompress(plain([3, 99])).nonzero().tolist() == [[99]]
    for indices in ([3, 100], [-1, 3], [3, 3], [5, 3], [-(2**31), 2**31 - 1]):
        with pytest.raises(HpctkError):
            compressor.decompress(plain(indices))
    for header in (3, 2 << 8 | 3, 2 << 8 | 255, 101 << 8, 1 << 8, (1 << 63) | 2 << 8, 2 << 8 | 2):
        with pytest.raises(HpctkError):
            compressor.decompress(plain([3, 9], header=header))
    refused(compressor, packet, good[:7])
    refused(compressor, packet, b"")


def test_indices_whose_differences_wrap_around_are_refused():
    wire = struct.pack("<Q4f4i", 4 << 8, 1, 2, 3, 4, 0, 2**31 - 1, -5, 99)
    with pytest.raises(HpctkError):
        TopK(0.02).decompress(Packet(from_bytes(wire), (100,), torch.float32))


def test_packets_from_odd_addresses_are_read():
    for key, make in MAKERS.items():
        compressor = make()
        packet = compressor.compress(normal(6, 41), "w")
        if packet.data.dtype == torch.uint8:
            room = torch.zeros(packet.nbytes + 1, dtype=torch.uint8)
            room[1:] = packet.data
            moved = compressor.decompress(with_data(packet, room[1:]))
            assert torch.equal(moved, compressor.decompress(packet)), key
