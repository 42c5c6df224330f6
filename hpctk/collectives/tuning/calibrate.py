"""Measuring the machine: a minute at most on the user's own ranks.

Every schedule, MPI's own all-reduce and, on one node, that through shared memory run at several sizes, as users' calls
run them, interleaved, and the medians are kept.
The figures of the cost model come from the same runs:

- latency_s: an 8-byte recursive doubling, over its rounds;
- message_s: many small segments round a ring, over their number;
- byte_s: the ring, which has the network for itself in both directions, at the largest size;
- exchange_factor: halving-doubling, whose pairs talk both ways at once, at the largest size;
- combine_byte_s: adding two arrays on this rank;
- segment_bytes, sends: the best of three for ring and halving-doubling, with which all plans are measured then;
- part_sends: the best of three for rotation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from hpctk.collectives.allreduce import reduce_in_place
from hpctk.collectives.engine.elements import InPlace
from hpctk.collectives.engine.engine import engine_of
from hpctk.collectives.tuning.calibration import Calibration, Points, layout_of
from hpctk.comm.buffers import DTYPES
from hpctk.comm.world import World
from hpctk.schedules import Plan, build, recursive_doubling, ring, rotation
from hpctk.schedules.core.registry import HIERARCHICAL, SHARED_MEMORY, names
from hpctk.schedules.cost.machine import Machine
from hpctk.schedules.cost.prices import price, site

SIZES = (8, 4096, 32768, 262144, 2**21, 2**24)
#: One more on one node, where what does not fit into the caches is another matter.
BEYOND_CACHES = 2**26
#: From this many bytes the model is held against the measurements.
LARGE = 2**18
#: The largest size is the first whose ring takes longer than this.
LONG_S = 0.25
REPEATS = 5
#: Seconds after which one thing that is measured is repeated no more: on slow links two rounds must do.
ENOUGH_S = 8.0
#: What is tried, on tensors of PROBE_BYTES; another than the first, the default, must take less than WORTH of its time.
SEGMENTS = (Machine().segment_bytes, 4 * Machine().segment_bytes, 16 * Machine().segment_bytes)
SENDS = (Machine().sends, 8, 64)
PART_SENDS = (Machine().part_sends, 4, 24)
PROBE_BYTES = 2**22
WORTH = 0.93
Report = Callable[[str], None]


def calibrate(here: World, report: Report = lambda line: None) -> Calibration:
    """Measure and return the calibration, the same on every rank. Collective over the communicator."""
    plans = [build(name, "allreduce", here.size, nodes=here.nodes) for name in names("allreduce", with_nodes=True)]
    measured: dict[str, list[tuple[int, float]]] = {"mpi": [], **{plan.name: [] for plan in plans}}
    if here.shares_memory and here.shared_window() is not None:
        measured[SHARED_MEMORY] = []
    report("the length of messages, and how many are under way")
    run_by = engine_figures(here)
    for nbytes in [*SIZES, BEYOND_CACHES] if here.shares_memory else SIZES:
        report(f"all-reduces of {nbytes} bytes")
        for name, seconds in measure(here, plans, nbytes, run_by).items():
            measured[name].append((nbytes, seconds))
        if measured["ring"][-1][1] > LONG_S:
            break
    points: dict[str, Points] = {name: tuple(row) for name, row in measured.items()}
    report("latency, messages, adding")
    machine = replace(figures(here, points), **run_by)
    inside = site(machine, here.nodes)
    factors = {
        plan.name: tuple(
            (nbytes, s / price(plan, nbytes, inside)) for nbytes, s in points[plan.name] if nbytes >= LARGE
        )
        for plan in plans
        if here.size > 1
    }
    return Calibration(machine, factors, layout_of(here.nodes), points)


def engine_figures(here: World) -> dict[str, int]:
    """Return what the engine runs plans by, of Machine's figures. Collective over the communicator.

    A ring likes long messages on most networks; pairs that send to each other at once lose half of their speed by them
    over TCP. So both decide.
    """
    plans = [ring.allreduce(here.size), build("halving_doubling", "allreduce", here.size)]
    segment_bytes = best_value(here, plans, "segment_bytes", SEGMENTS)
    return {
        "segment_bytes": segment_bytes,
        "sends": best_value(here, plans, "flight", SENDS, segment_bytes=segment_bytes),
        "part_sends": best_value(
            here, [rotation.allreduce(here.size)], "flight", PART_SENDS, segment_bytes=segment_bytes
        ),
    }


def best_value(here: World, plans: list[Plan], name: str, values: Sequence[int], **settings: int) -> int:
    """Return the value of a setting of the engine's to use: another than the first only where all plans gain by it.

    Collective over the communicator.
    """
    if here.size == 1:
        return values[0]
    array, engine = np.zeros(PROBE_BYTES // 4, np.float32), engine_of(here)
    times: dict[tuple[int, int], list[float]] = {(i, value): [] for i in range(len(plans)) for value in values}
    for _ in range(REPEATS):
        for i, value in times:
            run = partial(engine.run, plans[i], InPlace(array, 4, "float32"), **{**settings, name: value})
            times[i, value].append(timed(here, run))
        if enough(times.values()):
            break
    # The same on every rank: the times are those of the slowest.
    gains = {n: max(median(times[i, n]) / median(times[i, values[0]]) for i in range(len(plans))) for n in values}
    best = min(gains, key=lambda n: gains[n])
    return best if gains[best] < WORTH else values[0]


def measure(here: World, plans: list[Plan], nbytes: int, run_by: Mapping[str, int]) -> dict[str, float]:
    """Return the median seconds of every plan and of MPI for one size, as the slowest rank saw it.

    `run_by` as `engine_figures` returns it. Collective over the communicator.
    """
    settings = {"segment_bytes": run_by["segment_bytes"], "flight": run_by["sends"]}
    array = np.zeros(max(1, nbytes // 4), np.float32)
    dtype = DTYPES["float32"]
    engine = engine_of(here)
    runs: dict[str, Callable[[], Any]] = {"mpi": partial(reduce_in_place, here, array, dtype, "sum", here.native.name)}
    if here.shares_memory and here.shared_window() is not None:
        runs[SHARED_MEMORY] = partial(reduce_in_place, here, array, dtype, "sum", SHARED_MEMORY)
    for plan in plans:
        if plan.name == HIERARCHICAL and here.nodes_share_memory:
            runs[plan.name] = partial(reduce_in_place, here, array, dtype, "sum", plan.name)
        else:
            runs[plan.name] = partial(engine.run, plan, InPlace(array, 4, "float32"), **settings)
    times: dict[str, list[float]] = {name: [] for name in runs}
    # Small ones come in a row: a single one would be lost in the noise of the barrier.
    count = 20 if nbytes < 2**16 else 1
    for _ in range(REPEATS + 1):
        for name, run in runs.items():
            times[name].append(timed(here, run, count))
        if enough(times.values(), count):
            break
    return {name: median(row[1:]) for name, row in times.items()}


def enough(times: Iterable[list[float]], count: int = 1) -> bool:
    """Return whether rounds have taken long enough, two of them at least.

    `times` are the seconds of each call, `count` of them in a round, and the same on all ranks.
    """
    rounds = list(times)
    return len(rounds[0]) > 1 and count * sum(map(sum, rounds)) > ENOUGH_S


def timed(here: World, run: Callable[[], Any], count: int = 1) -> float:
    """Return the seconds one `run` takes on the slowest rank. Collective over the communicator."""
    here.barrier("calibration")
    began = time.perf_counter()
    for _ in range(count):
        run()
    nanoseconds = round((time.perf_counter() - began) * 1e9)
    return -here.minimum([-nanoseconds], "calibration")[0] / 1e9 / count


def figures(here: World, points: dict[str, Points]) -> Machine:
    """Return the cost model's figures, the same on every rank. Collective over the communicator."""
    size = here.size
    if size == 1:
        return Machine()
    doubling = recursive_doubling.allreduce(size)
    latency_s = points[doubling.name][0][1] / doubling.volume.rounds
    message_s = message_seconds(here)
    combine_byte_s = combine_seconds(here)
    around = ring.allreduce(size)
    nbytes, seconds = points["ring"][-1]
    free = Machine(latency_s=latency_s, message_s=message_s, combine_byte_s=combine_byte_s, byte_s=0.0)
    # What latency and messages cost is hidden behind the bytes when segments follow each other closely.
    share = max(seconds - price(around, nbytes, free), 0.5 * seconds)
    byte_s = share / (around.volume.path / around.blocks * nbytes)
    factor = exchange_factor(here, points, free, byte_s)
    common = replace(Machine(), message_s=message_s, combine_byte_s=combine_byte_s)
    if len(here.nodes) == 1:
        # Nothing was learnt about a network: its figures stay as they are.
        return replace(common, local_latency_s=latency_s, local_byte_s=byte_s)
    return replace(common, latency_s=latency_s, byte_s=byte_s, exchange_factor=factor)


