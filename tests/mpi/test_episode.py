"""EPISODE on real ranks: the spec's example, invariants and traps, and the simulation."""

import math

import numpy as np
import pytest
import torch
from methods_driver import BASES, Quadratic, assert_follows, assert_same_bits, drive
from simulation import SIMULATIONS
from simulation.problem import FixedProblem, Problem

import hpctk
from hpctk.errors import HpctkError, SettingError

SHAPES = ((), (5,), (3, 4), (0, 3), (2, 2, 2))
EXAMPLE = FixedProblem([[1, 1], [2, 0.5]], [[0, 0], [2.7, 3.6]], [3, 4])
#: After every step, before averaging: of worker 0, of worker 1; and the means of the rounds.
LOCAL = [
    ([2.86984173, 3.84814868], [2.86984173, 3.84814868]),
    ([2.73968345, 3.69629736], [2.74875594, 3.6889688]),
    ([2.62344487, 3.53321714], [2.62344487, 3.53321714]),
    ([2.50267004, 3.37380121], [2.51369756, 3.36601808]),
    ([2.40195623, 3.20716642], [2.40195623, 3.20716642]),
    ([2.30635142, 3.06069752], [2.31697417, 3.05256036]),
]
MEANS = [[2.7442197, 3.69263308], [2.5081838, 3.36990964], [2.31166279, 3.05662894]]
LAST = [2.06709118, 2.55922717]


def test_worked_example(world):
    if world.size != 2:
        pytest.skip("the example has two workers")
    seen = drive(world, EXAMPLE, hpctk.EPISODE(0.2, period=2), 10, BASES["sgd"][0])
    for t, local in enumerate(LOCAL):
        wanted = MEANS[t // 2] if t % 2 else local[world.rank]
        np.testing.assert_allclose(np.concatenate(seen.held[t]), wanted, rtol=0, atol=6e-9)
    np.testing.assert_allclose(np.concatenate(seen.held[9]), LAST, rtol=0, atol=6e-9)
    assert seen.optimizer.stats.counts["clipped_rounds"] == 2


def falling(t):
    return 0.1 / (1 + 0.3 * t)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("clip", [0.0, 0.05, 0.3, math.inf])
def test_follows_the_simulation(world, base, clip):
    problem = Problem(world.size, seed=12, shapes=SHAPES)
    ours, simulated = BASES[base]
    seen = drive(world, problem, hpctk.EPISODE(clip, period=3), 11, ours, lr=falling)
    wanted = SIMULATIONS["EPISODE"](problem, 11, simulated, lr=falling, clip=clip, period=3)
    assert_follows(world, seen, wanted)
    assert_same_bits(world, seen.held[8], "parameters after a round")
    assert seen.optimizer.stats.counts["rounds"] == 3


@pytest.mark.parametrize("clip", [0.02, 0.2, math.inf])
def test_with_period_one_it_is_the_clipped_mean(world, clip):
    problem = Problem(world.size, seed=5)
    ours, _ = BASES["sgd"]
    one = drive(world, problem, hpctk.EPISODE(clip, period=1), 5, ours)
    other = drive(world, problem, hpctk.Mean(clip=clip), 5, ours)
    for a, b in zip(one.held[-1], other.held[-1], strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-10)


def test_equal_curvature_is_descent_on_the_mean_loss(world):
    """Where CELGC would drift: workers differ in their targets alone."""
    problem = FixedProblem([[1.0, 0.5]] * world.size, [[k, -k] for k in range(world.size)], [3.0, 4.0])
    ours, _ = BASES["momentum"]
    seen = drive(world, problem, hpctk.EPISODE(math.inf, period=4), 8, ours)
    wanted = drive(world, problem, hpctk.Mean(), 8, ours)
    np.testing.assert_allclose(seen.held[-1][0], wanted.held[-1][0], rtol=0, atol=1e-12)


def test_a_probe_gives_the_corrections(world):
    """Gradients of another batch, at the beginning of the round; the step's own one is applied."""
    problem, other = Problem(world.size, seed=12), 1000
    model = Quadratic(problem, world.rank)
    ours, simulated = BASES["momentum"]
    calls = []

    def probe():
        calls.append(1)
        model(other).backward()

    method = hpctk.EPISODE(0.05, period=3, corrections="probe", probe=probe)
    opt = hpctk.DistributedOptimizer(ours(model.parameters()), method, model=model)
    for t in range(7):
        opt.zero_grad()
        model(t).backward()
        opt.step()
    wanted = SIMULATIONS["EPISODE"](
        problem, 7, simulated, clip=0.05, period=3, probes=lambda k, x, t: problem.gradient(k, x, other)
    )
    for got, x in zip(model.arrays(), wanted.held[-1][world.rank], strict=True):
        np.testing.assert_allclose(got, x, rtol=0, atol=1e-10)
    assert len(calls) == 3


def test_a_tiny_gradient_in_a_round_that_clips(world):
    """The factor of the rate is bounded, or what momentum remembers would explode; that is counted."""
    x = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    base = torch.optim.SGD([x], lr=0.1, momentum=0.9)
    opt = hpctk.DistributedOptimizer(base, hpctk.EPISODE(0.1, period=4), named_parameters=[("x", x)])
    x.grad = torch.full_like(x, 10.0)
    opt.step()
    before = x.detach().clone()
    x.grad = torch.zeros_like(x)
    opt.step()
    np.testing.assert_allclose((before - x.detach()).numpy(), 0.1 * 1000 * 0.9 * 10, rtol=1e-12)
    assert opt.stats.counts["bounded_steps"] == 1


class Failing(Problem):
    """The last worker's gradient is NaN in some steps."""

    steps = ()

    def shift(self, k, t):
        usual = super().shift(k, t)
        return [np.full_like(x, np.nan) for x in usual] if k == self.workers - 1 and t in self.steps else usual


@pytest.mark.parametrize("steps", [(0,), (1,), (3,), (3, 4, 5)], ids=str)
def test_bad_gradients_are_not_applied(world, steps):
    """In a round's first step all ranks skip it and the next one opens the round; later only this rank does."""
    problem = Failing(world.size, seed=4)
    problem.steps = steps
    ours, simulated = BASES["momentum"]
    seen = drive(world, problem, hpctk.EPISODE(0.05, period=3), 8, ours, on_bad_gradient="skip")
    wanted = SIMULATIONS["EPISODE"](problem, 8, simulated, clip=0.05, period=3)
    assert_follows(world, seen, wanted)
    assert seen.optimizer.stats.counts["skipped_steps"] == len(steps)


def test_a_bad_first_gradient_raises_everywhere_at_once(world):
    problem = Failing(world.size, seed=4)
    problem.steps = (0,)
    model = Quadratic(problem, world.rank)
    opt = hpctk.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), hpctk.EPISODE(0.05), model=model)
    model(0).backward()
    before = model.arrays()
    with pytest.raises(HpctkError, match=f"rank {world.size - 1}: the gradient of 'tensors.0'"):
        opt.step()
    assert all(np.array_equal(a, b) for a, b in zip(model.arrays(), before, strict=True))


