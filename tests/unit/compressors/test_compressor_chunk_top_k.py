"""Chunked top-k on a few bits: the worked example, what travels, both kernels, and where it is exact."""

import numpy as np
import pytest
import torch
from compressor_cases import bits
from simulation import compress

from hpctk.compressors import ChunkTopK
from hpctk.kernels import cells, device, select

VALUES = np.array([1, -1.2, 1.5, -1.1, 1.3, -3, 0.4])
GOALS = [[1, -2, 0.5, 0.1, 3, -0.4, -1.5, 0.2], [-0.2, -1.8, 0.7, 0.3, 0.3, 1.6, -2.5, 0.4]]
#: By codebook and reduce: x after each of two rounds.
ROUNDS = {
    ("sigma", "contributors"): [
        [-0.0475, -0.24225, -0.1045, 0, 0.57, 0.304, -0.26125, 0],
        [0.395675, -0.64597625, 0.27398, 0, 1.013175, 0.55024, -0.72848375, 0],
    ],
    ("sigma", "mean"): [
        [-0.02375, -0.24225, -0.05225, 0, 0.285, 0.152, -0.26125, 0],
        [0.21024687, -0.64597625, 0.10866813, 0, 0.51899688, 0.31291813, -0.72848375, 0],
    ],
    ("signed", "contributors"): [
        [0.19, -0.361, 0.133, 0, 0.57, 0.304, -0.38, 0],
        [0.19, -0.65341, 0.29298, 0.11115, 1.0317, 0.55024, -0.6878, 0],
    ],
}


def normal(n, seed=5):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def test_cells_of_the_worked_example():
    codes, book = cells.cut(VALUES, 2, "sigma")
    assert codes.tolist() == [2, 2, 3, 2, 3, 1, 2]
    # Nobody has code 0: it stands for the mean.
    np.testing.assert_allclose(book, [-0.15714286, -3, -0.225, 1.4], rtol=0, atol=5e-9)
    codes, book = cells.cut(VALUES, 2, "signed")
    assert codes.tolist() == [0, 2, 1, 2, 1, 3, 0]
    np.testing.assert_allclose(book, [0.7, 1.4, -1.15, -3], rtol=0, atol=1e-15)


@pytest.mark.parametrize(("codebook", "reduce"), ROUNDS)
def test_two_rounds_of_the_worked_example(codebook, reduce):
    compressor = ChunkTopK(2, 4, codebook=codebook)
    goals = torch.tensor(GOALS, dtype=torch.float64)
    x, left = torch.zeros(8, dtype=torch.float64), torch.zeros(2, 8, dtype=torch.float64)
    for after in ROUNDS[codebook, reduce]:
        total, senders = torch.zeros_like(x), torch.zeros_like(x)
        for goal, residual in zip(goals, left, strict=True):
            y = x.clone()
            for _ in range(2):
                y -= 0.1 * (y - goal)
            residual *= 0.95
            packet = compressor.feed(x - y, residual)
            compressor.add_to(total, packet)
            senders[compressor.places(packet)] += 1
        x = x - total / (senders.clamp(min=1) if reduce == "contributors" else 2)
        np.testing.assert_allclose(x, after, rtol=0, atol=5.1e-9)


