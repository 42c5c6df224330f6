"""A gradient that is NaN or infinite on one rank: all ranks hear of it, and nobody applies it."""

import copy

import numpy as np
import pytest
import torch
from methods_driver import assert_same_bits
from training import alone, assert_alike, loss_of, mean_gradients, net, sgd, values, wrapped

import hpctk
from hpctk.errors import HpctkError

GRADIENT_METHODS = {
    "Mean": hpctk.Mean,
    "Mean of TopK": lambda: hpctk.Mean(hpctk.TopK(0.5)),
    "Mean of PowerSGD": lambda: hpctk.Mean(hpctk.PowerSGD(1)),
    "AdaCons": lambda: hpctk.AdaCons(momentum=0.5),
    "AdaCons by layers": lambda: hpctk.AdaCons(momentum=0.5, layerwise=True),
}
MODEL_METHODS = {"LocalSGD": lambda period: hpctk.LocalSGD(period), "CELGC": lambda period: hpctk.CELGC(0.05, period)}
BAD = [float("nan"), float("inf"), -float("inf")]


def backward(world, model, t, bad=None, rank=None):
    """Make this rank's gradient of batch t; on one rank an element of the third parameter is bad."""
    model.zero_grad()
    loss_of(model, world.rank, t).backward()
    if bad is not None and world.rank == (world.size - 1 if rank is None else rank):
        model[2].weight.grad[1, 2] = bad


def everything(model, opt):
    """Return copies of all that a step may change."""
    return copy.deepcopy([values(model), opt.state_dict(), opt.local_state_dict()])


def assert_nothing_changed(before, after):
    flat = [torch.utils._pytree.tree_flatten(one)[0] for one in (before, after)]
    for a, b in zip(*flat, strict=True):
        assert np.array_equal(np.asarray(a), np.asarray(b)) if not isinstance(a, str | None) else a == b


@pytest.mark.parametrize("overlap", [False, True], ids=["at once", "overlapping"])
@pytest.mark.parametrize("name", GRADIENT_METHODS)
def test_raise(world, name, overlap):
    """The step is as if it had never been tried: the run without it ends the same."""
    model, twin = net(), net()
    opt, other = (wrapped(one, GRADIENT_METHODS[name](), overlap=overlap) for one in (model, twin))
    for t in range(4):
        if t == 2:
            before = everything(model, opt)
            for bad in BAD:
                backward(world, model, t, bad) if not overlap else hooked(world, model, t, bad)
                with pytest.raises(HpctkError) as caught:
                    opt.step()
                assert f"rank {world.size - 1}: the gradient of '2.weight'" in str(caught.value)
                world.agree("text of the error", [("text", str(caught.value))])
                assert_nothing_changed(before, everything(model, opt))
            continue
        for one, its in ((model, opt), (twin, other)):
            backward(world, one, t)
            its.step()
    assert_alike(model, twin, 0)
    assert_nothing_changed(everything(twin, other), everything(model, opt))
    assert_same_bits(world, values(model))
    assert opt.stats.counts["skipped_steps"] == 3
    assert opt.stats.counts["rounds"] == other.stats.counts["rounds"] == 3


def hooked(world, model, t, bad):
    """Make a bad gradient inside backward, as overflow does: before it is sent."""
    parameter = model[2].weight
    handle = parameter.register_hook(lambda grad: grad * bad) if world.rank == world.size - 1 else None
    model.zero_grad()
    loss_of(model, world.rank, t).backward()
    if handle is not None:
        handle.remove()


@pytest.mark.parametrize("overlap", [False, True], ids=["at once", "overlapping"])
@pytest.mark.parametrize("name", GRADIENT_METHODS)
def test_skip(world, name, overlap):
    model, twin = net(), net()
    opt, other = (
        wrapped(one, GRADIENT_METHODS[name](), overlap=overlap, on_bad_gradient="skip") for one in (model, twin)
    )
    for t in range(5):
        if t in (0, 2):
            hooked(world, model, t, float("nan"))
            opt.step()
            continue
        for one, its in ((model, opt), (twin, other)):
            backward(world, one, t)
            its.step()
    assert_nothing_changed(everything(twin, other), everything(model, opt))
    assert opt.stats.counts["skipped_steps"] == 2
    assert other.stats.counts["skipped_steps"] == 0
    assert opt.stats.steps == 5


