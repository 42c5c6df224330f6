"""DiLoCo on real ranks: the spec's examples, invariants and traps, and the simulation."""

import math
from copy import deepcopy

import numpy as np
import pytest
import torch
from methods_driver import BASES, Quadratic, assert_follows, assert_same_bits, drive
from simulation import SIMULATIONS, compress, diloco
from simulation.problem import FixedProblem, Problem

import hpctk
from hpctk.errors import HpctkError, MismatchError, SettingError, TensorError

SHAPES = ((), (5,), (3, 4), (0, 3), (2, 2, 2))
EXAMPLE = FixedProblem(
    [[[1, 2], [1, 0.5]], [[1, 0.5], [2, 1]]], [[[1, 0], [-1, 1.6]], [[0, 1], [0.9, -1]]], [[2, 2], [0, 0]]
)
SGD, ADAMW = (lambda p: torch.optim.SGD(p, lr=0.1)), (lambda p: torch.optim.AdamW(p, lr=0.1))


@pytest.fixture
def two(world):
    if world.size != 2:
        pytest.skip("the examples have two workers")
    return world


def close(got, wanted, atol=6e-9):
    flat = [np.ravel(x) for x in got] if isinstance(got, list | tuple) else [got]
    np.testing.assert_allclose(np.concatenate(flat), wanted, rtol=0, atol=atol)


def buf_of(opt):
    return [x.numpy() for x in opt.local_state_dict()["momentum"].values()]


def test_worked_example(two):
    rows = [
        ([1.62095, 1.4563625, 0.08911, -0.02261], [0.285, 0.40875, -0.067, 0.017]),
        ([1.17609093, 0.84635866, 0.18361702, -0.05053625], [0.4694805, 0.65226792, -0.10279475, 0.02904981]),
        ([0.73904731, 0.28386621, 0.26385372, -0.07995559], [0.55098973, 0.73189567, -0.1090206, 0.03588025]),
    ]
    for n, (x, buf) in enumerate(rows):
        seen = drive(two, EXAMPLE, hpctk.DiLoCo(period=2), 2 * n + 2, SGD)
        close(seen.consensus[-1], x)
        close(seen.held[-1], x)
        close(buf_of(seen.optimizer), buf)
        assert_same_bits(two, [*seen.consensus[-1], *buf_of(seen.optimizer)], "x and buf")


def test_worked_example_of_adamw(two):
    seen = drive(two, EXAMPLE, hpctk.DiLoCo(period=2), 4, ADAMW)
    close(seen.consensus[1], [1.72921097, 1.72921097, -0.00004421, 0.00012778])
    close(seen.consensus[3], [1.34817679, 1.34817679, -0.00012468, 0.0003538])


def test_worked_example_of_top_k(two):
    seen = drive(two, EXAMPLE, hpctk.DiLoCo(period=2, compressor=hpctk.TopK(0.5)), 6, SGD)
    close(seen.consensus[1], [1.7473, 1.5212, 0.08911, 0])
    close(seen.consensus[3], [1.41879865, 0.95290472, 0.127099, -0.04522])
    close(seen.consensus[5], [0.77477156, 0.61394305, 0.26043066, -0.064498])
    left = [[0, 0.3430457, 0, -0.16040895], [0, 0.14372521, 0, 0.1814082]][two.rank]
    close([x.numpy() for x in seen.optimizer.local_state_dict()["common"]["residuals"].values()], left)


def test_worked_example_of_fragments(two):
    seen = drive(two, EXAMPLE, hpctk.DiLoCo(period=4, fragments=2, delay=1, mixing=0.5), 8, SGD)
    close(seen.consensus[1], [1.8005, 1.70075, 0, 0])
    close(seen.consensus[3], [1.8005, 1.70075, 0.111853, -0.028462])
    close(seen.consensus[5], [1.20526167, 0.94067038, 0.111853, -0.028462])
    close(seen.consensus[7], [1.20526167, 0.94067038, 0.17588034, -0.0449669])
    held = [[1.29710241, 0.49636095, -0.12207134, 0.18055026], [0.94257946, 1.26786153, 0.41948518, -0.25551013]]
    close(seen.held[7], held[two.rank])


