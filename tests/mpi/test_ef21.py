"""EF21 on real ranks: the spec's example, invariants and traps, and the simulation."""

import json
import math

import numpy as np
import pytest
import simulation.compress
import torch
from methods_driver import BASES, assert_follows, assert_same_bits, drive
from simulation import SIMULATIONS
from simulation.problem import FixedProblem, Problem

import hpctk
from hpctk.errors import SettingError

SHAPES = ((), (5,), (3, 4), (0, 3), (2, 2, 2))
COMPRESSORS = {
    "topk": (hpctk.TopK(0.3), simulation.compress.TopK(0.3)),
    "sign": (hpctk.Sign(), simulation.compress.Sign()),
    "identity": (hpctk.Identity(), simulation.compress.Identity()),
}
EXAMPLE = FixedProblem(
    [[np.array([1, 2.0]), np.array([1, 0.5])], [np.array([1, 0.5]), np.array([2, 1.0])]],
    [[np.array([1, 0.0]), np.array([-1, 1.6])], [np.array([0, 1.0]), np.array([0.9, -1])]],
    [np.array([2.0, 2]), np.array([0.0, 0])],
)
#: x after every step.
DENSE = [
    [1.85, 1.775, 0.04, -0.01],
    [1.70075, 1.55225, 0.0794, -0.02],
    [1.5515, 1.33537812, 0.117669, -0.03],
    [1.40569662, 1.12450222, 0.15434607, -0.04],
]
ZERO = [
    [1.9, 1.8, 0.04, 0],
    [1.7505, 1.5755, 0.08, -0.01],
    [1.6026975, 1.357045, 0.11826, -0.02],
    [1.454895, 1.14688256, 0.1549201, -0.03],
]
#: v_i after the last step, dense start.
MOMENTUM = [[0.9160675, 3.75003063, 1.0221529, -0.802805], [1.9160675, 0.43750766, -1.7556942, 0.99439]]


@pytest.mark.parametrize(("start", "wanted"), [("dense", DENSE), ("zero", ZERO)])
def test_worked_example(world, start, wanted):
    if world.size != 2:
        pytest.skip("the example has two workers")
    seen = drive(world, EXAMPLE, hpctk.EF21(hpctk.TopK(0.5), start=start), 4, BASES["sgd"][0])
    for held, x in zip(seen.held, wanted, strict=True):
        np.testing.assert_allclose(np.concatenate(held), x, rtol=0, atol=6e-9)
    if start == "dense":
        momentum = np.concatenate([v.numpy() for v in seen.optimizer._run.momentum.values()])
        np.testing.assert_allclose(momentum, MOMENTUM[world.rank], rtol=0, atol=6e-9)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("name", COMPRESSORS)
@pytest.mark.parametrize("settings", [{}, {"start": "zero"}, {"momentum": 0.0}], ids=str)
def test_follows_the_simulation(world, base, name, settings):
    problem = Problem(world.size, seed=21, shapes=SHAPES)
    ours, simulated = BASES[base]
    compressor, arithmetic = COMPRESSORS[name]

    def falling(t):
        return 0.05 / (1 + 0.3 * t)

    seen = drive(world, problem, hpctk.EF21(compressor, **settings), 7, ours, lr=falling)
    wanted = SIMULATIONS["EF21"](problem, 7, simulated, lr=falling, compressor=arithmetic, **settings)
    assert_follows(world, seen, wanted)
    assert_same_bits(world, seen.held[-1])
    run = seen.optimizer._run
    assert_same_bits(world, [h.numpy() for h in run.mean.values()], "h")
    # h is the mean of the estimates.
    for h, estimate in zip(run.mean.values(), run.estimate.values(), strict=True):
        everyone = [
            np.array(json.loads(text)) for text in world.gather_texts(json.dumps(estimate.reshape(-1).tolist()), "h_i")
        ]
        np.testing.assert_allclose(h.reshape(-1).numpy(), np.mean(everyone, axis=0), rtol=0, atol=1e-12)


def test_identity_without_momentum_is_the_mean(world):
    problem = Problem(world.size, seed=3)
    for base in ("momentum", "adam"):
        ours, _ = BASES[base]
        one = drive(world, problem, hpctk.EF21(hpctk.Identity(), momentum=0.0), 5, ours)
        other = drive(world, problem, hpctk.Mean(), 5, ours)
        for a, b in zip(one.held[-1], other.held[-1], strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)


