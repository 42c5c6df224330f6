"""One run: train until the target is reached, with the clock and the counters stopped while the model is judged."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from .contenders import Contender


class Clock:
    """Seconds and bytes of what lies between `start` and `stop`; the same seconds on all ranks, of the slowest."""

    def __init__(self, here):
        self._here = here
        self.seconds, self.wire_bytes = 0.0, 0
        self._began, self._sent = 0.0, 0

    def start(self):
        self._here.barrier("bench")
        self._sent, self._began = sent_bytes(), time.perf_counter()

    def stop(self):
        spent = round((time.perf_counter() - self._began) * 1e9)
        self.wire_bytes += sent_bytes() - self._sent
        self.seconds += -self._here.minimum([-spent], "bench")[0] / 1e9


def sent_bytes():
    """Return what this host's interface has sent so far; 0 where ranks share memory, and use none."""
    if "HPCTK_CLUSTER_RATE" not in os.environ:
        return 0
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, columns = line.partition(":")
        if name.strip() == "eth0":
            return int(columns.split()[8])
    return 0


def link_rate(here, bits_per_second):
    """Return the bits per second that the slowest rank sends to its neighbour, all at once. Collective."""
    if here.size == 1:
        return None
    # A quarter of a second on a limited link: far more than its bucket holds.
    n = int(min(2**24, max(2**18, (bits_per_second or 1e9) / 8 / 4)))
    out, got = torch.zeros(n, dtype=torch.uint8), torch.empty(n, dtype=torch.uint8)
    rates = []
    for _ in range(2):
        here.barrier("bench")
        began = time.perf_counter()
        right, left = (here.rank + 1) % here.size, (here.rank - 1) % here.size
        sending, receiving = dist.isend(out, right), dist.irecv(got, left)
        sending.wait()
        receiving.wait()
        spent = round((time.perf_counter() - began) * 1e9)
        rates.append(8e9 * n / -here.minimum([-spent], "bench")[0])
    return rates[-1]


def judged(here, task, contender):
    """Return loss and accuracy on the held-out samples, of all ranks together. Collective."""
    with contender.evaluated():
        sums = task.verdict(contender.model, here.rank, here.size)
    dist.all_reduce(sums)
    return float(sums[0] / sums[2]), float(sums[1] / sums[2])


def train(here, task, name, *, rate, seed, steps, every, bits_per_second, to_target, max_seconds=float("inf")):
    """Return what became of one run. Collective.

    It ends where the target is reached (`to_target`), after `steps` steps, or at the first look after `max_seconds`.
    """
    link = link_rate(here, bits_per_second)
    torch.manual_seed(seed)
    contender = Contender(name, here, task, task.make_model(), rate)
    clock, curve, spans, done, reached = Clock(here), [], [], 0, False
    began, judging_bytes = time.time(), 0
    while done < steps and not reached and clock.seconds < max_seconds:
        clock.start()
        count = min(every, steps - done)
        for _ in range(count):
            contender.step(seed, done)
            done += 1
        before = clock.seconds
        clock.stop()
        spans.append((clock.seconds - before) / count)
        trained_bytes = contender.account_bytes
        loss, accuracy = judged(here, task, contender)
        # Averaging the models to judge them is no part of training.
        judging_bytes += (contender.account_bytes or 0) - (trained_bytes or 0)
        if not torch.isfinite(torch.tensor(loss)):
            break
        curve.append([done, clock.seconds, loss, accuracy])
        reached = to_target and task.reached(loss, accuracy)
    sent = -here.minimum([-clock.wire_bytes], "bench")[0]
    found = {
        "method": name,
        "rate": rate,
        "seed": seed,
        "began": began,
        "link_bits_per_second": link,
        "reached": bool(reached),
        "steps": done,
        "samples": done * task.batch * here.size,
        "seconds": clock.seconds,
        # The first look has the steps that make room and compile.
        "step_s": median(spans[1:] or spans),
        "wire_bytes": sent or None,
        "account_bytes": None if contender.account_bytes is None else contender.account_bytes - judging_bytes,
        "loss": curve[-1][2] if curve else None,
        "accuracy": curve[-1][3] if curve else None,
        "curve": curve,
    }
    contender.close()
    del contender
    gc.collect()
    return found