def cosine(t):
    return 0.05 * (1 + math.cos(math.pi * t / 40))


def test_worked_example_of_qsr(two):
    method = hpctk.DiLoCo(period=2, period_rule=hpctk.QSR(0.1, steps=40))
    seen = drive(two, EXAMPLE, method, 40, SGD, lr=cosine)
    close(seen.consensus[-1], [0.37927022, 0.3077033, 0.20817776, -0.15260452])
    assert seen.optimizer.stats.counts["rounds"] == 13


@pytest.mark.parametrize(("rate", "period"), [(0.1, 2), (0.05, 4), (0.03, 11), (0.01, 100), (0, 2), (5e-324, None)])
def test_qsr_by_itself(rate, period):
    found = hpctk.QSR(0.1).period(2, rate, 0)
    assert found == period or (period is None and found > 10**9)
    assert hpctk.QSR(0.1, warmup=5, steps=9).period(2, rate, 4) == 2
    assert hpctk.QSR(0.1, steps=9).period(2, rate, 8) == 1


def falling(t):
    return 0.1 / (1 + 0.3 * t)


SETTINGS = {
    "plain": {"period": 3},
    "without_nesterov": {"period": 3, "nesterov": False},
    "fragments": {"period": 6, "fragments": 2, "delay": 2, "mixing": 0.5},
    # More fragments than tensors: some are empty.
    "empty_fragments": {"period": 8, "fragments": 8},
    "topk": {"period": 3, "compressor": (hpctk.TopK(0.4), compress.TopK(0.4)), "feedback": 0.9},
    "topk_delayed": {"period": 6, "fragments": 2, "delay": 1, "compressor": (hpctk.TopK(0.4), compress.TopK(0.4))},
    "sign": {"period": 4, "fragments": 2, "compressor": (hpctk.Sign(), compress.Sign())},
    "sign_delayed": {"period": 4, "fragments": 2, "delay": 1, "compressor": (hpctk.Sign(), compress.Sign())},
    "qsr": {"period": 2, "fragments": 2, "period_rule": (hpctk.QSR(0.1, steps=13), diloco.QSR(0.1, steps=13))},
}


def both(settings):
    """The settings of hpctk, and of the simulation."""
    return [{k: v[i] if isinstance(v, tuple) else v for k, v in settings.items()} for i in (0, 1)]


def follows(world, base, name, steps=13):
    problem = Problem(world.size, seed=12, shapes=SHAPES)
    (ours, simulated), (mine, theirs) = BASES[base], both(SETTINGS[name])
    seen = drive(world, problem, hpctk.DiLoCo(**mine), steps, ours, lr=falling)
    assert_follows(world, seen, SIMULATIONS["DiLoCo"](problem, steps, simulated, lr=falling, **theirs))
    assert_same_bits(world, [*seen.consensus[-1], *buf_of(seen.optimizer)], "x and buf")


@pytest.mark.parametrize("name", SETTINGS)
def test_follows_the_simulation(world, name):
    follows(world, "momentum", name)


@pytest.mark.parametrize("base", ["sgd", "nesterov", "adam", "adamw"])
def test_follows_the_simulation_with_any_base(world, base):
    follows(world, base, "fragments")


@pytest.mark.full
@pytest.mark.parametrize("base", ["sgd", "nesterov", "adam", "adamw"])
@pytest.mark.parametrize("name", SETTINGS)
def test_follows_the_simulation_with_every_base(world, base, name):
    follows(world, base, name, 25)


def same(one, other, atol=1e-12):
    for t, (a, b) in enumerate(zip(one, other, strict=True)):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_allclose(x, y, rtol=0, atol=atol, err_msg=f"step {t}")


