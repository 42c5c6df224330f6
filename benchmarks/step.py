"""Where the time of one optimizer step goes, for every method: base optimizer, compression, communication, the rest.

Start it with `./launch/bench step`; it runs as an MPI job on the emulated cluster or in shared memory. The rest is what
hpctk itself costs: fusing, copying, looking for bad gradients.
"""

from __future__ import annotations

import time
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
    entries = [
        measure(here, name, make, int(options.elements), options.repeats)
        for name, make in _rig.only(METHODS, options.only).items()
    ]
    if here.rank == 0:
        rows = [
            [
                e["name"],
                seconds_text(e["seconds"]),
                *(seconds_text(e[kind]) for kind in (*KINDS, "rest")),
                f"{e['rest'] / e['seconds']:.0%}",
            ]
            for e in entries
        ]
        print(f"one step on {int(options.elements)} float32, {here.size} ranks, {_rig.where(here)}")
        print(table(["method", "step", *KINDS, "rest", "rest"], rows))
        _rig.write(options.json, entries)
    here.barrier("the end of the benchmark")


def measure(here, name, make, n, repeats):
    _rig.reporter(here)(name)
    parameters = model(n)
    gradients = [torch.randn(p.shape, generator=torch.Generator().manual_seed(here.rank)) for p in parameters]
    base = torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
    clock = Clock(here, base)
    named = [(f"p{i}", p) for i, p in enumerate(parameters)]
    opt = hpctk.DistributedOptimizer(base, make(), named_parameters=named)

    def closure():
        # Backward makes gradients for nothing here: they are there already.
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        return 0.0

    samples = []
    for _ in range(repeats + 2):
        closure()
        here.barrier("bench")
        samples.append(clock.measured((lambda: opt.step(lambda: 0.0)) if name == "SASG" else opt.step))
    # The first steps make room and compile.
    samples = samples[2:]
    return {"name": name, **{key: median(sample[key] for sample in samples) for key in samples[0]}}


if __name__ == "__main__":
    main()
