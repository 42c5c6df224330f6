"""What statistics cost: microseconds for each recorded call, and their share of a step of `digits`.

Start it with `./launch/bench recorder`. A call's cost is that of telling of it (recorder:off, the counters in memory
alone) and of recording it in a file (recorder:on: packing the row, counting its messages by peer, summing up, writing
and flushing, all of it, per call), in seconds of the processor. The share is calls in a step times the cost of a call
over the step's time.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

import _rig

import hpctk
from hpctk.cli.core.table import table
from hpctk.collectives.engine.engine import counted, engine_of
from hpctk.comm.world import world
from hpctk.tasks import task_class
from hpctk.tasks.core.recipes import recipes
from hpctk.tasks.core.train import Job
from hpctk.telemetry.recorder import Counter
from hpctk.telemetry.recording import Recording
from hpctk.telemetry.settings import StatsSettings

#: In `digits` at two ranks every second call is a flag, and the others have two messages each way: one on average.
MESSAGES = 1


def main() -> None:
    parser = _rig.parser(repeats=7)
    parser.add_argument("--epochs", type=int, default=2, help="of digits [2]")
    parser.add_argument("--calls", type=int, default=20_000, help="that are told of in a repeat [20000]")
    options = parser.parse_args()
    here = world()
    home = Path(here.run_on_root("making a folder", tempfile.mkdtemp))
    try:
        costs = call_costs(here, home, options.repeats, options.calls)
        steps = step_times(here, home, options.repeats, options.epochs)
    finally:
        here.barrier()
        if here.rank == 0:
            shutil.rmtree(home)
    if here.rank == 0:
        show(costs, *steps, options.json)


def call_costs(here, home, repeats, calls):
    """Return seconds per call, of the slowest rank: of telling the counters, and what files add to that."""
    engine = engine_of(here)
    # Of the size that keeps flushing to where it happens in real runs: by time, and when memory is used up.
    settings = StatsSettings(home / "calls", events=calls * (repeats + 1))
    path = home / f"calls-{here.rank}.h5"
    recording = Recording(path, settings, here.size, "bench", {"rank": here.rank, "size": here.size}, {})
    counter, peer = Counter(), (here.rank + 1) % here.size

    def tell(traffic) -> None:
        for _ in range(calls):
            call = engine.opened_array("allreduce", "ring", 1000, 4, own=1000)
            for one in traffic:
                for _ in range(MESSAGES):
                    one.outgoing[peer, 2000] += 1
                    one.incoming[peer, 2000] += 1
            call.sent_bytes = call.received_bytes = 4000
            engine.report(call)

    def off() -> None:
        with counted(here, counter):
            tell(())

    def on() -> None:
        with counted(here, counter, recording):
            tell([recording.traffic])
            recording.flush()

    seconds: dict[str, list[float]] = {"recorder:off": [], "recorder:on": []}
    for repeat in range(repeats + 1):
        for name, run in (("recorder:off", off), ("recorder:on", on)):
            here.barrier("bench")
            # Of the processor, not of the clock: what other programs take from this one is not the recorder's.
            began = time.process_time()
            run()
            spent = time.process_time() - began
            if repeat:
                seconds[name].append(spent)
    recording.close()
    # Neighbours in time are compared: a machine's speed may change from one second to the next.
    pairs = zip(seconds["recorder:on"], seconds["recorder:off"], strict=True)
    added = median(on - off for on, off in pairs)
    mine = {"recorder:off": median(seconds["recorder:off"]) / calls, "recorder:on": added / calls}
    return {name: -here.minimum([-round(1e12 * one)], "bench")[0] / 1e12 for name, one in mine.items()}


def step_times(here, home, repeats, epochs):
    """Return seconds of a step of `digits`, without files and with them, taking turns; and the calls in a step."""
    kind = task_class("digits")
    settings = kind.settings_class(method="mean", epochs=epochs)
    task = kind(settings)
    task.load()
    (recipe,) = recipes(settings, kind.recipes)
    times: dict[str, list[float]] = {"recorder:off": [], "recorder:on": []}
    calls = 0.0
    report = _rig.reporter(here)
    for repeat in range(repeats):
        report(f"digits, repeat {repeat + 1} of {repeats}")
        for name, row in times.items():
            stats = home / f"digits-{repeat}" if name == "recorder:on" else None
            ends = [time.perf_counter()]
            job = Job(here, task, recipe, None, stats)
            job.run(lambda _, ends=ends: ends.append(time.perf_counter()))
            job.close()
            row += [b - a for a, b in pairwise(ends[2:])]
            if stats is not None:
                mine = hpctk.stats.load(stats).recordings[0].ranks[here.rank]
                calls = float(mine.table("steps")["calls"].mean())
    return {name: median(row) for name, row in times.items()}, calls


def show(costs, steps, calls, target) -> None:
    entries = [
        {
            "name": name,
            "seconds": costs[name],
            "call_us": 1e6 * costs[name],
            "share": calls * costs[name] / steps[name],
            "step_us": 1e6 * steps[name],
            "calls_per_step": calls,
        }
        for name in costs
    ]
    rows = [[e["name"], f"{e['call_us']:.2f}", f"{100 * e['share']:.2f} %", f"{e['step_us']:.0f}"] for e in entries]
    print("recorder:off is what telling the counters costs; recorder:on what files add to that")
    print(table(["what", "us per call", "of a step", "us per step"], rows))
    _rig.write(target, entries)


if __name__ == "__main__":
    main()