@pytest.mark.parametrize("base", ["momentum", "adamw"])
def test_a_plain_outer_step_is_local_sgd(world, base):
    problem, ours = Problem(world.size, seed=5), BASES[base][0]
    one = drive(world, problem, hpctk.DiLoCo(period=3, outer_lr=1, outer_momentum=0), 7, ours)
    other = drive(world, problem, hpctk.LocalSGD(period=3), 7, ours)
    same(one.held, other.held)


def test_with_period_one_it_is_the_outer_optimizer_on_the_mean_gradient(world):
    problem = Problem(world.size, seed=5)
    one = drive(world, problem, hpctk.DiLoCo(period=1), 6, SGD)
    other = drive(world, problem, hpctk.Mean(), 6, lambda p: torch.optim.SGD(p, lr=0.07, momentum=0.9, nesterov=True))
    same(one.held, other.held)


@pytest.mark.parametrize("delay", [0, 1])
def test_identity_is_no_compressor(world, delay):
    problem, ours = Problem(world.size, seed=5), BASES["momentum"][0]
    one = drive(world, problem, hpctk.DiLoCo(4, fragments=2, delay=delay), 9, ours)
    other = drive(world, problem, hpctk.DiLoCo(4, fragments=2, delay=delay, compressor=hpctk.Identity()), 9, ours)
    same(one.held, other.held)


@pytest.mark.parametrize("compressor", [hpctk.TopK(0.2), hpctk.Sign(), hpctk.QSGD(4), hpctk.RandomK(0.3)], ids=repr)
def test_nothing_is_lost(world, compressor):
    """Without outer momentum x - outer_lr * mean e moves as if nothing were compressed."""
    model = Quadratic(Problem(world.size, seed=5), world.rank)
    opt = hpctk.DistributedOptimizer(
        SGD(model.parameters()), hpctk.DiLoCo(2, outer_lr=0.5, outer_momentum=0, compressor=compressor), model=model
    )

    def mean(flat):
        return hpctk.allreduce(flat.clone())

    virtual = torch.cat([x.detach().reshape(-1) for x in model.tensors])
    before = virtual
    for t in range(6):
        opt.zero_grad()
        model(t).backward()
        moved = [x.detach() - 0.1 * x.grad for x in model.tensors]
        opt.step()
        if t % 2:
            common = opt.local_state_dict()["common"]
            x = torch.cat([part.reshape(-1) for part in common["x"].values()])
            e = torch.cat([part.reshape(-1) for part in common["residuals"].values()])
            delta = mean(before - torch.cat([y.reshape(-1) for y in moved]))
            virtual = virtual - 0.5 * delta
            torch.testing.assert_close(x - 0.5 * mean(e), virtual, rtol=0, atol=1e-10)
            before = x.clone()


def test_the_same_data_on_all_ranks_is_one_rank(world):
    ours, simulated = BASES["momentum"]
    seen = drive(world, Problem(world.size, seed=3, same=True), hpctk.DiLoCo(3), 7, ours)
    wanted = SIMULATIONS["DiLoCo"](Problem(1, seed=3), 7, simulated, period=3)
    same(seen.consensus, wanted.consensus)


def test_a_fragment_is_diloco_by_itself(world):
    """With elementwise gradients: fragment p's rounds come at (p+1)h, then after every period."""
    problem = Problem(world.size, seed=3, shapes=((2,), (2,)))
    seen = drive(world, problem, hpctk.DiLoCo(4, fragments=2), 13, SGD)
    model = Quadratic(problem, world.rank)
    opt = hpctk.DistributedOptimizer(SGD(model.parameters()), hpctk.DiLoCo(4), model=model)
    opt._run.since_round = 2
    for t in range(13):
        opt.zero_grad()
        model(t).backward()
        opt.step()
        np.testing.assert_allclose(model.arrays()[0], seen.held[t][0], rtol=0, atol=1e-12)


