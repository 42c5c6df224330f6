"""A compressor that hpctk does not know, by both ways in under Horovod."""

import pytest
from horovod_ways import own, stock, trajectory
from threshold import Threshold, simulated_mean, simulated_saef
from training import assert_alike

import hpctk

STEPS = 5


@pytest.mark.parametrize("way", ["own", "stock"])
def test_mean(world, hvd, way):
    method = hpctk.Mean(Threshold(0.05))
    model, opt = own(world, method) if way == "own" else stock(hvd, method)[:2]
    trajectory(world, model, opt, STEPS)
    assert_alike(model, simulated_mean(world.size, STEPS, 0.05)[0])


def test_saef(world, hvd):
    model, opt = own(world, hpctk.SAEF(Threshold(0.01)))
    trajectory(world, model, opt, STEPS)
    with opt.averaged_model():
        assert_alike(model, simulated_saef(world.size, STEPS, 0.01))
