"""torch.amp.GradScaler: all ranks skip the same steps and keep the same scale, whichever rank overflows."""

import numpy as np
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
    if recipe == "synchronize" and method.startswith("SAEF"):
        pytest.skip("synchronize() is for gradient methods")
    model, base = scaled_model()
    opt = hpctk.DistributedOptimizer(base, METHODS[method](), model=model, on_bad_gradient="skip")
    _, skipped = assert_in_step(world, model, opt, RECIPES[recipe], STEPS, shared=shared_by(method, opt))
    assert opt.stats.counts["skipped_steps"] == skipped


@pytest.mark.parametrize("recipe", ["plain", "synchronize"])
@pytest.mark.parametrize("method", ["Mean", "Mean of TopK", "AdaCons"])
def test_overlap(world, recipe, method):
    model, base = scaled_model()
    opt = hpctk.DistributedOptimizer(base, METHODS[method](), model=model, overlap=True, on_bad_gradient="skip")
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    for t in range(STEPS):
        opt.zero_grad()
        loss = loss_of(model, world.rank, t)
        # An infinity must come out of backward itself: later it would be a gradient that was changed.
        unlucky = t % 4 == 1 and world.rank == t % world.size
        scaler.scale(loss * float("inf") if unlucky else loss).backward()
        RECIPES[recipe](scaler, opt, model)
        text = b"".join(x.tobytes() for x in values(model)).hex()
        world.agree(f"step {t}", [("scale", scaler.get_scale()), ("bits", text)])
    assert opt.stats.counts["skipped_steps"] == len(range(1, STEPS, 4))


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


@pytest.mark.parametrize("recipe", ["plain", "synchronize"])
@pytest.mark.parametrize("overlap", [False, True])
def test_given_the_scaler_what_travels_early_is_unscaled(world, overlap, recipe):
    """A wire of float16, which saturates at 65504, sees unscaled gradients from the first step on."""
    trained = []
    for scale in (None, 2.0**4, 2.0**20):
        model, base = scaled_model()
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, growth_interval=3, enabled=scale is not None)
        opt = hpctk.DistributedOptimizer(
            base, hpctk.Mean(hpctk.Half()), model=model, overlap=overlap, grad_scaler=scaler
        )
        for t in range(8):
            opt.zero_grad()
            scaler.scale(loss_of(model, world.rank, t)).backward()
            RECIPES[recipe](scaler, opt, model)
        trained.append(values(model))
    for other in trained[1:]:
        assert all((a == b).all() for a, b in zip(trained[0], other, strict=True))


def test_loops_may_change_from_step_to_step(world):
    """Residuals are in units of the gradient whichever loop made them: one that looks at norms now and then is one."""
    trained = []
    for scale in (None, 2.0**4, 2.0**20):
        model, base = scaled_model(torch.float64)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, growth_interval=2, enabled=scale is not None)
        opt = hpctk.DistributedOptimizer(base, hpctk.Mean(hpctk.TopK(0.4)), model=model)
        for t in range(10):
            opt.zero_grad()
            scaler.scale(loss_of(model, world.rank, t)).backward()
            RECIPES["plain" if t % 3 else "synchronize"](scaler, opt, model)
        trained.append(values(model))
    for other in trained[1:]:
        assert all((a == b).all() for a, b in zip(trained[0], other, strict=True))


def test_a_step_without_the_scaler_after_some_with_it(world):
    """With overlap=True its buckets leave as if they were scaled, and come back as what they were."""
    trained = []
    for overlap in (False, True):
        model, base = scaled_model(torch.float64)
        opt = hpctk.DistributedOptimizer(base, hpctk.Mean(), model=model, overlap=overlap, schedule="ring")
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        for t in range(4):
            opt.zero_grad()
            loss = loss_of(model, world.rank, t)
            if t < 2:
                scaler.scale(loss).backward()
                RECIPES["plain"](scaler, opt, model)
            else:
                loss.backward()
                opt.step()
        trained.append(values(model))
    for one, other in zip(*trained, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-14)


def test_an_overflow_in_synchronize_is_no_error_under_a_scaler(world):
    model, base = scaled_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    opt = hpctk.DistributedOptimizer(base, hpctk.Mean(), model=model, grad_scaler=scaler)
    before = values(model)
    scaler.scale(loss_of(model, world.rank, 0)).backward()
    if world.rank == world.size - 1:
        model[0].weight.grad[0, 0] = float("inf")
    RECIPES["synchronize"](scaler, opt, model)
    assert scaler.get_scale() == 4.0
    assert all((a == b).all() for a, b in zip(before, values(model), strict=True))


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