def test_all_mixing_leaves_the_workers_alone(world):
    problem, ours = Problem(world.size, seed=3), BASES["adamw"][0]
    seen = drive(world, problem, hpctk.DiLoCo(2, mixing=1.0), 6, ours)
    alone = drive(world, problem, hpctk.LocalSGD(100), 6, ours)
    same(seen.held, alone.held, 0)
    assert not np.allclose(seen.consensus[-1][1], problem.start()[1])


def test_one_rank_is_no_special_case(world):
    """Nesterov acts on one's own displacement."""
    problem = Problem(world.size, seed=3, same=True)
    seen = drive(world, problem, hpctk.DiLoCo(2), 2, SGD)
    alone = drive(world, problem, hpctk.LocalSGD(100), 2, SGD)
    start = problem.start()
    for got, local, x in zip(seen.held[-1], alone.held[-1], start, strict=True):
        np.testing.assert_allclose(got, x + 1.33 * (local - x), rtol=0, atol=1e-12)


def test_a_tensor_without_gradients_never_moves(world):
    a, b = (torch.nn.Parameter(torch.full((3,), 2.0)) for _ in range(2))
    opt = hpctk.DistributedOptimizer(
        torch.optim.SGD([a, b], lr=0.1, weight_decay=0.1), hpctk.DiLoCo(1), named_parameters=[("a", a), ("b", b)]
    )
    for _ in range(3):
        a.grad = torch.ones(3)
        opt.step()
    assert torch.equal(b.detach(), torch.full((3,), 2.0))
    assert float(a.detach()[0].item()) < 2


def training(world, method, dtype=torch.float64, **settings):
    model = Quadratic(Problem(world.size, seed=4), world.rank, dtype)
    return model, hpctk.DistributedOptimizer(SGD(model.parameters()), method, model=model, **settings)


def go(model, opt, steps, first=0):
    for t in range(first, first + steps):
        opt.zero_grad()
        model(t).backward()
        opt.step()


@pytest.mark.parametrize("delay", [0, 1])
def test_a_displacement_that_is_not_finite_is_not_sent(world, delay):
    model, opt = training(world, hpctk.DiLoCo(3, delay=delay))
    go(model, opt, 1)
    if world.rank == world.size - 1:
        with torch.no_grad():
            model.tensors[1][2] = math.inf
    # Its gradient is infinite, too, and is not applied; that is the affair of `on_bad_gradient`.
    opt._replica.on_bad_gradient = "skip"
    with pytest.raises(TensorError, match=r"tensors\.1.*element 2 of 5"):
        go(model, opt, 2, 1)
    assert all(torch.isfinite(x).all() for x in opt.local_state_dict()["common"]["x"].values())


@pytest.mark.parametrize("delay", [0, 1])
def test_a_bad_gradient_is_told_at_the_round_and_training_can_go_on(world, delay):
    problem = Problem(world.size, seed=4)
    model, opt = training(world, hpctk.DiLoCo(3, delay=delay))
    go(model, opt, 1)
    opt.zero_grad()
    if world.rank == 0:
        model.tensors[1].grad = torch.full((5,), math.nan, dtype=torch.float64)
    if delay:
        with pytest.raises(HpctkError, match=r"rank 0: the gradient of 'tensors\.1'"):
            opt.step()
    else:
        opt.step()
        with pytest.raises(HpctkError, match=r"rank 0: the gradient of 'tensors\.1'"):
            go(model, opt, 1, 2)
    go(model, opt, 6, 3)
    assert problem.workers == world.size
    assert_same_bits(world, [x.numpy() for x in opt.local_state_dict()["common"]["x"].values()], "x")


def test_a_rule_that_sees_different_rates_is_refused(world):
    if world.size == 1:
        pytest.skip("one rank agrees with itself")
    method = hpctk.LocalSGD(2, period_rule=hpctk.QSR(0.1))
    model, opt = training(world, method)
    opt.param_groups[0]["lr"] = 0.05 if world.rank else 0.1
    with pytest.raises(MismatchError, match="after 2 local steps on one rank and after 4 on another"):
        go(model, opt, 4)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("fragments", [1, 2, 7])
