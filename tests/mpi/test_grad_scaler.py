"""torch.amp.GradScaler: all ranks skip the same steps and keep the same scale, whichever rank overflows."""

import pytest
import torch
from scaled_training import METHODS, RECIPES, STEPS, assert_in_step, assert_the_same_at_any_scale, scaled_model
from torch.nn.parallel import DistributedDataParallel
from training import loss_of, values

import hpctk
import hpctk.comm.world


@pytest.fixture(autouse=True)
def few_ranks(world):
    if world.size > 3:
        pytest.skip("nothing here depends on a fourth rank")


def shared_by(method, opt):
    """Return what returns what all ranks hold alike: SAEF's parameters are a step ahead of it."""
    if not method.startswith("SAEF"):
        return None
    return lambda: [x.numpy() for x in opt.local_state_dict()["x"].values()]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_ranks_stay_in_step(world, recipe, method):
    if recipe == "synchronize" and method == "SAEF":
        pytest.skip("synchronize() is for gradient methods")
    model, base = scaled_model()
    opt = hpctk.DistributedOptimizer(base, METHODS[method](), model=model, on_bad_gradient="skip")
    _, skipped = assert_in_step(world, model, opt, RECIPES[recipe], STEPS, shared=shared_by(method, opt))
    assert opt.stats.counts["skipped_steps"] == skipped


@pytest.mark.parametrize("recipe", ["plain", "synchronize"])
@pytest.mark.parametrize("method", ["Mean", "AdaCons"])
def test_overlap(world, recipe, method):
    model, base = scaled_model()
    opt = hpctk.DistributedOptimizer(base, METHODS[method](), model=model, overlap=True, on_bad_gradient="skip")
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=5)
    for t in range(30):
        opt.zero_grad()
        loss = loss_of(model, world.rank, t)
        # An infinity must come out of backward itself: later it would be a gradient that was changed.
        unlucky = t % 4 == 1 and world.rank == t % world.size
        scaler.scale(loss * float("inf") if unlucky else loss).backward()
        RECIPES[recipe](scaler, opt, model)
        text = b"".join(x.tobytes() for x in values(model)).hex()
        world.agree(f"step {t}", [("scale", scaler.get_scale()), ("bits", text)])
    assert opt.stats.counts["skipped_steps"] == 8


def test_an_overflow_is_no_error_where_bad_gradients_are(world):
    model, base = scaled_model()
    opt = hpctk.DistributedOptimizer(base, hpctk.Mean(), model=model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = values(model)
    scaler.scale(loss_of(model, world.rank, 0)).backward()
    if world.rank == world.size - 1:
        model[0].weight.grad[0, 0] = float("nan")
    scaler.step(opt)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert all((a == b).all() for a, b in zip(before, values(model), strict=True))


def test_what_travels_is_unscaled(world):
    """The scale changes, residuals do not: they are in units of the gradient."""
    trained = []
    for scale in (None, 4.0, 2.0**20):
        model, base = scaled_model()
        model.double()
        opt = hpctk.DistributedOptimizer(base, hpctk.Mean(hpctk.TopK(0.4)), model=model)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, growth_interval=2, enabled=scale is not None)
        for t in range(6):
            opt.zero_grad()
            scaler.scale(loss_of(model, world.rank, t)).backward()
            scaler.step(opt)
            scaler.update()
        trained.append(values(model))
    # Powers of two: to the bit.
    for other in trained[1:]:
        assert all((a == b).all() for a, b in zip(trained[0], other, strict=True))


def test_residuals_follow_the_scale(world):
    """synchronize() exchanges gradients while they are scaled."""

    def make(model, base):
        method = hpctk.Mean(hpctk.TopK(0.4))
        return hpctk.DistributedOptimizer(base, method, model=model, on_bad_gradient="skip")

    assert_the_same_at_any_scale(world, make, RECIPES["synchronize"])


def test_a_local_method_unscales_and_skips_by_itself(world):
    """Between rounds nothing is exchanged, so every rank's scale is its own; the model is shared at each round."""
    model, base = scaled_model()
    opt = hpctk.DistributedOptimizer(base, hpctk.LocalSGD(period=2), model=model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for t in range(6):
        opt.zero_grad()
        scaler.scale(loss_of(model, world.rank, t)).backward()
        if t == 2 and world.rank == 0:
            model[0].weight.grad[0, 0] = float("inf")
        scaler.step(opt)
        scaler.update()
    assert scaler.get_scale() == (4.0 if world.rank == 0 else 8.0)
    world.agree("model", [("bits", b"".join(x.tobytes() for x in values(model)).hex())])
    assert all((abs(x) < 1e6).all() for x in values(model))


@pytest.mark.parametrize("method", ["Mean", "Mean of TopK", "AdaCons"])
@pytest.mark.parametrize("recipe", ["plain", "unscale_ and clip"])
def test_attached_to_ddp(process_group, recipe, method):
    here = hpctk.comm.world.world(process_group)
    model, base = scaled_model()
    ddp = DistributedDataParallel(model, process_group=process_group)
    attached = hpctk.ddp.attach(ddp, METHODS[method](), on_bad_gradient="skip")
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=5)
    for t in range(60):
        base.zero_grad()
        loss = loss_of(ddp, here.rank, t)
        unlucky = t % 4 == 1 and here.rank == t % here.size
        scaler.scale(loss * float("inf") if unlucky else loss).backward()
        RECIPES[recipe](scaler, base, model)
        text = b"".join(x.tobytes() for x in values(model)).hex()
        here.agree(f"step {t}", [("scale", scaler.get_scale()), ("bits", text)])
        assert all((abs(x) < 1e6).all() for x in values(model))
    assert attached.stats.counts["skipped_steps"] == 15


@pytest.mark.parametrize("recipe", RECIPES)
def test_ddp_optimizer(process_group, recipe):
    here = hpctk.comm.world.world(process_group)
    model, base = scaled_model()
    opt = hpctk.ddp.DistributedOptimizer(
        base, hpctk.Mean(hpctk.TopK(0.5)), model=model, group=process_group, on_bad_gradient="skip"
    )
    assert_in_step(here, model, opt, RECIPES[recipe], STEPS)
