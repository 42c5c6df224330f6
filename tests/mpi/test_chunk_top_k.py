"""ChunkTopK on real ranks: through Mean, by both ways of combining, and what is counted of it."""

import pytest
import simulation.compress
import torch
from methods_driver import BASES, assert_follows, assert_same_bits, drive
from simulation import SIMULATIONS
from simulation.problem import Problem
from threshold import Threshold

import hpctk
from hpctk.collectives.compressed_mean import compressed_mean
from hpctk.collectives.engine.engine import engine_of
from hpctk.compressors import Residuals

SHAPES = ((), (5,), (3, 4), (0, 3), (2, 5, 2))


def falling(t):
    return 0.05 / (1 + 0.3 * t)


@pytest.mark.parametrize(("codebook", "base"), [("sigma", "momentum"), ("signed", "adamw")])
def test_mean_follows_the_simulation(world, codebook, base):
    settings = (2, 8, 2, codebook)
    problem, (ours, simulated) = Problem(world.size, seed=21, shapes=SHAPES), BASES[base]
    seen = drive(world, problem, hpctk.Mean(hpctk.ChunkTopK(*settings)), 7, ours, lr=falling)
    arithmetic = simulation.compress.ChunkTopK(*settings)
    wanted = SIMULATIONS["Mean"](problem, 7, simulated, lr=falling, compressor=arithmetic)
    assert_follows(world, seen, wanted)
    assert_same_bits(world, seen.held[-1])


COMPRESSORS = {
    "chunks": hpctk.ChunkTopK(2, 8),
    "topk": hpctk.TopK(0.2),
    "nearly all": hpctk.TopK(0.95),
    "all": hpctk.TopK(1.0),
    "as many as there are": Threshold(1.0),
    "sign": hpctk.Sign(),
}


@pytest.mark.parametrize("name", COMPRESSORS)
def test_a_sum_is_divided_by_the_number_of_those_who_sent(world, name):
    compressor, sizes = COMPRESSORS[name], {"a": 37, "b": 0, "c": 9}

    def of(rank):
        generator = torch.Generator().manual_seed(rank)
        return {key: torch.randn(n, generator=generator, dtype=torch.float64) for key, n in sizes.items()}

    tensors, residuals = of(world.rank), Residuals()
    compressed_mean(world, tensors, compressor, residuals, reduce="contributors")
    for key, n in sizes.items():
        total, senders = torch.zeros(n, dtype=torch.float64), torch.zeros(n)
        for rank in range(world.size):
            decoded = compressor.decompress(compressor.compress(of(rank)[key], key))
            total += decoded
            senders += (decoded != 0) if name not in ("all", "sign") else 1
            if rank == world.rank:
                torch.testing.assert_close(decoded + residuals.of(key, decoded), of(rank)[key], rtol=0, atol=1e-15)
        torch.testing.assert_close(tensors[key], total / senders.clamp(min=1), rtol=0, atol=1e-14)
    assert_same_bits(world, [tensor.numpy() for tensor in tensors.values()])


def test_counted_bytes_are_those_of_the_formula(world):
    """For each kept element two bits and its place; for each tensor four means."""
    sizes, compressor = (3 * 4096, 8192, 4096), hpctk.ChunkTopK()
    tensors = {str(i): torch.randn(n) for i, n in enumerate(sizes)}
    counter = engine_of(world).counter
    before = counter.sent_bytes
    compressed_mean(world, tensors, compressor, Residuals(), checked=True)
    kept = 64 * 6
    # Six bits of each place as they are; a bit for each, and one for each 64 elements, but for the last.
    payload = kept * (2 + 6 + 2) // 8 + 3 * 16
    assert payload == sum(compressor.wire_bytes(n, 4) for n in sizes) <= 112 * 6 + 3 * 16
    # Every message is preceded by its length.
    assert counter.sent_bytes - before == (world.size - 1) * (payload + 8)
