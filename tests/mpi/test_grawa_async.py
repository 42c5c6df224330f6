"""Asynchronous GRAWA on real ranks: tickets, unequal speeds, and every run replayed in the simulation."""

import gc
import threading
import time

import numpy as np
import pytest
import torch
from methods_driver import BASES, Quadratic, assert_same_bits, drive
from simulation import SIMULATIONS, grawa
from simulation.problem import Problem

import hpctk
from hpctk.comm.mpi import counter as words
from hpctk.comm.mpi.counter import ServedCounter, WindowCounter
from hpctk.comm.shared_counter import shared_counter
from hpctk.errors import HpctkError
from hpctk.methods.core.tickets import Tickets, meaning
from hpctk.methods.grawa import LGRAWA, MGRAWA

METHODS = {"MGRAWA": MGRAWA, "LGRAWA": LGRAWA}
both = pytest.mark.parametrize("name", METHODS)


@pytest.fixture(params=[WindowCounter, ServedCounter], ids=["window", "served"])
def word(request, monkeypatch, world):
    """The counter of one node, and that of many."""
    if request.param is WindowCounter and len(world.nodes) > 1:
        pytest.skip("not used between nodes")
    monkeypatch.setattr("hpctk.methods.core.tickets.shared_counter", request.param)
    return request.param


class Trainee:
    """A model on its quadratic, whose optimizer notes the numbers of its tickets."""

    def __init__(self, world, method, base="momentum", seed=1, lr=None, **settings):
        self.world, self.lr = world, lr
        self.problem = Problem(world.size, seed=seed)
        self.model = Quadratic(self.problem, world.rank)
        ours, self.simulated = BASES[base]
        self.opt = hpctk.DistributedOptimizer(ours(self.model.parameters()), method, model=self.model, **settings)
        self.run, self.steps, self.bad_steps = self.opt._run, 0, ()
        self.numbers = [self.run.tickets.number]
        self.run.tickets.take = self._noted(self.run.tickets.take)
        self.run.tickets.new_cycle = self._noted(self.run.tickets.new_cycle)

    def _noted(self, function):
        def noting():
            result = function()
            self.numbers.append(self.run.tickets.number)
            return result

        return noting

    @property
    def rounds(self):
        return self.run.counts["rounds"]

    def step(self):
        if self.lr is not None:
            self.opt.param_groups[0]["lr"] = self.lr(self.steps)
        self.opt.zero_grad()
        self.model(self.steps).backward()
        if self.steps in self.bad_steps:
            self.model.tensors[1].grad[0] = np.nan
        self.steps += 1
        self.opt.step()

    def order(self, cycles, period):
        """Who took which ticket in the first cycles, from all ranks."""
        every = self.world.gather_texts(" ".join(map(str, self.numbers)), "gathering tickets")
        owner = {int(number): rank for rank, text in enumerate(every) for number in text.split()}
        assert sum(len(text.split()) for text in every) == len(owner), "a ticket was given twice"
        wanted = range(cycles * self.world.size * (period + 1))
        return [owner[number] for number in wanted]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("period", [1, 2, 5])
def test_ticket_pattern(size, period):
    length = size * (period + 1)
    found = [meaning(number, size, period) for number in range(3 * length)]
    assert found == (["local"] * (size * period) + ["round"] * size) * 3
    assert found == grawa.tickets([k for _ in range(3 * (period + 1)) for k in range(size)], size, period)


def test_tickets_are_given_once_each(world, word):
    period, mine = 50, []
    machine = Tickets(world, period)
    for cycle in range(3):
        assert machine.number == cycle * world.size * (period + 1) + world.rank
        mine.append(machine.number)
        while machine.take() == "local":
            mine.append(machine.number)
        mine.append(machine.number)
        world.barrier()
        machine.new_cycle()
        world.barrier()
    every = " ".join(world.gather_texts(" ".join(map(str, mine)), "gathering tickets")).split()
    assert sorted(map(int, every)) == list(range(3 * world.size * (period + 1)))


def test_words_are_apart(world, word):
    first, second = word(world), word(world)
    for _ in range(10):
        first.add(1)
    second.add(5)
    world.barrier()
    assert (first.add(0), second.add(0)) == (10 * world.size, 5 * world.size)
    world.barrier()


def test_a_word_may_be_asked_for_before_rank_0_has_made_it(world):
    if world.rank == 0:
        ServedCounter(world)  # the server, which is made together
        time.sleep(0.2)
    else:
        ServedCounter(world)
    late = ServedCounter(world)
    late.add(1)
    world.barrier()
    assert late.add(0) == world.size
    world.barrier()


