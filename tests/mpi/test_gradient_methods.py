"""Mean and AdaCons on real ranks, against the simulation of all workers."""

import numpy as np
import pytest
import torch
from methods_driver import BASES, assert_follows, assert_same_bits, drive
from simulation import SIMULATIONS
from simulation.problem import FixedProblem, Problem

import hpctk
from hpctk.compressors import by_name
from hpctk.errors import SettingError, TensorError

STEPS = 8


def falling(t):
    return 0.1 / (1 + 0.3 * t)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("layerwise", [False, True], ids=["model-wise", "layer-wise"])
@pytest.mark.parametrize("scale", ["mean_norm", "unit", "coefficients"])
def test_adacons(world, base, scale, layerwise):
    problem = Problem(world.size, seed=3)
    ours, simulated = BASES[base]
    settings = {"momentum": 0.7, "scale": scale, "layerwise": layerwise}
    seen = drive(world, problem, hpctk.AdaCons(**settings), STEPS, ours, lr=falling)
    assert_follows(world, seen, SIMULATIONS["AdaCons"](problem, STEPS, simulated, lr=falling, **settings))
    assert_same_bits(world, seen.held[-1])


def one_step(world, gradients, method, **settings):
    """Return what the base optimizer sees in one step on the given gradients, one of each rank."""
    parameter = torch.nn.Parameter(torch.zeros(len(gradients[0]), dtype=torch.float64))
    base = torch.optim.SGD([parameter], lr=1.0)
    opt = hpctk.DistributedOptimizer(base, method, named_parameters=[("x", parameter)], **settings)
    parameter.grad = torch.tensor(gradients[world.rank], dtype=torch.float64)
    opt.step()
    return -parameter.detach().numpy(), opt


@pytest.mark.parametrize(
    ("scale", "wanted"),
    [
        ("unit", (0.48372093, 0.68372093)),
        ("mean_norm", (1.28992248, 1.82325581)),
        ("coefficients", (0.98578199, 1.39336493)),
    ],
)
def test_adacons_worked_example(world, scale, wanted):
    if world.size != 3:
        pytest.skip("the example has three workers")
    out, _ = one_step(world, [(3, 4), (1, 0), (0, 2)], hpctk.AdaCons(scale=scale))
    # The spec's digits are those of eps = 0.
    np.testing.assert_allclose(out, wanted, atol=2e-8)


def test_adacons_falls_back_to_the_mean_where_gradients_cancel(world):
    if world.size % 2:
        pytest.skip("an odd number of opposed gradients does not cancel")
    gradients = [(1.0, 2.0), (-1.0, -2.0), (1.0, 2.0), (-1.0, -2.0)][: world.size]
    out, opt = one_step(world, gradients, hpctk.AdaCons())
    np.testing.assert_allclose(out, np.mean(gradients, 0), atol=1e-12)
    assert opt.stats.counts["fallbacks"] == 1


def test_adacons_with_zero_gradients(world):
    out, _ = one_step(world, [(0.0, 0.0)] * world.size, hpctk.AdaCons())
    np.testing.assert_array_equal(out, 0)
    # One worker without a gradient: it agrees with nobody and gets no weight.
    gradients = [(0.0, 0.0), *[(3.0, 4.0)] * (world.size - 1)]
    out, _ = one_step(world, gradients, hpctk.AdaCons(scale="coefficients"))
    np.testing.assert_allclose(out, (3, 4) if world.size > 1 else (0, 0), atol=1e-7)


def test_adacons_costs_one_allreduce(world):
    n = 100_000
    parameter = torch.nn.Parameter(torch.zeros(n))
    opt = hpctk.DistributedOptimizer(
        torch.optim.SGD([parameter], lr=0.1), hpctk.AdaCons(), named_parameters=[("x", parameter)]
    )
    for _ in range(2):
        parameter.grad = torch.randn(n, generator=torch.Generator().manual_seed(world.rank))
        before = opt.stats.sent_bytes
        opt.step()
        sent = opt.stats.sent_bytes - before
        assert sent <= 2 * (world.size - 1) / world.size * 4 * n + 64 * world.size**2 + 16


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("settings", [{}, {"unit_norm": True}, {"clip": 0.05}], ids=str)
def test_mean(world, base, settings):
    problem = Problem(world.size, seed=4)
    ours, simulated = BASES[base]
    seen = drive(world, problem, hpctk.Mean(**settings), STEPS, ours, lr=falling)
    assert_follows(world, seen, SIMULATIONS["Mean"](problem, STEPS, simulated, lr=falling, **settings))
    assert_same_bits(world, seen.held[-1])


