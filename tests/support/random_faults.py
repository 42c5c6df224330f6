"""Jobs in which ranks are lost at random: every method in turn, every point of a step, until one rank is left."""

from __future__ import annotations

import random

#: Steps between two exchanges, where that is not 1.
PERIOD = 3
#: Steps that a job trains by each method.
STEPS = 12
#: Points of a step at which a rank may be lost anywhere.
POINTS = ("exchange", "status", "decision", "segment", "step", "commit")

Fault = tuple[int, int, str]


def jobs(methods: dict[str, bool], kills: int, ranks: int, seed: int) -> list[list[tuple[str, list[Fault]]]]:
    """Return jobs of `ranks` ranks in which at least so many are lost: methods in turn, with their faults.

    Parameters
    ----------
    methods : dict of str to bool
        By name, whether a method exchanges in every step.
    """
    draws = random.Random(seed)
    order = [name for name in methods for _ in range(1 + kills // len(methods))]
    draws.shuffle(order)
    points: list[str] = []
    made: list[list[tuple[str, list[Fault]]]] = []
    lost = 0
    while lost < kills:
        left, job = ranks, []
        while left > 1:
            name = order.pop()
            order.insert(0, name)
            if not points:
                points = draws.sample(POINTS, len(POINTS))
            faults = _faults(draws, name, methods[name], left, points.pop())
            job.append((name, faults))
            left -= len(faults)
        made.append(job)
        lost += ranks - left
    return made


def _faults(draws: random.Random, name: str, every_step: bool, ranks: int, point: str) -> list[Fault]:
    if point == "commit" and name == "SASG":
        # Whether the others know of it when they look for news is chance.
        point = "decision"
    if every_step:
        steps = range(1, STEPS - 1)
        if point == "commit":
            # Nor when they average residuals.
            steps = [t for t in steps if (t + 2) % PERIOD]
    else:
        # "commit" comes first where all have met: in a round.
        steps = range(PERIOD - 1, STEPS - 1, PERIOD)
    step = draws.choice(steps)
    first = draws.randrange(ranks)
    others = [rank for rank in range(ranks) if rank != first]
    faults = [(first, step, point)]
    # Two at once, or the second while the others meet or do the step again.
    if len(others) > 1 and point not in ("commit", "step") and draws.random() < 0.3:
        faults.append((draws.choice(others), step, draws.choice((point, "shrink", "again"))))
    return faults