def test_freeing_the_communicator_frees_the_words(world, comm, word):
    copy = comm.Dup()
    here = hpctk.comm.world.world(copy)
    kept = word(here)
    kept.add(1)
    here.barrier()
    assert kept.add(0) == world.size
    here.barrier()
    copy.Free()


def test_ranks_of_one_node_use_memory(world):
    wanted = WindowCounter if len(world.nodes) == 1 else ServedCounter
    assert isinstance(shared_counter(world), wanted)


@both
@pytest.mark.parametrize("base", ["nesterov", "adam"])
def test_a_run_is_replayed_by_the_simulation(world, name, base, word):
    def falling(t):
        return 0.05 / (1 + 0.2 * t)

    settings = {"period": 4, "pull": 0.4, "prox": 0.2}
    trainee = Trainee(world, METHODS[name](**settings, asynchronous=True), base, lr=falling)
    pause = np.random.default_rng(world.rank)
    while trainee.rounds < 5:
        time.sleep(pause.exponential(2e-3 * (1 + world.rank)))
        trainee.step()
    order = trainee.order(5, 4)
    wanted = grawa.simulate_asynchronous(
        trainee.problem, order, trainee.simulated, layerwise=name == "LGRAWA", lr=falling, **settings
    )
    assert wanted.log["kind"][-1] == "round"
    assert trainee.steps == wanted.log["own_steps"][-1][world.rank]
    assert sum(wanted.log["own_steps"][-1]) == 5 * 4 * world.size
    for got, x in zip(trainee.model.arrays(), wanted.held[-1][world.rank], strict=True):
        np.testing.assert_allclose(got, x, rtol=0, atol=1e-10)
    for got, x in zip(trainee.run.centre, wanted.log["centre"][-1], strict=True):
        np.testing.assert_allclose(got.numpy(), x, rtol=0, atol=1e-10)
    assert_same_bits(world, [x.numpy() for x in trainee.run.centre], "x_C")
    with trainee.opt.averaged_model():
        for got, x in zip(trainee.model.arrays(), wanted.consensus[-1], strict=True):
            np.testing.assert_allclose(got, x, rtol=0, atol=1e-10)


@both
def test_with_period_one_it_is_the_synchronous_method(world, name):
    problem = Problem(world.size, seed=2)
    ours, simulated = BASES["momentum"]
    seen = [drive(world, problem, METHODS[name](period=1, asynchronous=choice), 6, ours) for choice in (True, False)]
    for a, b in zip(*(one.held for one in seen), strict=True):
        assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
    wanted = SIMULATIONS[name](problem, 6, simulated, period=1)
    np.testing.assert_allclose(seen[0].held[-1][1], wanted.held[-1][world.rank][1], rtol=0, atol=1e-10)


@pytest.mark.parametrize("slow", ["first", "last"])
def test_slow_ranks_take_fewer_steps(world, slow, word):
    trainee = Trainee(world, MGRAWA(period=8, asynchronous=True))
    lame = world.rank == (0 if slow == "first" else world.size - 1)
    while trainee.rounds < 3:
        time.sleep(0.03 if lame else 0.001)
        trainee.step()
    steps = [int(text) for text in world.gather_texts(str(trainee.steps), "counting")]
    assert sum(steps) == 3 * 8 * world.size
    if world.size > 1:
        lame_steps = steps.pop(0 if slow == "first" else -1)
        assert 3 <= lame_steps < min(steps)
    assert trainee.opt.stats.counts["tickets"] == trainee.steps


def test_time_budget_ends_all_ranks_together(world):
    trainee = Trainee(world, LGRAWA(period=3, asynchronous=True, time_budget_s=0.3))
    began = time.monotonic()
    while not trainee.opt.finished:
        time.sleep(0.002 * (1 + world.rank))
        trainee.step()
    lasted = time.monotonic() - began
    world.agree("the end", [("rounds", trainee.rounds)])
    steps = [int(text) for text in world.gather_texts(str(trainee.steps), "counting")]
    assert sum(steps) == 3 * world.size * trainee.rounds
    trainee.order(trainee.rounds, 3)
    # Rank 0's clock, which the optimizer has read before we did.
    assert world.rank or lasted > 0.2


@both
def test_uneven_data(world, name, word):
    """Two epochs of join: rank r has 5r, then 5(N-r) batches; whoever is through keeps the rounds going."""
    trainee = Trainee(world, METHODS[name](period=4, asynchronous=True))
    before = 0
    for batches in (5 * world.rank, 5 * (world.size - world.rank)):
        with trainee.opt.join():
            for _ in range(batches):
                trainee.step()
        assert trainee.steps == before + batches
        before = trainee.steps
        world.agree("the end of an epoch", [("rounds", trainee.rounds)])
        assert_same_bits(world, [x.numpy() for x in trainee.run.centre], "x_C")
        assert all(np.isfinite(x).all() for x in trainee.model.arrays())
    assert trainee.rounds >= 2
    # All is as at the start of a cycle: training goes on in step.
    begun = trainee.rounds
    while trainee.rounds < begun + 2:
        trainee.step()
    steps = [int(text) for text in world.gather_texts(str(trainee.steps - before), "counting")]
    assert sum(steps) == 2 * 4 * world.size


