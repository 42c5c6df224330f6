"""Real training to a target, by every method, on links of a known rate: does it pay?

Start it with `./launch/bench train`; it runs as an MPI job on the emulated cluster or in shared memory. The clock and
the interface's counters are stopped while a model is judged on held-out data; links are measured before each run; the
learning rate of every method is searched on one grid with one budget; seeds take turns. What was measured is kept after
each run, and a job that is started again goes on from there. `./launch/bench report` makes pages of the results.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import _rig
import torch
from _training import contenders, forecast, results, tasks
from _training.run import train

from hpctk.cli.core.table import bytes_text, seconds_text, table
from hpctk.comm.world import world


def parsed():
    parser = argparse.ArgumentParser(prog="launch/bench train", description=__doc__.splitlines()[0])
    parser.add_argument("--task", default="mlp", choices=tasks.TASKS)
    parser.add_argument("--methods", default=None, help=f"with commas; known are {', '.join(contenders.NAMES)}")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--target", type=float, help="accuracy to rise to (mlp, cnn), loss to fall to (lstm, transformer)"
    )
    parser.add_argument("--steps", type=int, default=600, help="a run ends after so many [600]")
    parser.add_argument("--max-seconds", type=float, default=300.0, help="or at the first look after so many [300]")
    parser.add_argument("--every", type=int, default=16, help="steps between two looks at held-out data [16]")
    parser.add_argument("--rates", default="0.5,1,2", help="grid, as multiples of the task's rate [0.5,1,2]")
    parser.add_argument("--search-steps", type=int, default=64, help="of each rate of each method [64]")
    parser.add_argument(
        "--search-from", type=Path, metavar="FILE",
        help="take the rates that another result of this task found: links change seconds, no loss",
    )  # fmt: skip
    parser.add_argument("--data", help="folder of Fashion-MNIST, or a text file")
    parser.add_argument("--output", type=Path, help="where results are kept [benchmarks/results/TASK-HOSTS-RATE.json]")
    parser.add_argument("--fresh", action="store_true", help="begin anew where results are there already")
    parser.add_argument(
        "--predict", action="store_true", help="calibrate, and put hpctk advise's step beside the measured"
    )
    parser.add_argument("--quick", action="store_true", help="three methods, one seed, two rates: under 5 minutes")
    parser.add_argument("--tiny", action="store_true", help="a model and data that say nothing, for tests")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a row for each contender to FILE")
    options = parser.parse_args()
    if options.quick:
        options.methods = options.methods or ",".join(contenders.QUICK)
        options.seeds, options.rates = 1, "1,2"
        options.search_steps, options.max_seconds = min(32, options.search_steps), min(40.0, options.max_seconds)
    options.methods = (options.methods or ",".join(contenders.DEFAULT)).split(",")
    unknown = [name for name in options.methods if name not in contenders.NAMES]
    if unknown:
        parser.error(f"--methods {','.join(unknown)}: known are {', '.join(contenders.NAMES)}")
    try:
        options.rates = [float(word) for word in options.rates.split(",")]
    except ValueError:
        parser.error(f"--rates {options.rates}: need numbers with commas between them")
    if min(options.seeds, options.steps, options.every, options.search_steps, *options.rates) <= 0:
        parser.error("--seeds, --steps, --every, --search-steps and --rates: need numbers above 0")
    return options


def main() -> None:
    options = parsed()
    here = world()
    torch.set_num_threads(1)
    _rig.start_gloo(here)
    report = _rig.reporter(here)
    task = tasks.make(options.task, options.data, tiny=options.tiny)
    if options.target is not None:
        task.target = options.target
    link = os.environ.get("HPCTK_CLUSTER_RATE", "none")
    settings = {
        "task": options.task, "tiny": options.tiny, "hosts": here.size, "nodes": len(here.nodes), "rate": link,
        "bits_per_second": _rig.bits_per_second(link), "metric": task.metric, "target": task.target,
        "batch_of_a_rank": task.batch, "steps": options.steps, "max_seconds": options.max_seconds,
        "every": options.every, "rates": [task.rate * factor for factor in options.rates],
        "search_steps": options.search_steps,
    }  # fmt: skip
    params = sum(p.numel() for p in task.make_model().parameters())
    path = (
        options.output or results.FOLDER / f"{options.task}-{here.size}-{link}{'-quick' if options.quick else ''}.json"
    )

    def first():
        try:
            made = results.begin(path, settings, params, task.data, fresh=options.fresh)
            if options.search_from is not None:
                results.take_search(made, options.search_from)
            return made
        except (OSError, ValueError) as error:
            sys.exit(f"bench: {error}")

    document = here.run_on_root("reading the results", first)

    def keep():
        if here.rank == 0:
            document["summary"] = results.summary(document, list(contenders.NAMES))
            results.keep(path, document)

    limits = {"every": options.every, "bits_per_second": settings["bits_per_second"]}
    report(f"{task.name}, {params:,} parameters, {task.data}, {_rig.where(here)}; target {task.metric} {task.target:g}")
    search(here, task, options, document, keep, limits)
    compete(here, task, options, document, keep, limits)
    if options.predict:
        predict(here, document)
        keep()
    if here.rank == 0:
        print(shown(document, task, here))
        print(f"kept in {path}")
        rows = [row for row in document["summary"] if row["name"] in options.methods]
        _rig.write(options.json, rows)
    here.barrier("the end of the benchmark")


def done(entries, **wanted):
    return any(all(entry[key] == value for key, value in wanted.items()) for entry in entries)


def search(here, task, options, document, keep, limits):
    """Try every rate with every method, equally long, on a seed of its own. Collective."""
    report = _rig.reporter(here)
    grid = [(task.rate * factor, name) for factor in options.rates for name in options.methods]
    for place, (rate, name) in enumerate(grid):
        if done(document["search"], method=name, rate=rate):
            continue
        found = train(
            here, task, name, rate=rate, seed=999, steps=options.search_steps, to_target=False,
            **{**limits, "every": options.search_steps},
        )  # fmt: skip
        document["search"].append(found)
        keep()
        told = "failed" if found["loss"] is None else f"loss {found['loss']:.3g}, accuracy {found['accuracy']:.1%}"
        report(f"search {place + 1} of {len(grid)}: {name}, rate {rate:g}: {told}, {found['seconds']:.1f} s")


def compete(here, task, options, document, keep, limits):
    """Let all methods run to the target, seed after seed. Collective."""
    report, warm = _rig.reporter(here), set()
    runs = [(seed, name) for seed in range(options.seeds) for name in options.methods]
    for place, (seed, name) in enumerate(runs):
        rate = results.chosen_rate(document, name, task.metric)
        if rate is None or done(document["runs"], method=name, seed=seed):
            continue
        if name not in warm:
            # The first steps of a process make room and compile: of a job that is resumed, too.
            train(here, task, name, rate=rate, seed=999, steps=2, to_target=False, **limits)
            warm.add(name)
        found = train(
            here, task, name, rate=rate, seed=seed, steps=options.steps, to_target=True,
            max_seconds=options.max_seconds, **limits,
        )  # fmt: skip
        document["runs"].append(found)
        keep()
        end = "reached" if found["reached"] else "missed"
        report(
            f"run {place + 1} of {len(runs)}: {name}, seed {seed}: target {end} after {found['steps']} steps, "
            f"{found['seconds']:.1f} s, {1e3 * found['step_s']:.0f} ms a step"
        )


def predict(here, document):
    """Calibrate, and put what `hpctk advise` predicts beside the measured steps. Collective."""
    from hpctk.advise.local_work import into_calibration
    from hpctk.advise.measure import measure
    from hpctk.collectives.tuning.calibrate import calibrate

    report = _rig.reporter(here)
    text = into_calibration(calibrate(here, report).to_json(), measure(here, report))
    if here.rank == 0:
        document["calibration"] = json.loads(text)
        document["summary"] = results.summary(document, list(contenders.NAMES))
        forecast.foretell(document)
        if not document["predictions"]:
            report("no predictions: they need --methods alone,... for the step without a network")


def shown(document, task, here):
    """Return the table of a set-up, the shortest time to target first."""
    rows = []
    for row in sorted(document["summary"], key=lambda row: (row["to_target_s"] is None, row["to_target_s"] or 0)):
        spread = row["to_target_range_s"]
        rows.append(
            [
                row["name"],
                "missed" if row["to_target_s"] is None else f"{row['to_target_s']:.1f} s",
                f"{spread[0]:.1f}-{spread[1]:.1f}" if spread else "",
                f"{row['reached']}/{row['seeds']}",
                seconds_text(row["seconds"]),
                f"{row['samples']:.0f}",
                "" if row["wire_bytes"] is None else bytes_text(row["wire_bytes"]),
                "" if row["account_bytes"] is None else bytes_text(row["account_bytes"]),
                f"{row['rate']:g}",
            ]
        )
    head = ["method", "to target", "range", "reached", "step", "samples", "on the wire", "by our account", "rate"]
    text = f"{task.name}, {document['params']:,} parameters, {here.size} ranks, {_rig.where(here)}, "
    text += f"target {task.metric} {task.target:g}\n{table(head, rows)}"
    if document["predictions"]:
        found = [
            [p["name"], seconds_text(p["measured_s"]), seconds_text(p["predicted_s"]), f"{p['ratio']:.2f}"]
            for p in document["predictions"]
        ]
        text += f"\n\n{table(['a step', 'measured', 'predicted', 'ratio'], found)}"
    return text


if __name__ == "__main__":
    main()
