"""Model methods that send what a compressor makes of the difference to the last common model."""

import numpy as np
import pytest
import torch
from methods_driver import BASES, Quadratic, assert_follows, assert_same_bits, drive
from simulation import SIMULATIONS, compress
from simulation.diloco import QSR
from simulation.problem import Problem

import hpctk
from hpctk.errors import TensorError

METHODS = {
    "LocalSGD": {"period": 3},
    "CELGC": {"clip": 0.05, "period": 3},
    "MGRAWA": {"period": 3, "prox": 0.1},
    "LGRAWA": {"period": 3, "prox": 0.1},
}
COMPRESSORS = {"topk": (hpctk.TopK(0.4), compress.TopK(0.4)), "sign": (hpctk.Sign(), compress.Sign())}
every = pytest.mark.parametrize("name", METHODS)


def falling(t):
    return 0.1 / (1 + 0.3 * t)


@every
@pytest.mark.parametrize(("compressor", "base"), [("topk", "momentum"), ("topk", "adamw"), ("sign", "momentum")])
def test_follows_the_simulation(world, name, compressor, base):
    problem, (ours, simulated) = Problem(world.size, seed=12), BASES[base]
    mine, theirs = COMPRESSORS[compressor]
    seen = drive(world, problem, getattr(hpctk, name)(**METHODS[name], compressor=mine), 10, ours, lr=falling)
    wanted = SIMULATIONS[name](problem, 10, simulated, lr=falling, **METHODS[name], compressor=theirs)
    assert_follows(world, seen, wanted)
    common = seen.optimizer.local_state_dict()["common"]
    assert_same_bits(world, [x.numpy() for x in common["x"].values()], "the common model")


@every
def test_identity_is_the_dense_method(world, name):
    """To rounding: what travels is a difference."""
    problem, ours = Problem(world.size, seed=5), BASES["adamw"][0]
    one = drive(world, problem, getattr(hpctk, name)(**METHODS[name], compressor=hpctk.Identity()), 7, ours)
    other = drive(world, problem, getattr(hpctk, name)(**METHODS[name]), 7, ours)
    for a, b in zip(one.held[-1], other.held[-1], strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)


def test_fewer_bytes_travel(world):
    if world.size == 1:
        pytest.skip("one rank sends nothing")
    problem = Problem(world.size, seed=5, shapes=((4000,),))
    sgd = BASES["sgd"][0]
    sent = [
        drive(world, problem, hpctk.LocalSGD(2, compressor=one), 4, sgd, consensus=False, schedule="ring")
        for one in (None, hpctk.TopK(0.01))
    ]
    dense, sparse = (seen.optimizer.stats.sent_bytes for seen in sent)
    assert sparse < dense / 5


@every
def test_resumes_bit_for_bit(world, name):
    problem, ours = Problem(world.size, seed=8), BASES["sgd"][0]
    method = getattr(hpctk, name)(**METHODS[name], compressor=hpctk.TopK(0.3))
    whole = drive(world, problem, method, 10, ours, consensus=False)
    half = drive(world, problem, method, 5, ours, consensus=False)
    model = Quadratic(problem, world.rank)
    opt = hpctk.DistributedOptimizer(ours(model.parameters()), method, model=model)
    with torch.no_grad():
        for x, value in zip(model.tensors, half.held[-1], strict=True):
            x.copy_(torch.from_numpy(value))
    opt.load_local_state_dict(half.optimizer.local_state_dict())
    for t in range(5, 10):
        opt.zero_grad()
        model(t).backward()
        opt.step()
    assert all(np.array_equal(a, b) for a, b in zip(model.arrays(), whole.held[-1], strict=True))


@pytest.mark.parametrize("name", ["LocalSGD", "CELGC"])
def test_a_model_that_is_not_finite_is_not_sent(world, name):
    model = Quadratic(Problem(world.size, seed=4), world.rank)
    method = getattr(hpctk, name)(**METHODS[name], compressor=hpctk.TopK(0.3))
    opt = hpctk.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), method, model=model, on_bad_gradient="skip"
    )
    model(0).backward()
    opt.step()
    with torch.no_grad():
        model.tensors[1][2] = float("inf") if world.rank == world.size - 1 else 0.0
    opt.step()
    with pytest.raises(TensorError, match=r"tensors\.1.*element 2 of 5"):
        opt.step()


def test_a_worker_without_weight_may_hold_anything(world):
    """Its gradients have been bad: the centre is that of the others."""
    if world.size == 1:
        pytest.skip("one rank has all the weight")
    model = Quadratic(Problem(world.size, seed=4), world.rank)
    opt = hpctk.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        hpctk.MGRAWA(period=1, compressor=hpctk.TopK(0.3)),
        model=model,
        on_bad_gradient="skip",
    )
    model(0).backward()
    if world.rank == 0:
        model.tensors[1].grad.fill_(float("nan"))
        with torch.no_grad():
            model.tensors[1].fill_(float("nan"))
    opt.step()
    assert all(torch.isfinite(x).all() for x in opt.local_state_dict()["centre"].values())


def test_the_period_follows_the_learning_rate(world):
    rule = hpctk.QSR(0.1, warmup=2, steps=12)
    problem = Problem(world.size, seed=5)
    ours, simulated = BASES["momentum"]
    seen = drive(world, problem, hpctk.LocalSGD(2, period_rule=rule), 12, ours, lr=falling)
    wanted = SIMULATIONS["LocalSGD"](problem, 12, simulated, lr=falling, period=2, period_rule=QSR(0.1, 2, 2, 12))
    assert_follows(world, seen, wanted)
    assert seen.optimizer.stats.counts["rounds"] == 4
    assert seen.optimizer.local_state_dict()["t"] == 12
