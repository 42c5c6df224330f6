"""Steps that the ranks do not share, and replicas that drift: the same error everywhere, nothing mixed, nothing broken.

HPCTK_TRIES says how often each disagreement is tried.
"""

import os

import pytest
import torch
from training import loss_of, net, sgd, values

import hpctk
from hpctk.errors import HpctkError, MismatchError, TensorError

TRIES = int(os.environ.get("HPCTK_TRIES", "3"))

METHODS = {
    "Mean": hpctk.Mean,
    "Mean of TopK": lambda: hpctk.Mean(hpctk.TopK(0.3)),
    "Mean of PowerSGD": lambda: hpctk.Mean(hpctk.PowerSGD(1)),
    "AdaCons": hpctk.AdaCons,
    "SASG": hpctk.SASG,
    "SAEF": lambda: hpctk.SAEF(hpctk.TopK(0.3)),
    "SAEF one-bit": lambda: hpctk.SAEF(hpctk.Sign(), server=hpctk.Sign()),
    "MGRAWA": lambda: hpctk.MGRAWA(period=1),
    "LGRAWA": lambda: hpctk.LGRAWA(period=1),
    "CELGC": lambda: hpctk.CELGC(clip=1.0, period=1),
    "EPISODE": lambda: hpctk.EPISODE(clip=1.0, period=1),
    "EF21": lambda: hpctk.EF21(hpctk.TopK(0.5)),
    "DiLoCo": lambda: hpctk.DiLoCo(period=1),
    "LocalSGD": lambda: hpctk.LocalSGD(period=1),
    "EASGD": lambda: hpctk.EASGD(period=1),
    "LSGD": lambda: hpctk.LSGD(period=1),
}


@pytest.fixture(autouse=True)
def several_ranks(world):
    if world.size == 1:
        pytest.skip("one rank agrees with itself")


def wide():
    """Return a network of other shapes."""
    return torch.nn.Sequential(torch.nn.Linear(3, 4000), torch.nn.Tanh(), torch.nn.Linear(4000, 2)).double()


OTHERS = {"shape": wide, "dtype": lambda: net(dtype=torch.float32), "order": net}


def trainee(model, method):
    # Model methods step before they notice: a hundred such steps must not diverge.
    base = torch.optim.SGD(model.parameters(), lr=1e-6)
    return model, hpctk.DistributedOptimizer(base, method, model=model)


def step(rank, model, opt):
    def closure():
        opt.zero_grad()
        loss = loss_of(model, rank, 0)
        loss.backward()
        return loss

    opt.step(closure)


def refused(world, act):
    """Return the text of the MismatchError that all ranks raise."""
    with pytest.raises(HpctkError) as caught:
        act()
    assert type(caught.value) is MismatchError, caught.value
    world.agree("text of the error", [("text", str(caught.value))])
    return str(caught.value)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("other", OTHERS)
def test_ranks_that_step_different_optimizers(world, method, other):
    ours, theirs = trainee(net(), METHODS[method]()), trainee(OTHERS[other](), METHODS[method]())
    for _ in range(TRIES):
        before = values(ours[0]), values(theirs[0])
        said = refused(world, lambda: step(world.rank, *(ours if world.rank == 0 else theirs)))
        assert "the optimizer is number" in said
        assert "in the same order" in said
        if METHODS[method]().kind != "model":
            for old, now in zip(before, (values(ours[0]), values(theirs[0])), strict=True):
                assert all((a == b).all() for a, b in zip(old, now, strict=True))
    # Nothing is left over: both train on.
    for one in (ours, theirs):
        step(world.rank, *one)


@pytest.mark.parametrize("method", METHODS)
def test_a_rank_that_makes_a_step_more(world, method):
    model = net()
    for i in range(TRIES):
        opt = trainee(model, METHODS[method]())[1]
        for _ in range(i % 3):
            step(world.rank, model, opt)
        more = world.rank == i % world.size

        def act(opt=opt, more=more):
            if more:
                step(world.rank, model, opt)
            with opt.averaged_model():
                pass

        said = refused(world, act)
        # EPISODE shares gradients first.
        kind = "round" if METHODS[method]().kind == "model" and method != "EPISODE" else "step"
        assert f"in opening a {kind}" in said
        assert "must make the same collective calls in the same order" in said


