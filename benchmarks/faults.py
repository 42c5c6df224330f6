"""Training under a hail of faults: goodput, seconds from a kill to the next step that counts, and the state checked.

Jobs of `--ranks` ranks train by one method after the other with on_lost_rank="shrink"; every `--every` steps or so, at
any moment, one rank is killed (SIGKILL), now and then two at once or the second while the others meet. When one rank is
left it goes on to the end, and the next job begins. A row for each method: the median of the seconds from a kill to the
next step that counts on all that are left, the worst, and the goodput: the steps that count over those that as many
ranks would have done in the same time had none been killed. Survivors whose parameters differ, and jobs that hang, are
errors.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from contextlib import suppress
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from statistics import median

#: Seconds without a step after which a job hangs.
HANGS_S = 60.0
#: Seconds that the ranks of a job have to begin: where cores are few, Python and torch take their time.
BEGINS_S = 300.0
#: The methods by which is trained, as Python.
METHODS = {
    "Mean": "hpctk.Mean()",
    "Mean TopK": "hpctk.Mean(hpctk.TopK(0.05))",
    "AdaCons": "hpctk.AdaCons()",
    "EF21": "hpctk.EF21(hpctk.TopK(0.05))",
    "SAEF TopK": "hpctk.SAEF(hpctk.TopK(0.05))",
    "SAEF Sign": "hpctk.SAEF(hpctk.Sign(), server=hpctk.Sign())",
    "SASG": "hpctk.SASG(0.05)",
    "CELGC": "hpctk.CELGC(1.0, period=2)",
    "LocalSGD": "hpctk.LocalSGD(period=2)",
    "EPISODE": "hpctk.EPISODE(1.0, period=2)",
    "MGRAWA": "hpctk.MGRAWA(period=2)",
    "LGRAWA": "hpctk.LGRAWA(period=2)",
    "EASGD": "hpctk.EASGD(period=2)",
    "LSGD": "hpctk.LSGD(period=2)",
}


def train(method: str, folder: Path, width: int) -> None:
    """Be a rank: train until the file `stop` is there, and write down when each step counted and what came of it."""
    import torch

    import hpctk

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 10))
    base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    made = eval(method, {"hpctk": hpctk})
    opt = hpctk.DistributedOptimizer(base, made, model=model, on_lost_rank="shrink", check_every=1)
    world, name = opt.world, opt.world.rank
    generator = torch.Generator().manual_seed(name)
    x, y = torch.randn(64, 64, generator=generator), torch.randint(10, (64,), generator=generator)

    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    with (folder / f"{name}.log").open("w", buffering=1) as log:
        print("pid", os.getpid(), file=log)
        t = 0
        while True:
            opt.step(closure)
            shared = opt._run.shared_state()
            digest = 0
            for tensor in shared.values():
                digest = zlib.crc32(tensor.detach().contiguous().numpy().tobytes(), digest)
            print(t, time.monotonic(), digest, world.size, file=log)
            t += 1
            # All ranks together: they must do as many steps.
            stop = [0 if (folder / "stop").exists() else 1]
            if opt.together(lambda stop=stop: world.minimum(stop, "asking whether to stop")) == [0]:
                break
        print("end", time.monotonic(), 0, world.size, file=log)


class Job:
    """A job under way, as its ranks write it down."""

    def __init__(self, ranks: int, method: str, width: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="hpctk-faults-"))
        words = [sys.executable, __file__, "--rank", method, "--folder", str(self.folder), "--width", str(width)]
        command = [sys.executable, "-m", "hpctk", "mpirun", "--with-ft", "-n", str(ranks), *words]
        self.output = (self.folder / "output").open("w")
        self.process = subprocess.Popen(command, stdout=self.output, stderr=subprocess.STDOUT, start_new_session=True)
        self.alive = set(range(ranks))

    def lines(self, rank: int) -> list[list[str]]:
        """Return what a rank has written so far, whole lines only."""
        path = self.folder / f"{rank}.log"
        text = path.read_text() if path.exists() else ""
        return [line.split() for line in text.split("\n")[:-1]]

    def steps(self, rank: int) -> list[tuple[int, float, int]]:
        """Return the steps of a rank: number, when it counted, digest."""
        return [(int(t), float(s), int(d)) for t, s, d, _ in (x for x in self.lines(rank) if x[0].isdecimal())]

    def useful(self, rank: int) -> tuple[int, float]:
        """Return how many steps counted once ranks were killed, and how many would have, had none been killed.

        By as many ranks: where cores are few, fewer ranks are faster. A step takes what it takes in the median between
        two kills.
        """
        steps = [(float(s), int(size)) for _, s, _, size in (x for x in self.lines(rank) if x[0].isdecimal())]
        done, expected = 0, 0.0
        before = None
        for _, group in groupby(steps, key=itemgetter(1)):
            times = [s for s, _ in group]
            if before is not None and len(times) > 2:
                done += len(times)
                expected += (times[-1] - before) / median(b - a for a, b in pairwise(times))
            before = times[-1]
        return done, expected

    def pid(self, rank: int) -> int:
        """Return the process of a rank."""
        return int(self.lines(rank)[0][1])

    def until(self, what: str, condition, limit_s: float = HANGS_S) -> None:
        """Wait until a condition holds; an error where nothing happens for long."""
        deadline = time.monotonic() + limit_s
        while not condition():
            if self.process.poll() is not None:
                raise RuntimeError(f"the job has ended while {what}:\n{self.said()}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"the job hangs while {what}:\n{self.said()}")
            time.sleep(0.002)

    def said(self) -> str:
        """Return the end of what the job has printed."""
        return (self.folder / "output").read_text()[-3000:]

    def kill(self, ranks: list[int], apart_s: float) -> float:
        """Kill ranks; return when the last one was."""
        for rank in ranks:
            self.alive.discard(rank)
            os.kill(self.pid(rank), signal.SIGKILL)
            killed = time.monotonic()
            time.sleep(apart_s)
        return killed

    def next_step_s(self, killed: float) -> float:
        """Return how long after a kill a step without the lost ranks counted on all that are left."""
        left = len(self.alive)

        def first(rank: int) -> float | None:
            later = (float(x[1]) for x in self.lines(rank) if x[0].isdecimal() and int(x[3]) == left)
            return next((counted for counted in later if counted > killed), None)

        self.until("going on", lambda: all(first(rank) is not None for rank in self.alive))
        return max(first(rank) or 0.0 for rank in self.alive) - killed

    def divergent(self) -> int:
        """Return how many steps have left different state on two ranks."""
        digests: dict[int, set[int]] = {}
        for path in self.folder.glob("*.log"):
            for t, _, digest in self.steps(int(path.stem)):
                digests.setdefault(t, set()).add(digest)
        return sum(len(found) > 1 for found in digests.values())

    def end(self) -> None:
        """Let the ranks that are left end by themselves."""
        (self.folder / "stop").touch()
        try:
            self.process.wait(HANGS_S)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"the job does not end:\n{self.said()}") from None
        for rank in self.alive:
            if self.lines(rank)[-1][0] != "end":
                raise RuntimeError(f"rank {rank} did not come to the end:\n{self.said()}")

    def close(self) -> None:
        """End what is left of the job."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            # Ranks that outlive each other outlive mpirun, too.
            for rank in self.alive:
                with suppress(OSError, IndexError):
                    os.kill(self.pid(rank), signal.SIGKILL)
        self.output.close()