@pytest.mark.parametrize("schedule", ["ring", "rotation", "mpi", "auto"])
def test_mean_by_any_schedule(world, schedule):
    problem = Problem(world.size, seed=5)
    seen = drive(world, problem, hpctk.Mean(), 3, BASES["sgd"][0], schedule=schedule)
    assert_follows(world, seen, SIMULATIONS["Mean"](problem, 3, BASES["sgd"][1]))


COMPRESSORS = [
    "identity", "half", "half:bfloat16", "topk:0.3", "chunktopk:1000", "randomk:0.3", "sign", "qsgd:4", "powersgd:1"
]  # fmt: skip


def own_mean(world, text, feedback, steps, dtype=torch.float64):
    """Mean with a compressor, all workers in this process: the compressor's own compress and decompress."""
    problem = Problem(world.size, seed=6)
    compressors = [by_name(text) for _ in range(world.size)]
    for rank, compressor in enumerate(compressors):
        compressor.set_rank(rank)
    x = [torch.from_numpy(np.array(a)).to(dtype) for a in problem.start()]
    residuals = [[torch.zeros_like(a) for a in x] for _ in range(world.size)]
    for t in range(steps):
        arrays = [a.numpy() for a in x]
        total = [torch.zeros_like(a) for a in x]
        for rank, compressor in enumerate(compressors):
            gradient = [torch.from_numpy(np.array(g)).to(dtype) for g in problem.gradient(rank, arrays, t)]
            for i, g in enumerate(gradient):
                name = f"tensors.{i}"
                fed = (g, residuals[rank][i], name)
                packet = compressor.feed(*fed) if feedback else compressor.compress(g, name)
                total[i] += compressor.decompress(packet)
        x = [a - 0.1 * s / world.size for a, s in zip(x, total, strict=True)]
    return [a.numpy() for a in x]


@pytest.mark.parametrize("feedback", [True, False], ids=["feedback", "forgetful"])
@pytest.mark.parametrize("text", [c for c in COMPRESSORS if not c.startswith("powersgd")])
def test_mean_with_a_compressor(world, text, feedback):
    problem = Problem(world.size, seed=6)
    seen = drive(world, problem, hpctk.Mean(by_name(text), error_feedback=feedback), 6, BASES["sgd"][0])
    assert_same_bits(world, seen.held[-1])
    # Half precision rounds the sum once more on its way.
    tolerance = 1e-2 if text.startswith("half") else 1e-10
    for got, wanted in zip(seen.held[-1], own_mean(world, text, feedback, 6), strict=True):
        np.testing.assert_allclose(got, wanted, atol=tolerance)