def exchange_factor(here: World, points: dict[str, Points], free: Machine, byte_s: float) -> float:
    """Return how much slower bytes are while two ranks send to each other; at least 1."""
    plan = build("halving_doubling", "allreduce", here.size)
    nbytes, seconds = points[plan.name][-1]
    per_block = nbytes / plan.blocks * byte_s
    exchanged = plan.volume.exchanged * per_block
    if exchanged == 0:
        return 1.0
    spent = seconds - price(plan, nbytes, free) - plan.volume.path * per_block
    return max(1.0, 1.0 + spent / exchanged)


def message_seconds(here: World) -> float:
    """Return the processor time of one small message. Collective over the communicator."""
    per_block, segment = 200, 256
    array = np.zeros(per_block * segment * here.size, np.uint8)
    plan = ring.allgather(here.size)
    engine = engine_of(here)
    times = [timed(here, lambda: engine.run(plan, InPlace(array, 1), segment_bytes=segment)) for _ in range(REPEATS)]
    return median(times) / (per_block * (here.size - 1))


def combine_seconds(here: World) -> float:
    """Return the time to add one byte to another on the slowest rank. Collective over the communicator."""
    one, other = np.ones(2**20, np.float32), np.ones(2**20, np.float32)
    times = [timed(here, lambda: np.add(one, other, out=one)) for _ in range(REPEATS)]
    return median(times) / one.nbytes
