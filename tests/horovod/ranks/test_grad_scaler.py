"""torch.amp.GradScaler under Horovod: all ranks skip the same steps and keep the same scale."""

import pytest
import torch
from horovod_ways import stock
from scaled_training import METHODS, RECIPES, STEPS, assert_in_step, assert_the_same_at_any_scale, scaled_model

import hpctk
import hpctk.horovod


def shared_by(method, source):
    if not method.startswith("SAEF"):
        return None
    return lambda: [x.numpy() for x in source.local_state_dict()["x"].values()]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_compression(world, hvd, recipe, method):
    model, base = scaled_model()
    model, opt, compression = stock(
        hvd, METHODS[method](), model=model, base=base, attach=True, of_compression={"on_bad_gradient": "skip"}
    )
    shared = shared_by(method, compression)
    _, skipped = assert_in_step(world, model, opt, RECIPES[recipe], STEPS, shared=shared)
    assert compression.stats.counts["skipped_steps"] == skipped


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_own_optimizer(world, hvd, recipe, method):
    if recipe == "synchronize" and method.startswith("SAEF"):
        pytest.skip("synchronize() is for gradient methods")
    model, base = scaled_model()
    opt = hpctk.horovod.DistributedOptimizer(base, METHODS[method](), model=model, on_bad_gradient="skip")
    assert_in_step(world, model, opt, RECIPES[recipe], STEPS, shared=shared_by(method, opt))


@pytest.mark.parametrize("recipe", ["plain", "synchronize"])
def test_residuals_follow_the_scale(world, hvd, recipe):
    def make(model, base):
        skipping = {"on_bad_gradient": "skip"}
        method = hpctk.Mean(hpctk.TopK(0.4))
        return stock(hvd, method, model=model, base=base, attach=True, of_compression=skipping)[1]

    assert_the_same_at_any_scale(world, make, RECIPES[recipe])


@pytest.mark.parametrize("method", METHODS)
def test_parameters_in_half_precision(world, hvd, method):
    model, base = scaled_model(torch.bfloat16)
    model, opt, compression = stock(
        hvd, METHODS[method](), model=model, base=base, attach=True, of_compression={"on_bad_gradient": "skip"}
    )
    assert_in_step(world, model, opt, RECIPES["plain"], STEPS, shared=shared_by(method, compression))
