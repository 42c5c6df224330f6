"""CELGC against naive parallel clipping on an LSTM language model, periods 2 to 32, at equal steps.

Start it with `./launch/bench paper/celgc`, on 4 ranks. The authors: 8 workers, LSTM language models on Penn
Treebank and WikiText-2, lr 30, clip 7.5: CELGC matches the naive baseline per epoch, in 1/16 of the rounds at period
16. Scaled down: an LSTM on bytes (`--data` names a text, such as WikiText-2's; Python's manual otherwise), plain SGD.
The rate is searched among 2, 4 and 8, with the same budget for each contender; clip is a quarter of it, as theirs.
"""

from __future__ import annotations

import math
from functools import partial
from statistics import median

import _experiment
import torch
from _training import tasks

import hpctk
from hpctk.cli.core.table import table

RATES, BATCH, PERIODS = (2.0, 4.0, 8.0), 8, (2, 4, 8, 16, 32)


def contenders():
    """Return what competes, by name: a method and a rate."""
    made = {}
    for rate in RATES:
        made[f"naive clipping, rate {rate:g}"] = (hpctk.Mean(clip=rate / 4), rate)
        for period in PERIODS:
            made[f"CELGC, period {period}, rate {rate:g}"] = (hpctk.CELGC(clip=rate / 4, period=period), rate)
    return made


def main():
    options = _experiment.parsed(__doc__, steps=640, every=160, seeds=3)
    experiment = _experiment.Experiment("celgc", options, rates=list(RATES))
    here = experiment.here
    task = tasks.make("lstm", options.data, tiny=options.tiny)
    task.make_model = partial(tasks.Lstm, 32 if options.tiny else 160)
    task.batch = BATCH
    runs = experiment.run_all(
        contenders(),
        lambda contender, seed: _experiment.follow(
            here, task, contender[0], partial(torch.optim.SGD, lr=contender[1]), seed=seed, steps=options.steps,
            every=options.every,
        ),
    )  # fmt: skip
    best = {}
    for name, found in runs.items():
        key, loss = name.rpartition(", rate")[0], median(run["curve"][-1][1] for run in found)
        if math.isfinite(loss) and (key not in best or loss < best[key][0]):
            best[key] = (loss, name, found)
    naive = best.get("naive clipping")
    rows, shown = [], []
    for loss, name, found in best.values():
        perplexities = [math.exp(run["curve"][-1][1]) for run in found]
        row = {"name": name, "seconds": median(run["seconds"] for run in found), "perplexity": math.exp(loss)}
        row["of_naive"] = math.exp(loss - naive[0]) if naive else None
        rows.append(row)
        period = int(name.split("period ")[1].split(",")[0]) if "period" in name else 1
        shown.append([
            name, f"{row['perplexity']:.4f}", f"{min(perplexities):.4f}-{max(perplexities):.4f}",
            f"{row['of_naive']:.4f}" if naive else "", f"1/{period}",
        ])  # fmt: skip
    head = ["contender, best rate", "perplexity per byte", "range", "/ naive", "rounds"]
    text = f"{task.data}, LSTM on bytes, {here.size} workers, {options.steps} steps, {options.seeds} seeds"
    experiment.finish(f"{text}\n{table(head, shown)}", rows)


if __name__ == "__main__":
    main()
