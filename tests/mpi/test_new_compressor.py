"""A compressor that hpctk does not know, through Mean and SAEF: nothing but its declaration tells how it combines."""

import pytest
from threshold import Threshold, simulated_mean, simulated_saef
from training import assert_alike, net, train, wrapped

import hpctk

STEPS = 6


@pytest.mark.parametrize("least", [0.05, 1e9], ids=["some", "none"])
def test_mean(world, least):
    model = net()
    opt = wrapped(model, hpctk.Mean(Threshold(least)))
    train(world, model, opt, STEPS)
    wanted, counts = simulated_mean(world.size, STEPS, least)
    assert_alike(model, wanted)
    if least == 0.05 and world.size > 1:
        assert len(set(counts)) > 1, "else nothing is shown about ranks that send different numbers of elements"


def test_saef(world):
    model = net()
    opt = wrapped(model, hpctk.SAEF(Threshold(0.01)))
    train(world, model, opt, STEPS)
    with opt.averaged_model():
        assert_alike(model, simulated_saef(world.size, STEPS, 0.01))


def test_saef_with_it_as_the_server(world):
    # At a threshold of 0 everything is sent, on both sides.
    model, plain = net(), net()
    train(world, model, wrapped(model, hpctk.SAEF(hpctk.Identity(), server=Threshold(0.0))), STEPS)
    train(world, plain, wrapped(plain, hpctk.SAEF(hpctk.Identity())), STEPS)
    assert_alike(model, plain)
