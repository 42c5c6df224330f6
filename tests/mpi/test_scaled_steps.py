"""Many steps under a GradScaler, infinities on random ranks: all methods of gradients and updates, by each way in.

After each step parameters and scales are the same on all ranks. Which loop makes a step is drawn anew for each.
"""

import pytest
import torch
from half_training import UPDATE
from scaled_training import EVERY, LENGTHS, LONG, RECIPES, SHORT, Overflows, assert_in_step, steady_model
from torch.nn.parallel import DistributedDataParallel
from training import loss_of

import hpctk
import hpctk.comm.world

GRADIENT = [name for name, method in EVERY.items() if method.kind == "gradient"]


@pytest.fixture(autouse=True)
def few_ranks(world):
    if world.size > 3:
        pytest.skip("nothing here depends on a fourth rank")


def run(world, model, opt, steps):
    method = opt.method
    recipes = [each for name, each in RECIPES.items() if name != "synchronize" or method.kind == "gradient"]
    # Of SAEF's parameters each rank's are ahead of x by its own residual.
    shared = (lambda: [x.numpy() for x in opt.local_state_dict()["x"].values()]) if method.kind == "update" else None
    _, skipped = assert_in_step(world, model, opt, recipes, steps, shared=shared)
    assert opt.stats.counts["skipped_steps"] == skipped


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("steps", LENGTHS)
def test_over_mpi(world, steps, name):
    model, base = steady_model()
    run(world, model, hpctk.DistributedOptimizer(base, EVERY[name], model=model, on_bad_gradient="skip"), steps)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("steps", LENGTHS)
def test_over_torch(process_group, steps, name):
    model, base = steady_model()
    opt = hpctk.ddp.DistributedOptimizer(base, EVERY[name], model=model, group=process_group, on_bad_gradient="skip")
    run(hpctk.comm.world.world(process_group), model, opt, steps)


@pytest.mark.parametrize("name", GRADIENT)
@pytest.mark.parametrize("steps", LENGTHS)
def test_overlapping(world, steps, name):
    model, base = steady_model()
    opt = hpctk.DistributedOptimizer(base, EVERY[name], model=model, overlap=True, on_bad_gradient="skip")
    # unscale_() alone would change gradients that are under way: refused.
    _, skipped = assert_in_step(world, model, opt, [RECIPES["plain"], RECIPES["synchronize"]], steps)
    assert opt.stats.counts["skipped_steps"] == skipped


@pytest.mark.parametrize("name", [name for name in GRADIENT if EVERY[name] != hpctk.Mean(clip=0.25)])
@pytest.mark.parametrize(
    ("steps", "told"), [(SHORT, False), (SHORT, True), pytest.param(LONG, True, marks=pytest.mark.full)]
)
def test_attached_to_ddp(process_group, steps, name, told):
    here = hpctk.comm.world.world(process_group)
    model, base = steady_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=5)
    ddp = DistributedDataParallel(model, process_group=process_group)
    attached = hpctk.ddp.attach(ddp, EVERY[name], on_bad_gradient="skip", grad_scaler=scaler if told else None)
    recipes = [RECIPES["plain"], RECIPES["unscale_ and clip"]]
    _, skipped = assert_in_step(here, model, base, recipes, steps, forward=ddp, scaler=scaler)
    assert attached.stats.counts["skipped_steps"] == skipped


def test_between_exchanges_every_scale_is_its_own(world):
    """SA-PEF's local steps share nothing; what the ranks share is the same after each exchange."""
    model, base = steady_model()
    opt = hpctk.DistributedOptimizer(base, UPDATE["SA-PEF"], model=model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    overflows = Overflows(model)
    for t in range(12):
        opt.zero_grad()
        overflows.let(1 if t == 2 and world.rank == 0 else None)
        scaler.scale(loss_of(model, world.rank, t)).backward()
        scaler.step(opt)
        scaler.update()
        x = b"".join(x.numpy().tobytes() for x in opt.local_state_dict()["x"].values())
        world.agree(f"step {t}", [("bits", x.hex())])
    assert scaler.get_scale() == (4.0 if world.rank == 0 else 8.0)


def test_sasg_under_a_scaler_is_refused(world):
    """It needs the gradient twice in a step, so a closure, which torch does not allow there."""
    model, base = steady_model()
    opt = hpctk.DistributedOptimizer(base, hpctk.SASG(0.5), model=model)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 3)).sum()).backward()
    with pytest.raises(TypeError, match="closure"):
        scaler.step(opt)
    with pytest.raises(hpctk.HpctkError, match=r"needs one \(SASG\) does not work under a GradScaler"):
        scaler.step(opt, lambda: None)
