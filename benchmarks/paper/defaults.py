"""Defaults that the papers leave open, by evidence: AdaCons's scale, SASG's alpha, density and reduce.

Start it with `./launch/bench paper/defaults`, on 4 ranks. Three small tasks: the digits and Fashion-MNIST by SGD with
momentum .9, text by an LSTM and AdamW. Each contender gets the same grid of rates; what it reaches with the best of
them is its result, what it reaches with plain averaging's best rate is what a user sees who changes one line.
"""

from __future__ import annotations

from functools import partial
from statistics import median

import _experiment
import torch
from _training import tasks

import hpctk
from hpctk.cli.core.table import table

FACTORS = (0.25, 1, 4)
METHODS = {
    "mean": hpctk.Mean(),
    "unit-norm mean": hpctk.Mean(unit_norm=True),
    "AdaCons mean_norm": hpctk.AdaCons(scale="mean_norm"),
    "AdaCons coefficients": hpctk.AdaCons(scale="coefficients"),
    "AdaCons unit": hpctk.AdaCons(scale="unit"),
    "SASG sum 1 %": hpctk.SASG(reduce="sum"),
    "SASG mean 1 %": hpctk.SASG(reduce="mean"),
    "SASG mean 10 %": hpctk.SASG(density=0.1, reduce="mean"),
    "SASG sum 10 % alpha 0.1": hpctk.SASG(density=0.1, alpha=0.1, reduce="sum"),
    "SASG mean 1 % alpha 0.1": hpctk.SASG(alpha=0.1, reduce="mean"),
    "SASG mean 10 % alpha 0.1": hpctk.SASG(density=0.1, alpha=0.1, reduce="mean"),
    "SASG mean 10 % alpha 1": hpctk.SASG(density=0.1, alpha=1.0, reduce="mean"),
    "SASG mean 10 % alpha 10": hpctk.SASG(density=0.1, alpha=10.0, reduce="mean"),
}


def small_tasks(options):
    """Return the tasks by name: a task, its rate, and an optimizer of a rate."""
    momentum = partial(torch.optim.SGD, momentum=0.9)
    made = {}
    for name, kind, rate, optimizer in (
        ("digits", "mlp", 0.05, momentum),
        ("fashion", "cnn", 0.02, momentum),
        ("text", "lstm", 4e-3, torch.optim.AdamW),
    ):
        task = digits() if name == "digits" else tasks.make(kind, options.data if name != "text" else None, tiny=True)
        if name == "fashion":
            whole = tasks.make(kind, options.data, tiny=options.tiny)
            task.inputs, task.targets = whole.inputs[:20000], whole.targets[:20000]
            task.test_inputs, task.test_targets = whole.test_inputs[:1000], whole.test_targets[:1000]
            task.make_model = partial(tasks.cnn, whole.inputs.shape[-1], 32)
        elif name == "text" and not options.tiny:
            whole = tasks.make(kind)
            task.inputs, task.targets = whole.inputs, whole.targets
            task.test_inputs, task.test_targets = whole.test_inputs[:100], whole.test_targets[:100]
            task.make_model = partial(tasks.Lstm, 96)
        made[name] = (task, rate, optimizer)
    return made


def digits():
    """Return the bundled digits as a task: a network of 17 thousand parameters."""
    from hpctk.tasks import digits

    parts = [x for part in digits.load() for x in (part.images.reshape(-1, 1, 8, 8), part.labels)]
    return tasks.Task("digits", "digits", partial(tasks.mlp, 64, 96), None, *parts, 16, 0.05, "accuracy", 0.9, 5.0)


def main():
    options = _experiment.parsed(__doc__, steps=240, every=240, seeds=3)
    experiment = _experiment.Experiment("defaults", options, factors=list(FACTORS))
    here, known = experiment.here, small_tasks(options)
    contenders = {
        f"{task}: {name}, rate x{factor:g}": (known[task], method, factor)
        for task in known
        for name, method in METHODS.items()
        for factor in FACTORS
    }
    runs = experiment.run_all(
        contenders,
        lambda one, seed: _experiment.follow(
            here, one[0][0], one[1], partial(one[0][2], lr=one[0][1] * one[2]), seed=seed,
            steps=options.steps, every=options.every,
        ),
    )  # fmt: skip
    rows, shown = [], []
    for task in known:
        found = {name: of_rates(runs, f"{task}: {name}") for name in METHODS}
        usual = best_of(found["mean"]) if found["mean"] else None
        for name, tried in found.items():
            if not tried:
                continue
            best = best_of(tried)
            losses = [end(run) for run in tried[best]]
            row = {
                "name": f"{task}: {name}",
                "seconds": median(run["seconds"] for run in tried[best]),
                "best_rate": best,
                "losses": losses,
                "losses_at_the_usual_rate": [end(run) for run in tried.get(usual, [])],
                "uploads": median(run["curve"][-1][3] for run in tried[best]),
            }
            rows.append(row)
            first = row["losses_at_the_usual_rate"]
            shown.append([
                row["name"], f"x{best:g}", f"{median(losses):.4g}", f"{min(losses):.4g}-{max(losses):.4g}",
                f"{median(first):.4g}" if first else "", f"{row['uploads']:.0f}",
            ])  # fmt: skip
    head = ["contender", "best rate", "loss", "range", "at plain averaging's rate", "uploads"]
    text = f"{here.size} workers, {options.steps} steps, {options.seeds} seeds; held-out loss"
    experiment.finish(f"{text}\n{table(head, shown)}", rows)


def of_rates(runs, name):
    """Return the runs of a contender by the factor of their rate."""
    return {factor: runs[key] for factor in FACTORS if (key := f"{name}, rate x{factor:g}") in runs}


def best_of(tried):
    """Return the factor with the lowest median loss at the end."""
    return min(tried, key=lambda factor: median(end(run) for run in tried[factor]))


def end(run):
    """Return the last held-out loss; infinite where the run blew up."""
    loss = run["curve"][-1][1]
    return float("inf") if loss is None or loss != loss else loss


if __name__ == "__main__":
    main()
