"""Where the time of one optimizer step goes, for every method: base optimizer, compression, communication, the rest.

Start it with `./launch/bench step`; it runs as an MPI job on the emulated cluster or in shared memory. The rest is what
hpctk itself costs: fusing, copying, looking for bad gradients.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import _rig
import torch

import hpctk
from hpctk.cli.table import seconds_text, table
from hpctk.collectives.elements import InPlace
from hpctk.collectives.engine import Engine
from hpctk.compressors import Sign, TopK
from hpctk.compressors.compressor import Compressor
from hpctk.methods import error_feedback
from hpctk.world import World, world

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

#: What is timed, and what it counts as. Only the outermost of nested calls counts.
TIMED = [
    (torch.optim.SGD, "step", "base"),
    (TopK, "select", "compression"),
    (TopK, "feed", "compression"),
    (Compressor, "feed", "compression"),
    (Compressor, "compress", "compression"),
    (Compressor, "decompress", "compression"),
    (Sign, "decompress", "compression"),
    (error_feedback.sign, "add", "compression"),
    (Engine, "complete", "communication"),
    (InPlace, "finish", "communication"),
    (World, "wait", "communication"),
]


class Clock:
    """Seconds by kind, of the outermost timed calls."""

    def __init__(self):
        self.seconds = {"base": 0.0, "compression": 0.0, "communication": 0.0}
        self.inside = False

    @contextmanager
    def running(self, kind):
        if self.inside:
            yield
            return
        self.inside, began = True, time.perf_counter()
        try:
            yield
        finally:
            self.inside = False
            self.seconds[kind] += time.perf_counter() - began

    def watch(self, owner, name, kind):
        original = getattr(owner, name)

        def timed(*arguments, **settings):
            with self.running(kind):
                return original(*arguments, **settings)

        setattr(owner, name, timed)


def model(n):
    """Some large tensors and many small ones, as in a network."""
    sizes = [n // 4, n // 4, n // 8, n // 8] + [n // 400] * 90
    sizes.append(n - sum(sizes))
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in sizes]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--elements", type=float, default=25e6)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", help="names of methods, with commas")
    options = parser.parse_args()
    here = world()
    torch.set_num_threads(1)
    clock = Clock()
    for entry in TIMED:
        clock.watch(*entry)
    entries = []
    for name, make in _rig.only(METHODS, options.only).items():
        entries.append(measure(here, clock, name, make, int(options.elements), options.repeats))
    if here.rank == 0:
        rows = [
            [
                e["name"],
                seconds_text(e["seconds"]),
                *(seconds_text(e[kind]) for kind in ("base", "compression", "communication", "rest")),
                f"{e['rest'] / e['seconds']:.0%}",
            ]
            for e in entries
        ]
        print(f"one step on {int(options.elements)} float32, {here.size} ranks, {_rig.where(here)}")
        print(table(["method", "step", "base", "compression", "communication", "rest", "rest"], rows))
        if options.json:
            options.json.write_text(json.dumps(entries, indent=2) + "\n")
    here.barrier("the end of the benchmark")


def measure(here, clock, name, make, n, repeats):
    _rig.reporter(here)(name)
    parameters = model(n)
    gradients = [torch.randn(p.shape, generator=torch.Generator().manual_seed(here.rank)) for p in parameters]
    base = torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
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
        kept = [parameter.grad for parameter in parameters]
        here.barrier("bench")
        clock.seconds = dict.fromkeys(clock.seconds, 0.0)
        began = time.perf_counter()
        if name == "SASG":
            opt.step(lambda kept=kept: 0.0)
        else:
            opt.step()
        total = time.perf_counter() - began
        samples.append({"seconds": total, **clock.seconds, "rest": total - sum(clock.seconds.values())})
    # The first steps make room and compile.
    samples = samples[2:]
    return {"name": name, **{key: median(sample[key] for sample in samples) for key in samples[0]}}


if __name__ == "__main__":
    main()
