"""A program for ranks: train by some methods in turn while ranks are lost; compare every step with the simulations.

    mpirun --with-ft ulfm -n 4 python lost_worker.py '[["Mean", [[2, 3, "exchange"]]], ...]'

A fault is [rank, step, point], with a fourth for the seconds of a stall; [[host, size], step, point] is that of a host
of so many ranks. Prints "rank R: METHOD ok" for every method, on every rank that is left.
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
from hpctk.ways_in import overlap

STEPS = 12
TOP_K = hpctk.TopK(0.3), compress.TopK(0.3)
#: Each method, and the settings of its simulation.
METHODS = {
    "Mean": (hpctk.Mean(), {}),
    "Mean clip": (hpctk.Mean(clip=0.05), {"clip": 0.05}),
    "Mean TopK": (hpctk.Mean(TOP_K[0]), {"compressor": TOP_K[1]}),
    "Mean overlap": (hpctk.Mean(), {}),
    "Mean TopK overlap": (hpctk.Mean(TOP_K[0]), {"compressor": TOP_K[1]}),
    "AdaCons overlap": (hpctk.AdaCons(), {}),
    "AdaCons": (hpctk.AdaCons(), {}),
    "EF21": (hpctk.EF21(TOP_K[0]), {"compressor": TOP_K[1]}),
    "SAEF": (hpctk.SAEF(TOP_K[0], average_every=3), {"compressor": TOP_K[1], "average_every": 3}),
    "SAEF classic": (hpctk.SAEF(TOP_K[0], step_ahead=False), {"compressor": TOP_K[1], "step_ahead": False}),
    "SAEF Sign": (hpctk.SAEF(hpctk.Sign()), {"compressor": compress.Sign()}),
    "SASG": (hpctk.SASG(0.3, warmup=2, max_delay=3), {"density": 0.3, "warmup": 2, "max_delay": 3}),
    "CELGC": (hpctk.CELGC(0.05, period=3), {"clip": 0.05, "period": 3}),
    "LocalSGD": (hpctk.LocalSGD(period=3), {"period": 3}),
    "LocalSGD TopK": (hpctk.LocalSGD(period=3, compressor=TOP_K[0]), {"period": 3, "compressor": TOP_K[1]}),
    "DiLoCo delay": (
        hpctk.DiLoCo(period=6, compressor=TOP_K[0], fragments=2, delay=2, mixing=0.5),
        {"period": 6, "compressor": TOP_K[1], "fragments": 2, "delay": 2, "mixing": 0.5},
    ),
    "DiLoCo dense delay": (hpctk.DiLoCo(period=3, delay=1), {"period": 3, "delay": 1}),
    "DiLoCo": (hpctk.DiLoCo(period=3, compressor=TOP_K[0]), {"period": 3, "compressor": TOP_K[1]}),
    "EPISODE": (hpctk.EPISODE(0.05, period=3), {"clip": 0.05, "period": 3}),
    "EASGD": (hpctk.EASGD(period=3), {"period": 3}),
    "LSGD": (hpctk.LSGD(period=3), {"period": 3}),
    "MGRAWA": (hpctk.MGRAWA(period=3), {"period": 3}),
    "LGRAWA": (hpctk.LGRAWA(period=3), {"period": 3}),
}


def expected_lost(problem: Problem) -> int:
    """Return how many are lost in the same step as the next worker, which has their copy."""
    return sum((k + 1) % problem.workers in gone for gone in problem.lost.values() for k in gone)


def conserve(number: int, faults: Faults) -> None:
    """Compare x less the mean residual with what all steps come to: nothing that ranks had not sent is lost."""
    here = world()
    problem, worker = Problem(here.size, seed=number), here.rank
    model = Quadratic(problem, worker)
    base = torch.optim.SGD(model.parameters(), lr=0.05)
    method = hpctk.SAEF(hpctk.TopK(0.1))
    opt = hpctk.DistributedOptimizer(base, method, model=model, on_lost_rank="shrink", buddy=2)
    faults.watch(worker)
    seen: list[list[np.ndarray]] = []
    for t in range(6):
        faults.begin(t)
        opt.zero_grad()
        # The same on all ranks, so that the mean over those that are left is the mean of before.
        sum((t + 1) * tensor.sum() for tensor in model.parameters()).backward()
        opt.step()
        # SAEF's parameters are x less the residual, on each rank its own.
        texts = opt.together(lambda: here.gather_texts(json.dumps([a.tolist() for a in model.arrays()]), "comparing"))
        ranks = [[np.array(a) for a in json.loads(text)] for text in texts]
        seen.append([sum(parts) / len(ranks) for parts in zip(*ranks, strict=True)])
    moved = 0.05 * sum(t + 1 for t in range(6))
    for got, start in zip(seen[-1], problem.start(), strict=True):
        np.testing.assert_allclose(got, start - moved, rtol=0, atol=1e-10, err_msg="x less the mean residual")
    assert opt.stats.counts["restored_residuals"] == len(faults.faults)
    print(f"rank {worker}: conserve ok, {here.size} left", flush=True)


def train(number: int, name: str, faults: Faults, per_host: int, buddy: int | None) -> None:
    """Train by one method, on the ranks that are left of those before."""
    here = world()
    method, settings = METHODS[name]
    problem = Problem(here.size, seed=number)
    torch_base, base = BASES["momentum"]
    worker = here.rank
    alone = len(here.nodes) == 1
    faults.watch(worker, [range(k, k + per_host) for k in range(0, here.size, per_host)] if alone else here.nodes)
    problem.buddy = buddy
    problem.lost = faults.lost_before(STEPS)
    expected = SIMULATIONS[name.split()[0]](problem, STEPS, base, **settings)
    model = Quadratic(problem, worker)
    opt = hpctk.DistributedOptimizer(
        torch_base(model.parameters()),
        method,
        model=model,
        overlap="overlap" in name,
        on_lost_rank="shrink",
        buddy=buddy,
    )
    changes: list[list[int]] = []
    opt.on_change(changes.append)
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
        # Where models are averaged to be evaluated, one that is lost after the step counts in the simulation only.
        lost_after = any(fault.during == "commit" and fault.step == t for fault in faults.faults)
        for got, wanted in zip(evaluated, [] if lost_after else expected.consensus[t], strict=not lost_after):
            np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-10, err_msg=f"{name}, step {t}, evaluated")
    lost = sum(map(len, problem.lost.values()))
    assert here.size == problem.workers - lost, (here.size, lost)
    assert opt.stats.counts["lost_ranks"] == lost
    assert bool(changes) == bool(opt.stats.counts["redone"]) == bool(lost)
    if "TopK" in name or buddy:
        # Neighbours die at once where both a rank's residual and its copy are to be lost.
        assert opt.stats.counts["lost_residuals"] == (expected_lost(problem) if buddy else lost)
        assert opt.stats.counts["restored_residuals"] == lost - opt.stats.counts["lost_residuals"]
    print(f"rank {worker}: {name} ok, {here.size} left", flush=True)


def run_out_of_data(number: int, faults: Faults) -> None:
    """Average gradients of ranks whose data lasts for different numbers of steps; STEPS is a rank's first idle one."""
    here = world()
    problem, worker, lr = Problem(here.size, seed=number), here.rank, 0.05
    batches = [3 + 2 * k for k in range(here.size)]
    alive, x = set(range(here.size)), problem.start()
    lost = {
        batches[k] if step >= STEPS else step: k for step, gone in faults.lost_before(STEPS + 1).items() for k in gone
    }
    for t in range(max(batches)):
        alive.discard(lost.get(t, -1))
        gradients = [problem.gradient(k, x, t) for k in alive if t < batches[k]]
        if gradients:
            x = [a - lr * sum(parts) / len(alive) for a, *parts in zip(x, *gradients, strict=True)]
    model = Quadratic(problem, worker)
    base = torch.optim.SGD(model.parameters(), lr=lr)
    opt = hpctk.DistributedOptimizer(base, hpctk.Mean(), model=model, on_lost_rank="shrink")
    faults.watch(worker)
    with opt.join():
        for t in range(batches[worker]):
            faults.begin(t)
            opt.zero_grad()
            model(t).backward()
            opt.step()
        faults.begin(STEPS)
    opt.together(lambda: assert_same_bits(here, model.arrays(), "parameters"))
    for got, wanted in zip(model.arrays(), x, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-10, err_msg=f"join, worker {worker}")
    print(f"rank {worker}: join ok, {here.size} left", flush=True)


if __name__ == "__main__":
    # Several buckets of a model of a few elements.
    overlap.BUCKET_BYTES = 64
    for number, (method, given) in enumerate(json.loads(sys.argv[1])):
        faults, per_host = Faults(), 1
        for who, step, during, *seconds in given:
            if isinstance(who, list):
                faults, per_host = faults.drop_host(who[0], step, during), who[1]
            elif seconds:
                faults = faults.stall(who, seconds[0], step, during)
            else:
                faults = faults.kill(who, step, during)
        if method == "join":
            run_out_of_data(number, faults)
        elif method == "conserve":
            conserve(number, faults)
        else:
            name, _, buddy = method.partition(" buddy=")
            train(number, name, faults, per_host, int(buddy) if buddy else None)
    time.sleep(0.1)
