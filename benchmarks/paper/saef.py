"""SAEF's claim: as accurate as full precision in no more epochs than error feedback needs, with the top 1 %.

Start it with `./launch/bench paper/saef`, on 4 ranks. The authors' abstract: faster in epochs than both full
precision and local error feedback, without loss. Their CIFAR-100 and ImageNet are scaled down to Fashion-MNIST and an
MLP of 0.9 million parameters; SGD with momentum .9 and weight decay 5e-4 as theirs; one rate for all, and its
half and double. `average_every=20` is how they train ImageNet; `Sign both ways` how they train CIFAR.
"""

from __future__ import annotations

from functools import partial
from statistics import median

import _experiment
import torch
from _training import tasks

import hpctk
from hpctk.cli.core.table import table

DENSITY, BATCH, RATE = 0.01, 32, 0.02


def contenders():
    """Return what competes, by name: a method, and the factor of the rate."""
    methods = {
        "full precision": hpctk.Mean(),
        "error feedback": hpctk.SAEF(hpctk.TopK(DENSITY), step_ahead=False),
        "SAEF": hpctk.SAEF(hpctk.TopK(DENSITY)),
        "SAEF, average_every=20": hpctk.SAEF(hpctk.TopK(DENSITY), average_every=20),
        "error feedback, Sign both ways": hpctk.SAEF(hpctk.Sign(), server=hpctk.Sign(), step_ahead=False),
        "SAEF, Sign both ways": hpctk.SAEF(hpctk.Sign(), server=hpctk.Sign()),
    }
    return {f"{name}, rate x{factor:g}": (method, factor) for name, method in methods.items() for factor in (0.5, 1, 2)}


def main():
    options = _experiment.parsed(__doc__, steps=1404, every=117, seeds=3)
    experiment = _experiment.Experiment("saef", options, rate=RATE)
    here = experiment.here
    task = tasks.make("mlp", options.data, tiny=options.tiny)
    task.make_model = partial(tasks.mlp, task.inputs[0].numel(), 32 if options.tiny else 640)
    task.batch = BATCH
    runs = experiment.run_all(
        contenders(),
        lambda contender, seed: _experiment.follow(
            here, task, contender[0],
            partial(torch.optim.SGD, lr=RATE * contender[1], momentum=0.9, weight_decay=5e-4),
            seed=seed, steps=options.steps, every=options.every,
        ),
    )  # fmt: skip
    epoch = len(task.inputs) / (BATCH * here.size)
    rows, shown = [], []
    for name, found in best_rates(runs).items():
        curves = [run["curve"] for run in found]
        rows.append({
            "name": name, "seconds": median(run["seconds"] for run in found),
            "accuracy": median(curve[-1][2] for curve in curves), "loss": median(curve[-1][1] for curve in curves),
            "curves": curves,
        })  # fmt: skip
    dense = next((row for row in rows if row["name"].startswith("full precision")), None)
    for row in rows:
        accuracies = [curve[-1][2] for curve in row["curves"]]
        # The median over the seeds at each look, so that one lucky look of one seed does not decide.
        middle = [(points[0][0], median(p[2] for p in points)) for points in zip(*row["curves"], strict=True)]
        wanted = min(c[-1][2] for c in dense["curves"]) if dense else None
        at = next((step for step, value in middle if wanted is not None and value >= wanted), None)
        row["epochs_to_full_precision"] = None if at is None else at / epoch
        shown.append([
            row["name"], f"{row['accuracy']:.2%}", f"{min(accuracies):.2%}-{max(accuracies):.2%}", f"{row['loss']:.4f}",
            "not reached" if at is None else f"{at / epoch:.2f}",
        ])  # fmt: skip
    head = ["contender, best rate", "accuracy", "range", "loss", "epochs to full precision's"]
    text = f"{task.data}, {here.size} workers, {options.steps / epoch:.1f} epochs, {options.seeds} seeds"
    experiment.finish(f"{text}\n{table(head, shown)}", rows)


def best_rates(runs):
    """Return of each contender the runs at the rate with the lowest median loss at the end."""
    best = {}
    for name, found in runs.items():
        key = name.rpartition(", rate")[0]
        loss = median(run["curve"][-1][1] for run in found)
        if key not in best or loss < best[key][0]:
            best[key] = (loss, name, found)
    return {name: found for _, name, found in best.values()}


if __name__ == "__main__":
    main()
