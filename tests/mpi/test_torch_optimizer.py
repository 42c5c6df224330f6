"""A DistributedOptimizer is a torch Optimizer in all that it promises: hooks, copies, files."""

import copy
import io
import pickle

import pytest
import torch
from training import net, sgd, train, wrapped

import hpctk
from hpctk.errors import HpctkError


def test_hooks_around_state_dict(world):
    model = net()
    opt, seen = wrapped(model), []
    opt.register_state_dict_pre_hook(lambda who: seen.append(("before", who)))
    handle = opt.register_state_dict_post_hook(lambda who, state: seen.append(("after", who)) or {**state, "extra": 1})
    train(world, model, opt, 1)
    assert opt.state_dict()["extra"] == 1
    assert seen == [("before", opt), ("after", opt)]
    handle.remove()
    assert "extra" not in opt.state_dict()


def test_hooks_around_load_state_dict(world):
    model = net()
    opt, seen = wrapped(model), []

    def faster(who, state):
        seen.append(("before", who))
        state = copy.deepcopy(state)
        state["param_groups"][0]["lr"] = 0.7
        return state

    opt.register_load_state_dict_pre_hook(faster)
    opt.register_load_state_dict_post_hook(lambda who: seen.append(("after", who)))
    opt.load_state_dict(opt.state_dict())
    assert seen == [("before", opt), ("after", opt)]
    assert opt.param_groups[0]["lr"] == 0.7


def test_hooks_around_step(world):
    model = net()
    opt, seen = wrapped(model), []
    opt.register_step_pre_hook(lambda who, arguments, settings: seen.append(("before", who)))
    opt.register_step_post_hook(lambda who, arguments, settings: seen.append(("after", who)))
    train(world, model, opt, 1)
    assert seen == [("before", opt), ("after", opt)]


@pytest.mark.parametrize("how", [copy.deepcopy, copy.copy, pickle.dumps, lambda opt: torch.save(opt, io.BytesIO())])
def test_no_empty_shells(world, how):
    with pytest.raises(HpctkError, match="a DistributedOptimizer cannot be"):
        how(wrapped(net()))


def test_what_is_inside_can_be_copied(world):
    model = net()
    opt = wrapped(model)
    train(world, model, opt, 1)
    kept = copy.deepcopy(opt.state_dict())
    other = net()
    base = sgd(other.parameters())
    base.load_state_dict(kept)
    hpctk.DistributedOptimizer(base, hpctk.Mean(), model=other)
    assert torch.equal(base.state[other[0].weight]["momentum_buffer"], opt.state[model[0].weight]["momentum_buffer"])
