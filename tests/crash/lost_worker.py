"""A program for ranks: train by some methods in turn while ranks are lost; compare every step with the simulations.

    mpirun --with-ft ulfm -n 4 python lost_worker.py '[{"method": "Mean", "faults": [[2, 3, "exchange"]]}, ...]'

Prints "rank R: METHOD ok" for every method, on every rank that is left.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from faults import Faults
from methods_driver import BASES, Quadratic, assert_same_bits
from simulation import SIMULATIONS, compress
from simulation.problem import Problem

import hpctk
from hpctk.comm.world import world

STEPS = 12
TOP_K = hpctk.TopK(0.3), compress.TopK(0.3)
#: Each method, and the settings of its simulation.
METHODS = {
    "Mean": (hpctk.Mean(), {}),
    "Mean clip": (hpctk.Mean(clip=0.05), {"clip": 0.05}),
    "Mean TopK": (hpctk.Mean(TOP_K[0]), {"compressor": TOP_K[1]}),
    "AdaCons": (hpctk.AdaCons(), {}),
    "EF21": (hpctk.EF21(TOP_K[0]), {"compressor": TOP_K[1]}),
    "SAEF": (hpctk.SAEF(TOP_K[0], average_every=3), {"compressor": TOP_K[1], "average_every": 3}),
    "SAEF classic": (hpctk.SAEF(TOP_K[0], step_ahead=False), {"compressor": TOP_K[1], "step_ahead": False}),
    "SASG": (hpctk.SASG(0.3, warmup=2, max_delay=3), {"density": 0.3, "warmup": 2, "max_delay": 3}),
    "CELGC": (hpctk.CELGC(0.05, period=3), {"clip": 0.05, "period": 3}),
    "LocalSGD": (hpctk.LocalSGD(period=3), {"period": 3}),
    "LocalSGD TopK": (hpctk.LocalSGD(period=3, compressor=TOP_K[0]), {"period": 3, "compressor": TOP_K[1]}),
    "DiLoCo": (hpctk.DiLoCo(period=3, compressor=TOP_K[0]), {"period": 3, "compressor": TOP_K[1]}),
    "EPISODE": (hpctk.EPISODE(0.05, period=3), {"clip": 0.05, "period": 3}),
    "EASGD": (hpctk.EASGD(period=3), {"period": 3}),
    "LSGD": (hpctk.LSGD(period=3), {"period": 3}),
    "MGRAWA": (hpctk.MGRAWA(period=3), {"period": 3}),
    "LGRAWA": (hpctk.LGRAWA(period=3), {"period": 3}),
}


def train(number: int, name: str, faults: Faults) -> None:
    """Train by one method, on the ranks that are left of those before."""
    here = world()
    method, settings = METHODS[name]
    problem = Problem(here.size, seed=number)
    torch_base, base = BASES["momentum"]
    problem.lost = faults.lost_before(STEPS)
    expected = SIMULATIONS[name.split()[0]](problem, STEPS, base, **settings)
    worker = here.rank
    model = Quadratic(problem, worker)
    opt = hpctk.DistributedOptimizer(torch_base(model.parameters()), method, model=model, on_lost_rank="shrink")
    changes: list[list[int]] = []
    opt.on_change(changes.append)
    faults.watch(worker)
    for t in range(STEPS):
        faults.begin(t)

        def closure(t: int = t) -> torch.Tensor:
            opt.zero_grad()
            loss = model(t)
            loss.backward()
            return loss

        opt.step(closure)
        with opt.averaged_model():
            evaluated = model.arrays()
            opt.together(lambda found=evaluated: assert_same_bits(here, found, "evaluated parameters"))
        # Among those that made this step in the simulation, lost afterwards or not.
        gone = {k for step, lost in problem.lost.items() if step <= t for k in lost}
        place = sorted(set(range(problem.workers)) - gone).index(worker)
        for got, wanted in zip(model.arrays(), expected.held[t][place], strict=True):
            np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-10, err_msg=f"{name}, step {t}, worker {worker}")
        for got, wanted in zip(evaluated, expected.consensus[t], strict=True):
            np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-10, err_msg=f"{name}, step {t}, evaluated")
    lost = sum(map(len, problem.lost.values()))
    assert here.size == problem.workers - lost, (here.size, lost)
    assert opt.stats.counts["lost_ranks"] == lost
    assert bool(changes) == bool(lost)
    print(f"rank {worker}: {name} ok, {here.size} left", flush=True)


if __name__ == "__main__":
    for number, one in enumerate(json.loads(sys.argv[1])):
        faults = Faults()
        for rank, step, during in one["faults"]:
            faults = faults.kill(rank, step, during)
        train(number, one["method"], faults)
    time.sleep(0.1)
