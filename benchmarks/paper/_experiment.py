"""What the experiments share: a training on real ranks, followed step by step; results that outlive an interruption.

An experiment compares contenders by what they reach after so many steps and by what they send until then. Seconds play
no part, so it may run on a busy machine, with more ranks than cores.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path

import _rig
import torch
from _training.results import PAPERS, keep, machine

import hpctk
from hpctk.comm.world import world
from hpctk.methods.core.method import Method


def parsed(description, *, steps, every, seeds):
    """Return the options that every experiment has."""
    parser = _rig.parser(only=True)
    parser.description = description.splitlines()[0]
    parser.add_argument("--seeds", type=int, default=seeds, help=f"runs of each contender [{seeds}]")
    parser.add_argument("--steps", type=int, default=steps, help=f"of each run at most [{steps}]")
    parser.add_argument("--every", type=int, default=every, help=f"steps between looks at held-out data [{every}]")
    parser.add_argument("--data", help="folder of Fashion-MNIST, or a text file")
    parser.add_argument("--output", type=Path, help="where results are kept, and found again")
    parser.add_argument("--fresh", action="store_true", help="begin anew where results are there already")
    parser.add_argument("--tiny", action="store_true", help="a model and data that say nothing, for tests")
    return parser.parse_args()


class Experiment:
    """The runs of one experiment, kept in a file that grows run by run. Collective to make.

    Attributes
    ----------
    here : World
    options : namespace
    """

    def __init__(self, name, options, **settings):
        self.here, self.options = world(), options
        torch.set_num_threads(1)
        self._path = options.output or PAPERS / f"{name}{'-tiny' if options.tiny else ''}.json"
        self._settings = {"ranks": self.here.size, "steps": options.steps, "every": options.every, **settings}
        self._document = self.here.run_on_root("reading the results", self._begin)

    def _begin(self):
        if self._path.exists() and not self.options.fresh:
            document = json.loads(self._path.read_text())
            if document["settings"] != self._settings:
                sys.exit(f"bench: {self._path}: was measured with {document['settings']}; --fresh begins anew")
            return document
        return {"settings": self._settings, "machine": machine(), "runs": []}

    def run_all(self, contenders, follow):
        """Call `follow(contender, seed)` for each contender and seed that is not there yet; return the runs by name.

        Seeds take turns. Collective.
        """
        chosen = _rig.only(contenders, self.options.only)
        report, runs = _rig.reporter(self.here), self._document["runs"]
        for seed in range(self.options.seeds):
            for name, contender in chosen.items():
                if any(run["name"] == name and run["seed"] == seed for run in runs):
                    continue
                runs.append({"name": name, "seed": seed, **follow(contender, seed)})
                last = runs[-1]["curve"][-1]
                told = "blew up" if last[1] is None else f"loss {last[1]:.4g}, accuracy {last[2]:.2%}"
                report(f"{name}, seed {seed}: step {last[0]}, {told}")
                self.here.run_on_root("keeping the results", self._keep)
        return {
            name: [run for run in runs if run["name"] == name and run["seed"] < self.options.seeds] for name in chosen
        }

    def _keep(self):
        keep(self._path, self._document)

    def finish(self, text, rows):
        """Print and keep the table of the experiment; write its rows where that was asked for. Collective."""
        if self.here.rank == 0:
            print(f"{text}\nkept in {self._path}")
            if not self.options.only:
                self._document["table"] = text
                self._keep()
            _rig.write(self.options.json, rows)
        self.here.barrier("the end of the experiment")


def follow(here, task, method, optimizer, *, seed, steps, every, until=None, measure=None):
    """Train; return the seconds and the curve: step, held-out loss and accuracy, uploads of all ranks. Collective.

    Parameters
    ----------
    method : Method, or a function of the model that returns one
    optimizer : function of the parameters that returns one
    until : float, optional
        Stop at this accuracy.
    measure : callable, optional
        Given the model to judge after the last step, on every rank; what it returns is kept as `measured`.
    """
    torch.manual_seed(seed)
    model = task.make_model()
    chosen = method if isinstance(method, Method) else method(model)
    opt = hpctk.DistributedOptimizer(optimizer(model.parameters()), chosen, model=model)
    curve, began = [], time.perf_counter()
    for step in range(steps):
        batch = task.batch_of(here.rank, here.size, seed, step)

        def closure(batch=batch):
            model.zero_grad()
            loss = task.loss(model, batch)
            loss.backward()
            return loss

        try:
            opt.step(closure)
        except hpctk.HpctkError:
            # On all ranks: gradients that are no numbers any more.
            curve.append([step + 1, None, 0.0, step + 1])
            break
        if (step + 1) % every == 0 or step + 1 == steps:
            uploads = torch.tensor([float(opt.stats.counts.get("uploads", step + 1))], dtype=torch.float64)
            with opt.averaged_model():
                sums = torch.cat([task.verdict(model, here.rank, here.size), uploads])
            loss, right, answers, uploads = hpctk.allreduce(sums, op="sum").tolist()
            curve.append([step + 1, loss / answers, right / answers, int(uploads)])
            if loss != loss or (until is not None and right / answers >= until):
                break
    found = {"seconds": time.perf_counter() - began, "curve": curve}
    if measure is not None:
        with opt.averaged_model():
            found["measured"] = measure(model)
    # What it had in flight and in memory goes before the next one comes.
    del opt
    gc.collect()
    return found