def hail(name: str, kills: int, options: argparse.Namespace, draws: random.Random) -> dict:
    """Train by one method while ranks are killed; return its row."""
    every = options.every
    seconds: list[float] = []
    useful, expected = 0, 0.0
    undisturbed: list[float] = []
    while len(seconds) < kills:
        job = Job(options.ranks, METHODS[name], options.width)
        try:
            # A few in any case: how long a step takes is known from them.
            job.until("beginning", lambda job=job: all(len(job.steps(r)) > max(every, 3) for r in job.alive), BEGINS_S)
            undisturbed += step_s(job.steps(0)[2:])
            while len(job.alive) > 1 and len(seconds) < kills:
                number = 2 if len(job.alive) > 2 and draws.random() < 0.2 else 1
                chosen = draws.sample(sorted(job.alive), number)
                time.sleep(draws.uniform(0, 2 * every * median(undisturbed)))
                killed = job.kill(chosen, draws.choice((0, 0.002, 0.01)) if number > 1 else 0)
                seconds += [job.next_step_s(killed)] * number
                print(f"bench: {name}: {len(seconds)} of {kills} killed", file=sys.stderr, flush=True)
            job.end()
            done, possible = job.useful(min(job.alive))
            useful, expected = useful + done, expected + possible
            apart = job.divergent()
            if apart:
                raise RuntimeError(f"{name}: {apart} steps left different state on two ranks, see {job.folder}")
        finally:
            job.close()
    return {
        "name": name,
        "seconds": median(seconds),
        "worst_s": max(seconds),
        "kills": len(seconds),
        "goodput": useful / expected if expected else None,
    }


def step_s(steps: list[tuple[int, float, int]]) -> list[float]:
    """Return the seconds between steps."""
    return [b[1] - a[1] for a, b in pairwise(steps)]


def main() -> None:
    """Run the benchmark, or be one of its ranks."""
    import _rig

    parser: argparse.ArgumentParser = _rig.parser(1, only=True)
    parser.add_argument("--kills", type=int, default=200, help="ranks to kill, over all methods [200]")
    parser.add_argument("--every", type=int, default=15, help="steps between two, in the mean [15]")
    parser.add_argument("--ranks", type=int, default=4, help="of each job [4]")
    parser.add_argument("--width", type=int, default=128, help="of the model's hidden layer [128]")
    parser.add_argument("--seed", type=int, default=0, help="of the moments [0]")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        train(options.rank, options.folder, options.width)
        return
    names = options.only.split(",") if options.only else list(METHODS)
    draws, rows = random.Random(options.seed), []
    for name in names:
        kills = max(1, -(-options.kills // len(names)))
        row = hail(name, kills, options, draws)
        rows.append(row)
        print(
            f"{name:<12} {row['kills']:>4} kills  next step after {row['seconds']:.3f} s, "
            f"at worst {row['worst_s']:.3f} s  goodput {row['goodput'] or math.nan:.2f}",
            flush=True,
        )
    _rig.write(options.json, rows)


if __name__ == "__main__":
    main()