def test_what_travels():
    """Of 4096 float32 at most 112 bytes, as the authors', and the means; the indices in the shorter form."""
    book = 4 * 4
    assert ChunkTopK().compress(normal(4096)).nbytes == 64 * (6 + 2) // 8 + 16 + book <= 112 + book
    # Two values, of which one low bit goes with the index: within a chunk it takes 12 bits, over the tensor 13.
    assert ChunkTopK(2).compress(normal(4096)).nbytes == 3 + 1 + book
    for compressor in (ChunkTopK(), ChunkTopK(3, 64, 5), ChunkTopK(1, 16, None), ChunkTopK(7, 7, 1), ChunkTopK(1, 1)):
        for n in (0, 1, 63, 64, 65, 4095, 10_000):
            k, chunk = compressor.k, compressor.chunk
            kept = sum(max(1, k * min(chunk, n - lo) // chunk) for lo in range(0, n, chunk))
            assert compressor.kept(n) == kept
            width = (max(1, min(chunk, n)) - 1).bit_length()
            within = -(-kept * width // 8)
            low = (n // kept).bit_length() - 1 if kept else 0
            over_all = -(-kept * low // 8) + (-(-(kept + ((n - 1) >> low)) // 8) if kept else 0)
            values = kept * 4 if compressor.bits is None else 4 * 2**compressor.bits + -(-kept * compressor.bits // 8)
            packet = compressor.compress(normal(n))
            assert packet.nbytes == compressor.wire_bytes(n, 4) == values + min(within, over_all)
            assert len(compressor.places(packet)) == kept


@pytest.mark.parametrize("n", [1, 31, 4096, 300_001])
@pytest.mark.parametrize("kind", ["normal", "ties", "zeros", "scales", "sorted"])
def test_both_kernels_choose_the_same(n, kind):
    values = normal(n)
    if kind == "ties":
        values = values.mul(2).round()
    elif kind == "zeros":
        values *= normal(n, 6) > 2
    elif kind == "scales":
        values *= torch.exp(5 * normal(n // 512 + 1, 7)).repeat_interleave(512)[:n]
    elif kind == "sorted":
        values = values.sort().values
    for k, chunk in ((64, 4096), (1, 7), (40, 64), (5, 10**7)):
        for dtype in (torch.float32, torch.float64):
            flat = values.to(dtype)
            on_host, taken = select.pick_chunks(flat.numpy(), None, k, chunk)
            assert np.array_equal(on_host, device.pick_chunks(flat, k, chunk).numpy())
            assert np.array_equal(taken, flat.numpy()[on_host])
            half = flat / 2
            assert np.array_equal(on_host, select.pick_chunks(half.numpy(), half.numpy(), k, chunk, threads=2)[0])


def test_equals_a_sort_of_each_chunk():
    values = normal(1000).mul(4).round()
    found, _ = select.pick_chunks(values.numpy(), None, 10, 64)
    wanted = [
        lo + np.sort(np.argsort(-np.abs(part), kind="stable")[: max(1, 10 * len(part) // 64)])
        for lo, part in ((lo, values.numpy()[lo : lo + 64]) for lo in range(0, 1000, 64))
    ]
    assert found.tolist() == np.concatenate(wanted).tolist()


@pytest.mark.parametrize("codebook", ["sigma", "signed"])
@pytest.mark.parametrize("width", [1, 2, 5])
def test_sums_and_scales_survive(codebook, width):
    compressor = ChunkTopK(32, 128, width, codebook)
    tensor = normal(1000).double() ** 3
    chosen = compressor.places(compressor.compress(tensor))
    decoded = compressor.decompress(compressor.compress(tensor))
    sent, kept = decoded[chosen], tensor[chosen]
    torch.testing.assert_close(sent.sum(), kept.sum(), rtol=1e-12, atol=1e-12)
    for level in sent.unique():
        torch.testing.assert_close(kept[sent == level].mean(), level, rtol=1e-12, atol=1e-15)
    for factor in (1e-250, 0.5, 3.0, 1e250):
        torch.testing.assert_close(compressor.decompress(compressor.compress(factor * tensor)) / factor, decoded)
    if codebook == "signed":
        assert (sent.sign() == kept.sign()).all()
    np.testing.assert_allclose(decoded, compress.ChunkTopK(32, 128, width, codebook)(tensor.numpy()), atol=1e-12)


@pytest.mark.parametrize("codebook", ["sigma", "signed"])
@pytest.mark.parametrize("tensor", [torch.tensor([0.3]), torch.full((77,), 0.1).double(), torch.zeros(9)], ids=str)
def test_one_value_and_equal_values_are_exact(codebook, tensor):
    compressor, residual = ChunkTopK(8, 8, codebook=codebook), torch.zeros_like(tensor)
    assert torch.equal(compressor.decompress(compressor.feed(tensor, residual)), tensor)
    assert not residual.any()


def test_a_sum_without_memory_for_it_is_fed_as_one_with():
    """What the fast way leaves is what adding, compressing and subtracting leaves."""
    tensor, start = normal(9000), normal(9000, 9)
    compressor, residual = ChunkTopK(), start.clone()
    packet = compressor.feed(tensor, residual)
    slow = compressor.compress(start + tensor)
    assert bits(packet.data) == bits(slow.data)
    assert bits(residual) == bits(start + tensor - compressor.decompress(slow))


def test_what_would_overflow_stays():
    """One cell of both signs, near the largest number: value minus mean is beyond it."""
    limit = torch.finfo(torch.float32).max
    tensor = torch.tensor([limit, -limit, -limit, -limit])
    residual = torch.zeros(4)
    compressor = ChunkTopK(4, 4, 1)
    assert not compressor.decompress(compressor.feed(tensor, residual)).any()
    assert torch.equal(residual, tensor)
