"""Measure on these ranks what methods compute beside the base optimizer's step: half a minute.

Each method makes steps on a model of zeros and ones; what is left of a step without the base optimizer's part and
without what was waited for of the network are its passes. Communication itself is what `calibrate` measures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch

import hpctk
from hpctk.advise.local_work import Passes
from hpctk.collectives.engine.engine import engine_of
from hpctk.comm.world import World

#: Beyond every cache, and soon done.
ELEMENTS = 2_000_000
SHAPE = (2000, 250)
REPEATS = 3
#: Seconds of a step after which there are no more: on a slow link they wait for the network, which is not asked.
ENOUGH_S = 1.0
#: A period that no measurement comes to the end of.
NEVER = 1_000_000

#: Key of local work: how to make the method; those with local steps are given a period.
EVERY_STEP: Mapping[str, Callable[[], Any]] = {
    "mean": lambda: hpctk.Mean(),
    "adacons": lambda: hpctk.AdaCons(),
    "half": lambda: hpctk.Mean(hpctk.Half()),
    "top_k": lambda: hpctk.Mean(hpctk.TopK(0.01)),
    "random_k": lambda: hpctk.Mean(hpctk.RandomK(0.01)),
    "sign": lambda: hpctk.Mean(hpctk.Sign()),
    "qsgd": lambda: hpctk.Mean(hpctk.QSGD(4)),
    "power_sgd": lambda: hpctk.Mean(hpctk.PowerSGD(4)),
    "saef top_k": lambda: hpctk.SAEF(hpctk.TopK(0.01)),
    "saef sign": lambda: hpctk.SAEF(hpctk.Sign(), server=hpctk.Sign()),
    "ef21": lambda: hpctk.EF21(hpctk.TopK(0.01)),
    # Below 0 it uploads always, and takes no second gradient.
    "sasg": lambda: hpctk.SASG(density=0.01, alpha=-1.0),
}
IN_ROUNDS: Mapping[str, Callable[[int], Any]] = {
    "local_sgd": lambda period: hpctk.LocalSGD(period=period),
    "celgc": lambda period: hpctk.CELGC(clip=0.1, period=period),
    "mgrawa": lambda period: hpctk.MGRAWA(period=period),
    "mgrawa chunk": lambda period: hpctk.MGRAWA(period=period, compressor=hpctk.ChunkTopK()),
    "lgrawa": lambda period: hpctk.LGRAWA(period=period),
    "diloco": lambda period: hpctk.DiLoCo(period=period),
    "sparse_loco": lambda period: hpctk.SparseLoCo(period=period),
    "easgd": lambda period: hpctk.EASGD(period=period),
}


def measure(here: World, report: Callable[[str], None], elements: int = ELEMENTS) -> dict[str, Passes]:
    """Return the passes of all methods, the same on every rank. Collective over COMM_WORLD."""
    found: dict[str, Passes] = {}
    for key, make in EVERY_STEP.items():
        report(f"what {key} computes")
        found[key] = Passes(_nanoseconds(here, make(), elements))
    for key, of_period in IN_ROUNDS.items():
        report(f"what {key} computes")
        apart = _nanoseconds(here, of_period(NEVER), elements)
        found[key] = Passes(apart, max(0.0, _nanoseconds(here, of_period(1), elements) - apart))
    return found


def _nanoseconds(here: World, method: Any, elements: int) -> float:
    """Return the median over steps, of the slowest rank, of a step's own work for each parameter."""
    rows = max(1, elements // (SHAPE[0] * SHAPE[1]))
    generator = torch.Generator().manual_seed(here.rank)
    parameters = [torch.nn.Parameter(torch.zeros(SHAPE)) for _ in range(rows)]
    gradients = [torch.randn(SHAPE, generator=generator) for _ in parameters]
    base = torch.optim.SGD(parameters, lr=0.01)
    spent = {"base": 0.0}
    base.register_step_pre_hook(lambda *_: spent.update(base=spent["base"] - time.perf_counter()))
    base.register_step_post_hook(lambda *_: spent.update(base=spent["base"] + time.perf_counter()))
    named = [(f"p{i}", parameter) for i, parameter in enumerate(parameters)]
    opt = hpctk.DistributedOptimizer(base, method, named_parameters=named)
    recorders, own, start = engine_of(here).recorders, [], 0.0
    for number in range(REPEATS + 2):
        if number == 2:
            # Kernels are compiled by now.
            start = time.perf_counter()
        if number == 3 and -here.minimum([-round(1e9 * (time.perf_counter() - start))], "advise")[0] > 1e9 * ENOUGH_S:
            break
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        here.barrier("advise")
        spent["base"], waited, began = 0.0, recorders.exposed_s, time.perf_counter()
        opt.step(lambda: 0.0) if isinstance(method, hpctk.SASG) else opt.step()
        own.append(time.perf_counter() - began - spent["base"] - (recorders.exposed_s - waited))
    # The first steps make room and compile.
    picoseconds = round(1e12 * max(0.0, median(own[2:])) / (rows * SHAPE[0] * SHAPE[1]))
    return -here.minimum([-picoseconds], "advise")[0] / 1e3
