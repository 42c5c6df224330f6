"""SparseLoCo on real ranks: the spec's worked example, and that it is DiLoCo."""

import numpy as np
import pytest
import torch
from methods_driver import BASES, Quadratic, assert_follows, assert_same_bits, drive
from simulation import SIMULATIONS, compress
from simulation.problem import FixedProblem, Problem

import hpctk
from hpctk.errors import SettingError

EXAMPLE = FixedProblem(
    [[1] * 8, [1] * 8], [[1, -2, 0.5, 0.1, 3, -0.4, -1.5, 0.2], [-0.2, -1.8, 0.7, 0.3, 0.3, 1.6, -2.5, 0.4]], [0.0] * 8
)
SGD = BASES["sgd"][0]
RESIDUALS = [
    [-0.2375, 0, -0.095, -0.019, 0, 0.076, 0.2375, -0.038],
    [0.038, 0.2375, -0.2375, -0.057, -0.057, 0, 0, -0.076],
]
MODELS = {
    "contributors": (
        {},
        [-0.0475, -0.24225, -0.1045, 0, 0.57, 0.304, -0.26125, 0],
        [0.395675, -0.64597625, 0.27398, 0, 1.013175, 0.55024, -0.72848375, 0],
    ),
    "mean": (
        {"reduce": "mean"},
        [-0.02375, -0.24225, -0.05225, 0, 0.285, 0.152, -0.26125, 0],
        [0.21024687, -0.64597625, 0.10866813, 0, 0.51899688, 0.31291813, -0.72848375, 0],
    ),
    "signed": (
        {"codebook": "signed"},
        [0.19, -0.361, 0.133, 0, 0.57, 0.304, -0.38, 0],
        [0.19, -0.65341, 0.29298, 0.11115, 1.0317, 0.55024, -0.6878, 0],
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_worked_example(world, name):
    if world.size != 2:
        pytest.skip("the example has two workers")
    settings, first, second = MODELS[name]
    method = hpctk.SparseLoCo(period=2, k=2, chunk=4, **settings)
    seen = drive(world, EXAMPLE, method, 4, SGD)
    for t, x in ((1, first), (3, second)):
        np.testing.assert_allclose(seen.consensus[t][0], x, rtol=0, atol=6e-9)
        assert_same_bits(world, seen.consensus[t], "x")
    if name == "contributors":
        half = drive(world, EXAMPLE, method, 2, SGD)
        (left,) = half.optimizer.local_state_dict()["common"]["residuals"].values()
        np.testing.assert_allclose(left.numpy(), RESIDUALS[world.rank], rtol=0, atol=6e-9)


def falling(t):
    return 0.1 / (1 + 0.3 * t)


@pytest.mark.parametrize(("base", "codebook", "reduce"), [
    ("momentum", "sigma", "contributors"), ("adamw", "signed", "contributors"), ("nesterov", "sigma", "mean"),
])  # fmt: skip
def test_follows_the_simulation(world, base, codebook, reduce):
    """As DiLoCo without an outer optimizer, by an arithmetic that shares no code with it."""
    problem, (ours, simulated) = Problem(world.size, seed=12), BASES[base]
    chunks = {"k": 2, "chunk": 8, "codebook": codebook}
    seen = drive(world, problem, hpctk.SparseLoCo(period=3, **chunks, reduce=reduce), 13, ours, lr=falling)
    plain = {"period": 3, "outer_lr": 1.0, "outer_momentum": 0.0, "nesterov": False, "feedback": 0.95}
    wanted = SIMULATIONS["DiLoCo"](
        problem, 13, simulated, lr=falling, compressor=compress.ChunkTopK(**chunks), reduce=reduce, **plain
    )
    assert_follows(world, seen, wanted)
    assert_same_bits(world, seen.consensus[-1], "x")


def test_it_is_diloco_with_its_settings(world):
    problem, base = Problem(world.size, seed=3), BASES["adamw"][0]
    compressor = hpctk.ChunkTopK(2, 4)
    wanted = hpctk.DiLoCo(3, 0.5, 0.0, False, compressor=compressor, feedback=0.9, reduce="contributors")
    one = drive(world, problem, hpctk.SparseLoCo(3, 2, 4, decay=0.9, outer_lr=0.5), 7, base)
    other = drive(world, problem, wanted, 7, base)
    assert all(np.array_equal(a, b) for a, b in zip(one.held[-1], other.held[-1], strict=True))


def test_all_of_a_chunk_is_local_sgd(world):
    problem, base = Problem(world.size, seed=3), BASES["momentum"][0]
    one = drive(world, problem, hpctk.SparseLoCo(3, 4, 4, bits=None), 7, base)
    other = drive(world, problem, hpctk.LocalSGD(3), 7, base)
    for a, b in zip(one.held[-1], other.held[-1], strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)


def test_bytes_of_a_round(world):
    """At the defaults at most 112 bytes for 4096 float32 and the codebook, to every other rank."""
    if world.size == 1:
        pytest.skip("one rank sends nothing")
    model = Quadratic(Problem(world.size, seed=5, shapes=((8192,),)), world.rank, torch.float32)
    opt = hpctk.DistributedOptimizer(SGD(model.parameters()), hpctk.SparseLoCo(period=2), model=model)
    sent = []
    for t in range(4):
        opt.zero_grad()
        model(t).backward()
        opt.step()
        sent.append(opt.stats.sent_bytes)
    packet = hpctk.ChunkTopK().wire_bytes(8192, 4)
    assert packet <= 2 * 112 + 16
    # Beside it: the message that opens the round.
    assert (world.size - 1) * packet <= sent[3] - sent[2] <= (world.size - 1) * packet + 2048


def test_settings_are_checked():
    with pytest.raises(SettingError, match="k=5: need at most chunk=4"):
        hpctk.SparseLoCo(k=5, chunk=4)
    with pytest.raises(SettingError, match=r"reduce='contributors': .*while local steps go on"):
        hpctk.DiLoCo(4, compressor=hpctk.ChunkTopK(), reduce="contributors", delay=1)