def test_uneven_data(world, delay, fragments):
    """Rank r has 2 + 3r batches: nobody hangs, and all come to the same x."""
    model, opt = training(world, hpctk.DiLoCo(2 * fragments, fragments=fragments, delay=delay))
    for epoch in range(2):
        with opt.join():
            go(model, opt, 2 + 3 * world.rank, 20 * epoch)
        with opt.averaged_model():
            assert_same_bits(world, model.arrays(), "x after join")
        world.agree("rounds", [("rounds", opt.stats.counts["rounds"])])


@pytest.mark.parametrize("schedule", ["ring", "auto"])
def test_a_fragment_travels_while_steps_go_on(world, schedule, monkeypatch, tmp_path):
    """It has left before the delay begins, and nobody waits for anything until it ends."""
    method = hpctk.DiLoCo(6, delay=3, outer_momentum=0, outer_lr=1)
    model, opt = training(world, method, schedule=schedule)
    go(model, opt, 3)
    started = opt.stats
    assert opt._run._left
    monkeypatch.setattr(world, "minimum", lambda *_: pytest.fail("a local step asked other ranks"))
    go(model, opt, 2, 3)
    assert opt._run._left
    assert opt.stats.messages <= started.messages + (0 if schedule == "auto" else 100)
    go(model, opt, 1, 5)
    assert not opt._run._left
    assert opt.stats.counts["rounds"] == 1


@pytest.mark.parametrize("settings", [{}, {"compressor": hpctk.TopK(0.3)}, {"fragments": 2}], ids=str)
def test_resumes_bit_for_bit_with_a_fragment_under_way(world, settings):
    problem, method = Problem(world.size, seed=8), hpctk.DiLoCo(4, delay=1, mixing=0.25, **settings)
    ours, _ = BASES["momentum"]
    whole = drive(world, problem, method, 13, ours, consensus=False)
    half = drive(world, problem, method, 7, ours, consensus=False)
    state = half.optimizer.local_state_dict()
    assert state["combined"]
    model = Quadratic(problem, world.rank)
    opt = hpctk.DistributedOptimizer(ours(model.parameters()), method, model=model)
    with torch.no_grad():
        for x, value in zip(model.tensors, half.held[-1], strict=True):
            x.copy_(torch.from_numpy(value))
    opt.load_state_dict(deepcopy(half.optimizer.state_dict()))
    opt.load_local_state_dict(state)
    go(model, opt, 6, 7)
    assert all(np.array_equal(a, b) for a, b in zip(model.arrays(), whole.held[-1], strict=True))
    go(half.model, half.optimizer, 6, 7)
    assert all(np.array_equal(a, b) for a, b in zip(half.model.arrays(), whole.held[-1], strict=True))


def test_weights_that_are_loaded_before_the_first_step_are_where_it_starts(world):
    problem = Problem(world.size, seed=8)
    start = [np.full(np.shape(x), 0.5) for x in problem.start()]
    seen = drive(world, problem, hpctk.DiLoCo(1, outer_lr=1, outer_momentum=0), 1, SGD, start=start)
    wanted = drive(world, problem, hpctk.Mean(), 1, SGD, start=start)
    same(seen.held, wanted.held)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"period": 5, "fragments": 2}, "need a multiple of the 2 fragments"),
        ({"period": 4, "fragments": 2, "delay": 2}, "delay=2: need less than period / fragments, which is 2"),
        ({"delay": 1, "compressor": hpctk.PowerSGD(1)}, r"PowerSGD\(rank=1\) cannot travel while"),
        ({"mixing": 1.5}, "mixing=1.5"),
        ({"period_rule": 0.1}, "period_rule=0.1: need a rule such as"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(SettingError, match=message):
        hpctk.DiLoCo(**settings)
