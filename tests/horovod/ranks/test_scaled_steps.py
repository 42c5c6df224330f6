"""Many steps under a GradScaler, infinities on random ranks, by both of Horovod's ways; see tests/mpi."""

import pytest
from horovod_ways import stock
from scaled_training import EVERY, LENGTHS, RECIPES, assert_in_step, steady_model

import hpctk
import hpctk.horovod


def run(world, model, opt, keeper, steps):
    method = keeper.method
    shared = (lambda: [x.numpy() for x in keeper.local_state_dict()["x"].values()]) if method.kind == "update" else None
    early = method.kind == "gradient" or opt is not keeper
    recipes = [each for name, each in RECIPES.items() if name != "synchronize" or early]
    _, skipped = assert_in_step(world, model, opt, recipes, steps, shared=shared)
    assert keeper.stats.counts["skipped_steps"] == skipped


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("steps", LENGTHS)
def test_compression(world, hvd, steps, name):
    model, base = steady_model()
    skipping = {"on_bad_gradient": "skip"}
    model, opt, compression = stock(hvd, EVERY[name], model=model, base=base, attach=True, of_compression=skipping)
    run(world, model, opt, compression, steps)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("steps", LENGTHS)
def test_own_optimizer(world, hvd, steps, name):
    model, base = steady_model()
    opt = hpctk.horovod.DistributedOptimizer(base, EVERY[name], model=model, on_bad_gradient="skip")
    run(world, model, opt, opt, steps)