def test_one_rank_has_all_the_data(world):
    """The others lose the tickets they are dealt, nothing else: rounds come as often as they can."""
    trainee = Trainee(world, MGRAWA(period=3, asynchronous=True))
    with trainee.opt.join():
        for _ in range(25 if world.rank == world.size - 1 else 0):
            trainee.step()
    locals_per_cycle = 3 * world.size - (world.size - 1)
    # And one at the end, for the steps of the last cycle.
    assert trainee.rounds == 25 // locals_per_cycle + 1


def test_nobody_has_data(world):
    trainee = Trainee(world, MGRAWA(asynchronous=True))
    start = trainee.model.arrays()
    with trainee.opt.join():
        pass
    np.testing.assert_allclose(trainee.model.arrays()[1], start[1], rtol=0, atol=1e-15)


def test_time_budget_with_uneven_data(world, word):
    trainee = Trainee(world, MGRAWA(period=2, asynchronous=True, time_budget_s=0.2))
    with trainee.opt.join():
        while not trainee.opt.finished and (world.rank == 0 or trainee.steps < 3):
            time.sleep(0.005)
            trainee.step()
    assert trainee.opt.finished
    world.agree("the end", [("rounds", trainee.rounds)])


def test_a_bad_gradient_raises_on_all_ranks_at_the_round(world):
    trainee = Trainee(world, MGRAWA(period=3, asynchronous=True))
    trainee.bad_steps = (0,) if world.rank == world.size - 1 else ()
    with pytest.raises(HpctkError, match=f"rank {world.size - 1}: the gradient of 'tensors.1'") as caught:
        for _ in range(1000):
            trainee.step()
    world.agree("the error", [("text", str(caught.value))])
    assert trainee.rounds == 0
    while trainee.rounds < 2:
        trainee.step()


def test_a_bad_gradient_is_skipped(world):
    trainee = Trainee(world, LGRAWA(period=3, asynchronous=True), on_bad_gradient="skip")
    trainee.bad_steps = (0,) if world.rank == world.size - 1 else ()
    while trainee.rounds < 3:
        try:
            trainee.step()
        except HpctkError:
            # Alone, or where a bad step was the last one of the only rank that had any.
            assert world.size == 1
    assert all(np.isfinite(x).all() for x in trainee.model.arrays())
    assert trainee.opt.stats.counts["skipped_steps"] == 1


def word_threads():
    return [thread for thread in threading.enumerate() if thread.name == "hpctk shared word"]


def test_the_thread_lives_as_long_as_the_runs(world, word):
    gc.collect()
    time.sleep(0.05)
    assert not word_threads()
    trainee = Trainee(world, MGRAWA(asynchronous=True))
    assert len(word_threads()) == (word is ServedCounter and world.rank == 0 and world.size > 1)
    another = Trainee(world, MGRAWA(asynchronous=True))
    assert len(word_threads()) <= 1
    used = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - used < 0.1
    trainee.run.tickets = None
    gc.collect()
    time.sleep(0.05)
    assert bool(word_threads()) == (word is ServedCounter and world.rank == 0 and world.size > 1)
    another.run.tickets = None
    gc.collect()
    for thread in word_threads():
        thread.join(2)
    assert not word_threads()


def test_without_threads_rank_0_warns_and_answers_when_it_can(world, comm, monkeypatch, caplog):
    monkeypatch.setattr(words.MPI, "Query_thread", lambda: words.MPI.THREAD_SERIALIZED)
    copy = comm.Dup()
    here = hpctk.comm.world.world(copy)
    word = ServedCounter(here)
    assert ("MPI_THREAD_MULTIPLE" in caplog.text) == (world.rank == 0 and world.size > 1)
    assert not word_threads()
    word.add(1)
    # Waiting for the others, rank 0 answers them.
    here.barrier()
    word.add(1)
    here.barrier()
    assert word.add(0) == 2 * world.size
    here.barrier()
    copy.Free()


def test_a_probe_and_tickets_go_together(world):
    trainee = Trainee(
        world, MGRAWA(period=3, asynchronous=True, norms="probe", probe=lambda: trainee.model(777).backward())
    )
    while trainee.rounds < 2:
        time.sleep(0.001 * world.rank)
        trainee.step()
    assert trainee.run.weights.sum() == pytest.approx(1)
    assert torch.isfinite(trainee.run.centre[1]).all()