@pytest.mark.parametrize("method", [name for name in METHODS if METHODS[name]().kind != "model"])
def test_a_step_has_one_small_message(world, method, monkeypatch):
    model, opt = trainee(net(), METHODS[method]())
    step(world.rank, model, opt)
    seen = []
    monkeypatch.setattr(world.recorders, "record_control", lambda kind, what, *_: seen.append(what))
    for _ in range(4):
        step(world.rank, model, opt)
    assert seen == ["opening a step"] * 4


def test_a_step_beside_a_round(world):
    ours, theirs = trainee(net(), hpctk.Mean()), trainee(net(), hpctk.LocalSGD(period=1))
    for _ in range(TRIES):
        said = refused(world, lambda: step(world.rank, *(ours if world.rank == 0 else theirs)))
        assert "rank 0 is in opening a step, rank 1 in opening a round" in said


def test_a_step_beside_another_collective(world):
    model, opt = trainee(net(), hpctk.Mean())
    for _ in range(TRIES):
        said = refused(
            world, lambda: step(world.rank, model, opt) if world.rank == 0 else hpctk.allreduce(torch.zeros(3))
        )
        assert "rank 0 is in opening a step, rank 1 in handshake on allreduce" in said


def test_a_collective_beside_another(world):
    def act():
        if world.rank == 0:
            world.run_on_root("reading", lambda: "much" * 1000)
        else:
            hpctk.ops.broadcast(torch.zeros(7))

    assert "rank 0 is in reading, rank 1 in handshake on broadcast" in refused(world, act)


DRIFTING = ["Mean", "AdaCons", "SASG", "SAEF", "MGRAWA", "LocalSGD"]


@pytest.mark.parametrize("method", DRIFTING)
def test_a_rate_changed_on_one_rank_is_noticed(world, method):
    model = net()
    opt = hpctk.DistributedOptimizer(sgd(model.parameters()), METHODS[method](), model=model, check_every=2)
    step(world.rank, model, opt)
    if world.rank == 1:
        opt.param_groups[0]["lr"] = 0.05
    said = refused(world, lambda: [step(world.rank, model, opt) for _ in range(2)])
    assert "lr of group 0 is 0.1 on rank 0 and 0.05 on rank 1" in said
    assert "check_every=0" in said


@pytest.mark.parametrize("method", ["Mean", "AdaCons", "SASG"])
def test_weights_loaded_on_one_rank_are_noticed(world, method):
    model = net()
    opt = hpctk.DistributedOptimizer(sgd(model.parameters()), METHODS[method](), model=model, check_every=1)
    step(world.rank, model, opt)
    if world.rank == 1:
        model.load_state_dict(net(seed=3).state_dict())
    assert "drifted apart" in refused(world, lambda: step(world.rank, model, opt))


def test_in_the_end_every_element_is_looked_at(world):
    model = torch.nn.Linear(50, 40)
    opt = hpctk.DistributedOptimizer(sgd(model.parameters()), hpctk.Mean(), model=model, check_every=1)
    if world.rank == 1:
        with torch.no_grad():
            model.weight[17, 3] += 1.0

    def act():
        for _ in range(40):
            opt.zero_grad()
            opt.step()

    assert "a digest of 'weight'" in refused(world, act)


def test_no_look_where_none_is_wanted(world):
    model = net()
    opt = hpctk.DistributedOptimizer(sgd(model.parameters()), hpctk.Mean(), model=model, check_every=0)
    opt.param_groups[0]["lr"] = 0.1 / (1 + world.rank)
    for _ in range(3):
        step(world.rank, model, opt)


def test_a_scheduler_is_no_drift(world):
    model = net()
    opt = hpctk.DistributedOptimizer(sgd(model.parameters()), hpctk.Mean(), model=model, check_every=1)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
    for _ in range(4):
        step(world.rank, model, opt)
        schedule.step()


def test_a_model_converted_after_wrapping(world):
    model, opt = trainee(net(), hpctk.Mean())
    if world.rank == world.size - 1:
        model.float()
    with pytest.raises(TensorError, match=r"agreed on torch.float64.*before the optimizer is made") as caught:
        step(world.rank, model, opt)
    world.agree("text of the error", [("text", str(caught.value))])