@pytest.mark.parametrize("text", COMPRESSORS)
def test_feedback_loses_nothing(world, text):
    """Sum over steps of what was applied plus the mean residual is the sum of the mean gradients."""
    n, steps = 60, 5
    parameter = torch.nn.Parameter(torch.zeros(6, n // 6, dtype=torch.float64))
    method = hpctk.Mean(by_name(text))
    opt = hpctk.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), method, named_parameters=[("x", parameter)])

    def gradient(rank, t):
        return np.random.default_rng([rank, t]).standard_normal((6, n // 6))

    for t in range(steps):
        parameter.grad = torch.from_numpy(gradient(world.rank, t))
        opt.step()
    given = sum(gradient(rank, t) for rank in range(world.size) for t in range(steps)) / world.size
    residual = opt.local_state_dict()["residuals"]["x"]
    left = hpctk.allreduce(residual, op="mean").numpy()
    tolerance = 0.02 if text.startswith("half") else 1e-11
    np.testing.assert_allclose(-parameter.detach().numpy() + left, given, atol=tolerance)


def test_keep_bounds_what_comes_back(world):
    n = 1000
    parameter = torch.nn.Parameter(torch.zeros(n, dtype=torch.float64))
    opt = hpctk.DistributedOptimizer(
        torch.optim.SGD([parameter], lr=1.0), hpctk.Mean(hpctk.TopK(0.05, keep=True)),
        named_parameters=[("x", parameter)],
    )  # fmt: skip
    given = np.zeros(n)
    for t in range(4):
        before = parameter.detach().clone()
        rows = [np.random.default_rng([rank, t]).standard_normal(n) for rank in range(world.size)]
        given += np.mean(rows, 0)
        parameter.grad = torch.from_numpy(rows[world.rank])
        opt.step()
        assert int((parameter.detach() != before).sum()) <= 50
    left = hpctk.allreduce(opt.local_state_dict()["residuals"]["x"], op="mean").numpy()
    np.testing.assert_allclose(-parameter.detach().numpy() + left, given, atol=1e-12)


def test_spared_tensors_travel_whole(world):
    weight, bias = (torch.nn.Parameter(torch.zeros(n, dtype=torch.float64)) for n in (50, 5))
    method = hpctk.Mean(hpctk.TopK(0.1, exclude=["*.bias"]))
    opt = hpctk.DistributedOptimizer(
        torch.optim.SGD([weight, bias], lr=1.0), method, named_parameters=[("a.weight", weight), ("a.bias", bias)]
    )
    weight.grad, bias.grad = torch.ones_like(weight), torch.arange(1.0, 6.0, dtype=torch.float64)
    opt.step()
    np.testing.assert_allclose(bias.detach(), -np.arange(1.0, 6.0))
    assert int((weight.detach() != 0).sum()) == 5
    assert list(opt.local_state_dict()["residuals"]) == ["a.weight"]


def test_clip_is_naive_parallel_clipping(world):
    gradients = [(3.0 * (rank + 1), 4.0 * (rank + 1)) for rank in range(world.size)]
    mean = np.mean(gradients, 0)
    out, _ = one_step(world, gradients, hpctk.Mean(clip=0.5))
    np.testing.assert_allclose(out, mean * 0.5 / np.linalg.norm(mean), rtol=1e-9)
    out, _ = one_step(world, gradients, hpctk.Mean(clip=float("inf")))
    np.testing.assert_allclose(out, mean, rtol=1e-12)


def test_two_runs_are_the_same_to_the_last_bit(world):
    problem = Problem(world.size, seed=7)
    for make in (hpctk.AdaCons, hpctk.Mean, lambda: hpctk.Mean(hpctk.TopK(0.2)), lambda: hpctk.Mean(hpctk.QSGD(4))):
        runs = [drive(world, problem, make(), 5, BASES["momentum"][0], consensus=False) for _ in range(2)]
        assert all(np.array_equal(a, b) for a, b in zip(*(run.held[-1] for run in runs), strict=True))


def test_wrong_settings_are_refused():
    for wrong in (
        lambda: hpctk.AdaCons(momentum=1.0),
        lambda: hpctk.AdaCons(scale="none"),
        lambda: hpctk.Mean(compressor="topk"),
        lambda: hpctk.Mean(clip=-1.0),
    ):
        with pytest.raises(SettingError):
            wrong()


def test_one_worker(world):
    if world.size > 1:
        pytest.skip("about one rank alone")
    for scale, wanted in (("mean_norm", (3, 4)), ("coefficients", (3, 4)), ("unit", (0.6, 0.8))):
        out, _ = one_step(world, [(3.0, 4.0)], hpctk.AdaCons(scale=scale))
        np.testing.assert_allclose(out, wanted, atol=1e-8)


def test_fixed_problem_of_equal_workers(world):
    problem = FixedProblem([[1.0, 2.0]] * world.size, [[0.5, -1.0]] * world.size, [2.0, 1.0])
    adacons = drive(world, problem, hpctk.AdaCons(), 5, BASES["momentum"][0])
    mean = drive(world, problem, hpctk.Mean(), 5, BASES["momentum"][0])
    np.testing.assert_allclose(adacons.held[-1][0], mean.held[-1][0], atol=1e-7)


@pytest.mark.parametrize("text", ["topk:0.5", "randomk:0.5", "sign", "qsgd:4", "half:bfloat16", "powersgd:1"])
def test_an_overflow_on_one_rank_takes_nothing_from_any_residual(world, text):
    parameters = {name: torch.nn.Parameter(torch.zeros(4, 4)) for name in "abc"}
    opt = hpctk.DistributedOptimizer(
        torch.optim.SGD(parameters.values(), lr=1.0), hpctk.Mean(by_name(text)), named_parameters=parameters.items()
    )
    huge = torch.finfo(torch.float32).max
    residuals = {name: torch.full((4, 4), 0.5) for name in "abc"}
    if world.rank == world.size - 1:
        residuals["b"][0, 0] = huge
    opt.load_local_state_dict({**opt.local_state_dict(), "residuals": residuals})
    for name, parameter in parameters.items():
        parameter.grad = torch.ones(4, 4)
        if name == "b" and world.rank == world.size - 1:
            parameter.grad[0, 0] = huge
    with pytest.raises(TensorError, match="'b'"):
        opt.step()
    for name, kept in opt.local_state_dict()["residuals"].items():
        assert torch.equal(kept, residuals[name]), name
    # All ranks go on in step: the same places of RandomK, the same parameters.
    opt.load_local_state_dict({**opt.local_state_dict(), "residuals": {}})
    for _ in range(3):
        for parameter in parameters.values():
            parameter.grad = torch.ones(4, 4) * (1 + world.rank)
        opt.step()
    assert_same_bits(world, [parameter.detach().numpy() for parameter in parameters.values()])
