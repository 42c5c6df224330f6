"""An exchange that does not count: what a rank had to send is all there afterwards, for the next attempt."""

import numpy as np
import pytest
import torch

import hpctk
from hpctk.ways_in.gradient_exchange import Spares, exchange_gradients

METHODS = {
    "Mean": hpctk.Mean(),
    "Mean unit_norm": hpctk.Mean(unit_norm=True),
    "Mean TopK": hpctk.Mean(hpctk.TopK(0.3)),
    "Mean TopK keep": hpctk.Mean(hpctk.TopK(0.3, keep=True)),
    "Mean TopK exclude": hpctk.Mean(hpctk.TopK(0.3, exclude=("bias",))),
    "Mean Sign": hpctk.Mean(hpctk.Sign()),
    "AdaCons": hpctk.AdaCons(),
    "EF21": hpctk.EF21(hpctk.TopK(0.3)),
}
#: One of each is reduced where it lies (a megabyte), one together with others.
SHAPES = {"weight": (300, 500), "bias": (40,)}


def to_be_sent(run, gradients):
    """Return what this rank has to send of each parameter: its gradient, and what is left of earlier ones."""
    kept = run.local_state().get("residuals", {})
    return {name: x.numpy() + (kept[name].numpy() if name in kept else 0) for name, x in gradients.items()}


@pytest.mark.parametrize("name", METHODS)
def test_nothing_is_lost_and_nothing_sent_twice(world, name):
    generator = torch.Generator().manual_seed(world.rank)
    parameters = {key: torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for key, shape in SHAPES.items()}
    base = torch.optim.SGD(parameters.values(), lr=0.1)
    opt = hpctk.DistributedOptimizer(base, METHODS[name], named_parameters=parameters.items())
    run = opt._run
    for attempt in range(2):
        for parameter in parameters.values():
            parameter.grad = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
        if attempt == 0:
            opt.step()
    gradients = {key: parameter.grad for key, parameter in parameters.items()}
    wanted = to_be_sent(run, gradients)
    undo = run.undo()
    _, made = exchange_gradients(run, run.replica.gradients, spares=Spares())
    # Written where they were: then the residuals have them all, or this is left to `commit`.
    assert set(made) == (set() if name in ("Mean TopK", "Mean TopK keep", "AdaCons") else set(SHAPES))
    undo()
    # Gradients that the method does without are anew, of zeros.
    gradients = {key: parameter.grad for key, parameter in parameters.items()}
    for key, total in to_be_sent(run, gradients).items():
        np.testing.assert_allclose(total, wanted[key], rtol=0, atol=1e-12, err_msg=key)


def test_no_spare_lies_where_a_gradient_does():
    """As in a loop that sets `.grad` to parts of one buffer in every step."""
    buffer, spares = torch.zeros(8), Spares()
    spares.keep({"weight": buffer[:4].view(2, 2), "bias": torch.zeros(4)})
    gradients = {"weight": buffer[:4].view(2, 2), "bias": buffer[4:]}
    found = spares.like(gradients)
    assert {name: x.shape for name, x in found.items()} == {name: x.shape for name, x in gradients.items()}
    assert not {x.data_ptr() for x in found.values()} & {x.data_ptr() for x in gradients.values()}


@pytest.mark.parametrize("name", ["Mean", "Mean TopK", "Mean TopK keep", "Mean TopK exclude", "AdaCons"])
def test_the_attempt_that_follows_sends_the_same(world, name):
    results = []
    for undone in (False, True):
        generator = torch.Generator().manual_seed(world.rank)
        parameters = {key: torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for key, shape in SHAPES.items()}
        base = torch.optim.SGD(parameters.values(), lr=0.1)
        opt = hpctk.DistributedOptimizer(base, METHODS[name], named_parameters=parameters.items())
        run = opt._run
        for parameter in parameters.values():
            parameter.grad = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
        undo = run.undo()
        if undone:
            exchange_gradients(run, run.replica.gradients, spares=Spares())
            undo()
            run.undo()
        _, made = exchange_gradients(run, run.replica.gradients, spares=Spares())
        run.commit()
        results.append({key: made.get(key, parameter.grad).clone() for key, parameter in parameters.items()})
    for key in SHAPES:
        np.testing.assert_allclose(results[1][key].numpy(), results[0][key].numpy(), rtol=0, atol=1e-12, err_msg=key)


@pytest.mark.parametrize("method", [hpctk.Mean(), hpctk.AdaCons()], ids=["Mean", "AdaCons"])
def test_packed_gradients_stay_as_they_are_until_the_result_counts(world, method):
    parameters = {key: torch.nn.Parameter(torch.zeros(5, dtype=torch.float64)) for key in "ab"}
    base = torch.optim.SGD(parameters.values(), lr=0.1)
    run = hpctk.DistributedOptimizer(base, method, named_parameters=parameters.items())._run

    def attempt(value):
        for parameter in parameters.values():
            parameter.grad = torch.full((5,), value * (1.0 + world.rank), dtype=torch.float64)
        held = [parameter.grad for parameter in parameters.values()]
        _, made = exchange_gradients(run, run.replica.gradients, spares=Spares())
        assert made == {}
        assert all(x.unique().tolist() == [value * (1.0 + world.rank)] for x in held)
        return held

    undo = run.undo()
    first = attempt(1.0)
    undo()
    second = attempt(2.0)
    run.commit()
    # Parallel gradients: their mean by AdaCons, too.
    mean = pytest.approx(2.0 * sum(range(1, world.size + 1)) / world.size)
    assert all(x[0].item() == x[-1].item() == mean for x in second)
    # What does not count is not written by what follows, either.
    assert all(x.unique().tolist() == [1.0 + world.rank] for x in first)
    run.commit()
    assert all(x[0].item() == x[-1].item() == mean for x in second)


@pytest.mark.parametrize("method", [hpctk.Mean(), hpctk.AdaCons()], ids=["Mean", "AdaCons"])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_scaled_gradients_end_scaled(world, scale, method):
    parameter = torch.nn.Parameter(torch.zeros(5))
    base = torch.optim.SGD([parameter], lr=0.1)
    run = hpctk.DistributedOptimizer(base, method, named_parameters=[("a", parameter)])._run
    parameter.grad = torch.full((5,), scale * (1.0 + world.rank))
    _, made = exchange_gradients(run, run.replica.gradients, spares=Spares(), scale=scale)
    run.commit()
    wanted = [scale * sum(range(1, world.size + 1)) / world.size]
    assert made.get("a", parameter.grad).unique().tolist() == pytest.approx(wanted)