@pytest.mark.parametrize("overlap", [False, True], ids=["at once", "overlapping"])
def test_skip_in_a_step_that_was_synchronized(world, overlap):
    model = net()
    opt = wrapped(model, on_bad_gradient="skip", overlap=overlap)
    for t in range(3):
        if t == 1:
            hooked(world, model, t, float("nan"))
        else:
            backward(world, model, t)
        opt.synchronize()
        opt.step()
    twin = net()
    base = sgd(twin.parameters())
    for t in (0, 2):
        mean_gradients(twin, world.size, t)
        base.step()
    assert_alike(model, twin)


def test_raise_in_synchronize(world):
    model = net()
    opt = wrapped(model)
    backward(world, model, 0, float("nan"))
    with pytest.raises(HpctkError, match=r"'2\.weight'"):
        opt.synchronize()
    backward(world, model, 0)
    opt.synchronize()
    opt.step()
    assert_alike(model, alone(world.size, 1))


def test_the_lowest_rank_and_its_first_parameter_are_named(world):
    model = net()
    opt = wrapped(model)
    backward(world, model, 0)
    model[2].bias.grad.fill_(float("nan"))
    if world.rank == world.size - 1:
        model[0].weight.grad.fill_(float("inf"))
    with pytest.raises(HpctkError) as caught:
        opt.step()
    assert f"rank 0: the gradient of '{'2.bias' if world.size > 1 else '0.weight'}'" in str(caught.value)


@pytest.mark.parametrize("schedule", ["ring", "mpi"], ids="by {}".format)
def test_finite_gradients_may_be_huge(world, schedule):
    """A mean that overflows is not this rank's fault, but nor may it go unnoticed in silence."""
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    opt = hpctk.DistributedOptimizer(
        torch.optim.SGD([parameter], lr=1.0), hpctk.Mean(), named_parameters=[("x", parameter)], schedule=schedule
    )
    parameter.grad = torch.full((3,), 1e307, dtype=torch.float64)
    opt.step()
    np.testing.assert_allclose(parameter.detach(), -1e307)


@pytest.mark.parametrize("name", MODEL_METHODS)
def test_model_methods_raise_at_the_next_round(world, name):
    """Not applied where it is; the others go on until the round, and all may go on after it."""
    model = net()
    opt = wrapped(model, MODEL_METHODS[name](3))
    backward(world, model, 0)
    opt.step()
    before = everything(model, opt)[:2]
    backward(world, model, 1, float("nan"))
    opt.step()
    if world.rank == world.size - 1:
        assert_nothing_changed(before, everything(model, opt)[:2])
    backward(world, model, 2)
    with pytest.raises(HpctkError) as caught:
        opt.step()
    assert f"rank {world.size - 1}: the gradient of '2.weight'" in str(caught.value)
    world.agree("text of the error", [("text", str(caught.value))])
    for t in range(3, 6):
        backward(world, model, t)
        opt.step()
    assert_same_bits(world, values(model))
    assert all(np.isfinite(value).all() for value in values(model))


@pytest.mark.parametrize("name", MODEL_METHODS)
def test_model_methods_skip(world, name):
    model, twin = net(), net()
    opt = wrapped(model, MODEL_METHODS[name](2), on_bad_gradient="skip")
    other = wrapped(twin, MODEL_METHODS[name](2))
    for t in range(4):
        backward(world, model, t, float("inf") if t == 1 else None)
        opt.step()
        # The twin's gradient of that step is None: the step counts, but nothing is applied.
        backward(world, twin, t)
        if t == 1 and world.rank == world.size - 1:
            twin.zero_grad()
        other.step()
    assert_alike(model, twin, 0)
    assert opt.stats.counts["skipped_steps"] == 1
    assert opt.stats.counts["rounds"] == 2
    assert_same_bits(world, values(model))