def test_constant_gradients_are_known_after_a_while(world):
    """h is the mean gradient after at most ceil(n/k) steps, and the rest of a difference only shrinks."""
    n, k = 12, 3
    parameter = torch.nn.Parameter(torch.zeros(n, dtype=torch.float64))
    opt = hpctk.DistributedOptimizer(
        torch.optim.SGD([parameter], lr=1.0), hpctk.EF21(hpctk.TopK(k / n), momentum=0.0, start="zero"),
        named_parameters=[("x", parameter)],
    )  # fmt: skip
    gradients = [np.random.default_rng([5, rank]).normal(size=n) for rank in range(world.size)]
    left = float(np.square(gradients[world.rank]).sum())
    run = opt._run
    for _ in range(math.ceil(n / k)):
        parameter.grad = torch.from_numpy(gradients[world.rank].copy())
        opt.step()
        now = float((run.momentum["x"] - run.estimate["x"]).square().sum())
        assert now <= (1 - k / n) * left + 1e-12
        left = now
    np.testing.assert_allclose(run.mean["x"].numpy(), np.mean(gradients, axis=0), rtol=0, atol=1e-12)


def test_a_parameter_without_gradients(world):
    """On some ranks: counts as zero. On none: nothing moves it, not even what is known of it."""
    x, y = (torch.nn.Parameter(torch.ones(4, dtype=torch.float64)) for _ in range(2))
    opt = hpctk.DistributedOptimizer(
        torch.optim.SGD([x, y], lr=0.5), hpctk.EF21(hpctk.TopK(0.5)), named_parameters=[("x", x), ("y", y)]
    )
    run = opt._run
    x.grad, y.grad = torch.ones_like(x), torch.ones_like(y) if world.rank == 0 else None
    opt.step()
    assert torch.allclose(y, torch.full_like(y, 1 - 0.5 / world.size))
    before = y.detach().clone()
    x.grad, y.grad = torch.ones_like(x), None
    opt.step()
    assert torch.equal(y, before)
    assert y.grad is None
    assert torch.equal(run.momentum["y"], torch.full_like(y, float(world.rank == 0)))


def test_a_skipped_step_changes_nothing(world):
    x = torch.nn.Parameter(torch.ones(6, dtype=torch.float64))
    opt = hpctk.DistributedOptimizer(
        torch.optim.SGD([x], lr=0.5), hpctk.EF21(hpctk.TopK(0.5)), named_parameters=[("x", x)], on_bad_gradient="skip"
    )
    x.grad = torch.arange(6.0, dtype=torch.float64) + world.rank
    opt.step()
    kept = {what: tensors["x"].clone() for what, tensors in opt.local_state_dict().items() if what != "compressor"}
    x.grad = torch.full_like(x, math.nan if world.rank == 0 else 1.0)
    opt.step()
    for what, tensor in kept.items():
        assert torch.equal(opt.local_state_dict()[what]["x"], tensor), what
    assert opt.stats.counts["skipped_steps"] == 1


def test_with_half_the_estimate_is_what_was_decoded(world):
    x = torch.nn.Parameter(torch.zeros(3))
    opt = hpctk.DistributedOptimizer(
        torch.optim.SGD([x], lr=1.0), hpctk.EF21(hpctk.Half(), momentum=0.0, start="zero"), named_parameters=[("x", x)]
    )
    x.grad = torch.tensor([1 / 3, 1e-3, 7.7])
    opt.step()
    run = opt._run
    assert torch.equal(run.estimate["x"], torch.tensor([1 / 3, 1e-3, 7.7]).half().float())


@pytest.mark.parametrize("compressor", [hpctk.PowerSGD(1), hpctk.TopK(0.1, keep=True)], ids=repr)
def test_refused(compressor):
    with pytest.raises(SettingError, match="no mean of what the ranks sent"):
        hpctk.EF21(compressor)


def test_qsgd_is_warned_of(caplog):
    hpctk.EF21(hpctk.QSGD(4))
    assert "need not follow" in caplog.text