@pytest.mark.parametrize("method", ["Mean", "Mean of TopK", "AdaCons", "EF21"])
@pytest.mark.parametrize("recipe", ["plain", "unscale_ and clip"])
def test_attached_to_ddp(process_group, recipe, method):
    here = hpctk.comm.world.world(process_group)
    model, base = scaled_model()
    ddp = DistributedDataParallel(model, process_group=process_group)
    attached = hpctk.ddp.attach(ddp, METHODS[method](), on_bad_gradient="skip")
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    for t in range(STEPS):
        base.zero_grad()
        loss = loss_of(ddp, here.rank, t)
        unlucky = t % 4 == 1 and here.rank == t % here.size
        scaler.scale(loss * float("inf") if unlucky else loss).backward()
        RECIPES[recipe](scaler, base, model)
        text = b"".join(x.tobytes() for x in values(model)).hex()
        here.agree(f"step {t}", [("scale", scaler.get_scale()), ("bits", text)])
        assert all((abs(x) < 1e6).all() for x in values(model))
    assert attached.stats.counts["skipped_steps"] == len(range(1, STEPS, 4))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_ddp_optimizer(process_group, recipe, method):
    if recipe == "synchronize" and method.startswith("SAEF"):
        pytest.skip("synchronize() is for gradient methods")
    here = hpctk.comm.world.world(process_group)
    model, base = scaled_model()
    opt = hpctk.ddp.DistributedOptimizer(
        base, METHODS[method](), model=model, group=process_group, on_bad_gradient="skip"
    )
    assert_in_step(here, model, opt, RECIPES[recipe], STEPS, shared=shared_by(method, opt))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_in_half_precision(world, dtype, method):
    """Unscaled in float32: torch refuses unscale_() on float16 gradients, not the step that does it here."""
    for recipe in ("plain",) if dtype == torch.float16 else ("plain", "unscale_ and clip"):
        model, base = scaled_model(dtype)
        opt = hpctk.DistributedOptimizer(base, METHODS[method](), model=model, on_bad_gradient="skip")
        _, skipped = assert_in_step(world, model, opt, RECIPES[recipe], STEPS, shared=shared_by(method, opt))
        assert opt.stats.counts["skipped_steps"] == skipped


@pytest.mark.parametrize("method", ["Mean of TopK", "SAEF"])
def test_several_optimizers_under_one_scaler(world, method):
    """An infinity for one of them holds back that one, and lowers the one scale, on all ranks."""
    parts = [scaled_model() for _ in range(2)]
    opts = [hpctk.DistributedOptimizer(base, METHODS[method](), model=model) for model, base in parts]
    shared = [
        shared_by(method, opt) or (lambda model=model: values(model))
        for opt, (model, _) in zip(opts, parts, strict=True)
    ]
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    for t in range(STEPS):
        for number, (model, _) in enumerate(parts):
            opts[number].zero_grad()
            scaler.scale(loss_of(model, world.rank, t)).backward()
            if t % 8 == number and world.rank == t % world.size:
                model[0].weight.grad[0, 0] = float("inf")
        for opt in opts:
            scaler.step(opt)
        scaler.update()
        text = b"".join(x.tobytes() for held in shared for x in held()).hex()
        world.agree(f"step {t}", [("scale", scaler.get_scale()), ("bits", text)])
    assert [opt.stats.counts["skipped_steps"] for opt in opts] == [len(range(n, STEPS, 8)) for n in range(2)]


@pytest.mark.parametrize("overlap", [False, True])
def test_accumulated(world, overlap):
    """Two backward passes of a step, the scale unchanged between them."""
    model, base = scaled_model()
    method = hpctk.Mean(hpctk.TopK(0.5))
    opt = hpctk.DistributedOptimizer(base, method, model=model, overlap=overlap, on_bad_gradient="skip")
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    for t in range(STEPS):
        opt.zero_grad()
        unlucky = t % 4 == 1 and world.rank == t % world.size
        with opt.no_sync():
            scaler.scale(loss_of(model, world.rank, 2 * t) * (float("inf") if unlucky else 1.0)).backward()
        scaler.scale(loss_of(model, world.rank, 2 * t + 1)).backward()
        RECIPES["plain"](scaler, opt, model)
        text = b"".join(x.tobytes() for x in values(model)).hex()
        world.agree(f"step {t}", [("scale", scaler.get_scale()), ("bits", text)])
    assert opt.stats.counts["skipped_steps"] == len(range(1, STEPS, 4))


def test_ddp_hook_unscales_what_travels(process_group):
    """The hook is given the scaler: a wire of float16, which saturates at 65504, sees unscaled gradients."""
    trained = []
    for scale in (None, 2.0**4, 2.0**20):
        model, base = scaled_model()
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, growth_interval=3, enabled=scale is not None)
        ddp = DistributedDataParallel(model, process_group=process_group)
        hpctk.ddp.attach(ddp, hpctk.Mean(hpctk.Half()), grad_scaler=scaler)
        rank = hpctk.comm.world.world(process_group).rank
        for t in range(8):
            base.zero_grad()
            scaler.scale(loss_of(ddp, rank, t)).backward()
            RECIPES["plain"](scaler, base, model)
        trained.append(values(model))
    for other in trained[1:]:
        assert all((a == b).all() for a, b in zip(trained[0], other, strict=True))
