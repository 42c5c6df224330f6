"""A program for ranks: train by asynchronous methods in turn while ranks are lost; compare with the simulations.

    mpirun --with-ft ulfm -n 4 python lost_tickets.py '[{"method": "MGRAWA", "faults": [[0, 2, "step"]]}, ...]'

A fault's step is the number of rounds before. Prints "rank R: METHOD ok, N left" for every method, on every rank that
is left.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from faults import Faults
from methods_driver import BASES, Quadratic, assert_same_bits
from simulation.grawa import Rounds
from simulation.problem import Problem
from simulation.workers import Workers

import hpctk
from hpctk.comm.world import world

ROUNDS, PERIOD = 6, 4
METHODS = {"MGRAWA": hpctk.MGRAWA, "LGRAWA": hpctk.LGRAWA}


def train(number: int, name: str, faults: Faults) -> None:
    """Train by one method, on the ranks that are left of those before."""
    here = world()
    problem, worker = Problem(here.size, seed=number), here.rank
    torch_base, base = BASES["momentum"]
    model = Quadratic(problem, worker)
    method = METHODS[name](period=PERIOD, prox=0.2, asynchronous=True)
    opt = hpctk.DistributedOptimizer(torch_base(model.parameters()), method, model=model, on_lost_rank="shrink")
    workers = Workers(problem, base)
    rounds = Rounds(workers, layerwise=name == "LGRAWA", period=PERIOD, prox=0.2)
    faults.watch(worker)
    pause, steps, done = np.random.default_rng(worker), 0, 0
    before = dict.fromkeys(range(here.size), 0)
    while done < ROUNDS:
        faults.begin(done)
        time.sleep(pause.exponential(2e-3))
        opt.zero_grad()
        model(steps).backward()
        opt.step()
        steps += 1
        if opt.stats.counts["rounds"] == done:
            continue
        done += 1
        texts = opt.together(lambda mine=f"{worker} {steps}": here.gather_texts(mine, "counting steps"))
        after = {int(k): int(t) for k, t in map(str.split, texts)}
        # Those that are left did these steps, and then the round.
        problem.lost[done] = sorted(set(before) - set(after))
        workers.lose(done, rounds.v, rounds.counts, rounds.last)
        for place, k in enumerate(workers.numbers):
            for t in range(before[k], after[k]):
                rounds.local_step(place, t)
        rounds.round()
        taken = sum(after[k] - before[k] for k in after)
        assert taken == PERIOD * here.size or (problem.lost[done] and taken < PERIOD * len(before)), taken
        before = after
        for got, wanted in zip(model.arrays(), workers.x[workers.numbers.index(worker)], strict=True):
            np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-10, err_msg=f"{name}, round {done}, {worker}")
        with opt.averaged_model():
            evaluated = model.arrays()
            opt.together(lambda found=evaluated: assert_same_bits(here, found, "evaluated parameters"))
    lost = len(faults.faults)
    assert here.size == problem.workers - lost, (here.size, lost)
    assert opt.stats.counts["lost_ranks"] == lost
    print(f"rank {worker}: {name} ok, {here.size} left", flush=True)


if __name__ == "__main__":
    for number, (name, given) in enumerate(json.loads(sys.argv[1])):
        faults = Faults()
        for rank, step, during in given:
            faults = faults.kill(rank, step, during)
        train(number, name, faults)
    time.sleep(0.1)
