"""AdaCons's published figures: the linear regression of its authors, all workers simulated in one process.

    ./launch/bench paper/adacons [--seeds 5] [--workers 8,32] [--batches 128,2048] [--output FILE]

The weights are hpctk's own (collectives/consensus_weights.py), the arithmetic is float64. Besides plain mean and
AdaCons there is the control that every evaluation of AdaCons needs: the mean of gradients that were brought to norm 1.
Losses are exact expectations, 0.5 * (|w|^2 / 12 + (sum w)^2 / 4), medians over the seeds, with the smallest and the
largest beside.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median

import _rig
import numpy as np
import torch
from _training.results import keep, machine

from hpctk.cli.core.progress import Progress
from hpctk.cli.core.table import table
from hpctk.collectives.engine.consensus_weights import EPS, ConsensusState, weights

WEIGHTS, MICRO_BATCHES, MOMENTUM = 1000, 2, 0.99

#: Final losses in the authors' README, by batch and workers; of the plain mean by batch only.
PUBLISHED = {
    ("plain mean", 128): "33.4",
    ("plain mean", 2048): "49.3",
    ("AdaCons", 128, 32): "1.98e-8",
    ("AdaCons", 128, 8): "1.27e-5",
    ("AdaCons", 2048, 32): "1.48e-8",
    ("AdaCons", 2048, 8): "52.4",
}


def gradients(generator, w, workers, batch):
    """Return the accumulated gradients of all workers, a row each; w is the same for all micro-batches of an update."""
    total = torch.zeros(workers, WEIGHTS, dtype=torch.float64)
    for _ in range(MICRO_BATCHES):
        x = torch.rand(workers, batch // workers, WEIGHTS, generator=generator)
        errors = x @ w.float()
        total += torch.einsum("nb,nbd->nd", errors, x).double() / (batch // workers)
    return total


def plain_mean(rows, state):
    return rows.mean(0)


def unit_norm_mean(rows, state):
    return (rows / (rows.norm(dim=1, keepdim=True) + EPS)).mean(0)


def adacons(rows, state):
    inner, squared = (rows @ rows.sum(0)).numpy(), rows.square().sum(1).numpy()
    chosen = weights(inner, squared, state, 0, momentum=MOMENTUM, scale="unit")
    return torch.from_numpy(np.asarray(chosen)) @ rows


METHODS = {"plain mean": plain_mean, "unit-norm mean": unit_norm_mean, "AdaCons": adacons}


def expected_loss(w):
    return 0.5 * (float(w.square().sum()) / 12 + float(w.sum()) ** 2 / 4)


def run(method, workers, batch, seed, updates):
    """Return the expected loss after all updates."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.rand(WEIGHTS, generator=generator, dtype=torch.float64) * 10 - 5
    state = ConsensusState()
    for _ in range(updates):
        out = METHODS[method](gradients(generator, w, workers, batch), state)
        length = float(out @ out)
        if length > 0:
            w = w - float(out @ w) / length * out
    return expected_loss(w)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="runs of each kind [5]")
    parser.add_argument("--workers", default="8,32", help="numbers of workers [8,32]")
    parser.add_argument("--batches", default="128,2048", help="global batches [128,2048]")
    parser.add_argument("--updates", type=int, default=500, help="as published: 500 [500]")
    parser.add_argument("--output", type=Path, help="where to keep losses and table, for `./launch/bench report`")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all losses to FILE")
    options = parser.parse_args()
    cases = [
        (batch, workers, method)
        for batch in map(int, options.batches.split(","))
        for workers in map(int, options.workers.split(","))
        for method in METHODS
    ]
    bar, rows, everything = Progress("regression"), [], []
    for done, (batch, workers, method) in enumerate(cases):
        losses, seconds = [], []
        for seed in range(1, options.seeds + 1):
            began = time.perf_counter()
            losses.append(run(method, workers, batch, seed, options.updates))
            seconds.append(time.perf_counter() - began)
            bar.step(done * options.seeds + seed, len(cases) * options.seeds, f"{method} N={workers} B={batch}")
        case = {"batch": batch, "workers": workers, "method": method, "losses": losses}
        name = f"{method}, N={workers}, B={batch}"
        everything.append({"name": name, "seconds": median(seconds), **case})
        published = PUBLISHED.get((method, batch, workers)) or PUBLISHED.get((method, batch), "-")
        shown = [f"{value:.3g}" for value in (median(losses), min(losses), max(losses))]
        rows.append([method, str(batch), str(workers), *shown, published])
    text = table(["method", "B", "N", "median loss", "least", "most", "published"], rows)
    print(text)
    if options.output is not None:
        settings = {"seeds": options.seeds, "updates": options.updates}
        keep(options.output, {"settings": settings, "machine": machine(), "runs": everything, "table": text})
    _rig.write(options.json, everything)


if __name__ == "__main__":
    main()
