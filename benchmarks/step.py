"""Where the time of one optimizer step goes, for every method: base optimizer, compression, communication, the rest.

Start it with `./launch/bench step`; it runs as an MPI job on the emulated cluster or in shared memory. The rest is what
hpctk itself costs: fusing, copying, looking for bad gradients. In the same run, taking turns, are the base optimizer's
step alone, and one after DDP's way over gloo with fp16 on the wire: every method's step is divided by both.
"""

from __future__ import annotations

import time
from functools import partial
from statistics import median

import _rig
import torch

import hpctk
from hpctk.cli.core.table import seconds_text, table
from hpctk.collectives.engine.engine import counted, engine_of
from hpctk.comm.world import world

METHODS = {
    "Mean": lambda: hpctk.Mean(),
    "Mean TopK": lambda: hpctk.Mean(hpctk.TopK(0.01)),
    "AdaCons": lambda: hpctk.AdaCons(),
    "SASG": lambda: hpctk.SASG(density=0.01, alpha=-1.0),
    "SAEF TopK": lambda: hpctk.SAEF(hpctk.TopK(0.01)),
    "SAEF Sign both ways": lambda: hpctk.SAEF(hpctk.Sign(), server=hpctk.Sign()),
    "MGRAWA": lambda: hpctk.MGRAWA(period=1),
    "LGRAWA": lambda: hpctk.LGRAWA(period=1),
    "CELGC": lambda: hpctk.CELGC(clip=0.1, period=1),
}

KINDS = ("base", "compression", "communication")


class Clock:
    """Seconds of a step by kind, as the base optimizer's hooks and the calls of collectives tell them."""

    #: As recorders have them: counts no messages, hears of every call.
    traffic, flags = None, True

    def __init__(self, here, base):
        self._here, self._began = here, 0.0
        self.seconds = dict.fromkeys(KINDS, 0.0)
        base.register_step_pre_hook(lambda *_: self._begin())
        base.register_step_post_hook(lambda *_: self._end())

    def _begin(self):
        self._began = time.perf_counter()

    def _end(self):
        self.seconds["base"] += time.perf_counter() - self._began

    def record(self, call):
        """Take a collective call."""
        self.seconds["compression"] += call.compressing_s + call.decompressing_s

    def measured(self, work):
        """Return the seconds of some work: all, and by kind."""
        self.seconds = dict.fromkeys(KINDS, 0.0)
        engine = engine_of(self._here)
        exposed, began = engine.recorders.exposed_s, time.perf_counter()
        with counted(self._here, self):
            work()
        total = time.perf_counter() - began
        self.seconds["communication"] = engine.recorders.exposed_s - exposed
        return {"seconds": total, **self.seconds, "rest": total - sum(self.seconds.values())}


def model(n):
    """Some large tensors and many small ones, as in a network."""
    sizes = [n // 4, n // 4, n // 8, n // 8] + [n // 400] * 90
    sizes.append(n - sum(sizes))
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in sizes]


def main() -> None:
    parser = _rig.parser(only=True)
    parser.add_argument("--elements", type=float, default=25e6)
    options = parser.parse_args()
    here = world()
    torch.set_num_threads(1)
    _rig.start_gloo(here)
    n = int(options.elements)
    runs = {name: contender(here, name, make, n) for name, make in _rig.only(METHODS, options.only).items()}
    runs |= {"alone": contender(here, "alone", None, n), "gloo fp16": contender(here, "gloo fp16", None, n)}
    entries = measure(here, runs, options.repeats)
    if here.rank == 0:
        rows = [
            [
                e["name"],
                seconds_text(e["seconds"]),
                *(seconds_text(e[kind]) for kind in (*KINDS, "rest")),
                f"{e['rest'] / e['seconds']:.0%}",
                f"{e['to_alone']:.2f}",
                f"{e['to_gloo']:.2f}",
            ]
            for e in entries
        ]
        print(f"one step on {int(options.elements)} float32, {here.size} ranks, {_rig.where(here)}")
        print(table(["method", "step", *KINDS, "rest", "rest", "to alone", "to gloo"], rows))
        _rig.write(options.json, entries)
    here.barrier("the end of the benchmark")


def contender(here, name, make, n):
    """Return a function that makes one step and returns its seconds, all and by kind."""
    parameters = model(n)
    gradients = [torch.randn(p.shape, generator=torch.Generator().manual_seed(here.rank)) for p in parameters]
    base = torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
    clock = Clock(here, base)
    named = [(f"p{i}", p) for i, p in enumerate(parameters)]
    step = base.step
    if make is not None:
        opt = hpctk.DistributedOptimizer(base, make(), named_parameters=named)
        step = (lambda: opt.step(lambda: 0.0)) if name == "SASG" else opt.step
    elif name != "alone":
        step = partial(gloo_step, here, base, parameters)

    def run():
        # Backward makes gradients for nothing here: they are there already.
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        here.barrier("bench")
        return clock.measured(step)

    return run


def gloo_step(here, base, parameters):
    """Do what DDP's fp16 hook does with buckets of 25 MB, then step."""
    import torch.distributed as dist

    buckets, room = [[]], 25 * 2**20
    for parameter in reversed(parameters):
        if buckets[-1] and sum(p.nbytes for p in buckets[-1]) >= room:
            buckets.append([])
        buckets[-1].append(parameter)
    flats = [torch.cat([p.grad.view(-1) for p in bucket]).half() for bucket in buckets]
    works = [dist.all_reduce(flat.div_(here.size), async_op=True) for flat in flats]
    for bucket, flat, work in zip(buckets, flats, works, strict=True):
        work.wait()
        for p, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            p.grad.view(-1).copy_(part)
    base.step()


def measure(here, runs, repeats):
    """Return a row of medians for each contender; they take turns. Collective."""
    samples = {name: [] for name in runs}
    # The first steps make room and compile.
    for repeat in range(repeats + 2):
        _rig.reporter(here)(f"repeat {repeat - 1} of {repeats}" if repeat > 1 else "warming up")
        for name, run in runs.items():
            sample = run()
            if repeat > 1:
                samples[name].append(sample)
    rows = [
        {"name": name, **{key: median(sample[key] for sample in taken) for key in ("seconds", *KINDS)}}
        for name, taken in samples.items()
    ]
    seconds = {row["name"]: row["seconds"] for row in rows}
    for row in rows:
        row["rest"] = row["seconds"] - sum(row[kind] for kind in KINDS)
        row["to_alone"] = row["seconds"] / seconds["alone"]
        row["to_gloo"] = row["seconds"] / seconds["gloo fp16"]
    return rows


if __name__ == "__main__":
    main()