@pytest.mark.parametrize("bad", [False, True])
def test_uneven_data(world, bad):
    """Rank r has 2 + 2r batches, period 3: nobody hangs, and who is through is in every opening and every round."""
    problem = Failing(world.size, seed=2)
    problem.steps = (3, 4, 5) if bad else ()
    model = Quadratic(problem, world.rank)
    opt = hpctk.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), hpctk.EPISODE(0.05, period=3), model=model, on_bad_gradient="skip"
    )
    for epoch in range(2):
        with opt.join():
            for t in range(2 + 2 * world.rank):
                opt.zero_grad()
                model(20 * epoch + t).backward()
                opt.step()
        world.agree("rounds", [("rounds", opt.stats.counts["rounds"])])
        assert_same_bits(world, model.arrays(), "parameters after join")


def test_resumes_bit_for_bit_within_a_round(world):
    problem, method = Problem(world.size, seed=8), hpctk.EPISODE(0.05, period=4)
    ours, _ = BASES["momentum"]
    whole = drive(world, problem, method, 9, ours, consensus=False)
    half = drive(world, problem, method, 6, ours, consensus=False)
    model = Quadratic(problem, world.rank)
    opt = hpctk.DistributedOptimizer(ours(model.parameters()), method, model=model)
    with torch.no_grad():
        for x, value in zip(model.tensors, half.held[-1], strict=True):
            x.copy_(torch.from_numpy(value))
    opt.load_state_dict(half.optimizer.state_dict())
    opt.load_local_state_dict(half.optimizer.local_state_dict())
    for t in range(6, 9):
        opt.zero_grad()
        model(t).backward()
        opt.step()
    assert all(np.array_equal(a, b) for a, b in zip(model.arrays(), whole.held[-1], strict=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip": -1}, "clip=-1"),
        ({"clip": 1.0, "corrections": "probe"}, "needs a function"),
        ({"clip": 1.0, "probe": print}, "only called with corrections='probe'"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(SettingError, match=message):
        hpctk.EPISODE(**settings)
