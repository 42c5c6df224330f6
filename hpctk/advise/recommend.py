"""Which way to take: the one that changes training least, unless another is faster by enough to be worth it.

The arithmetic knows seconds, not losses. So it goes from the ways that change nothing to those that change most, and
goes on only while more than `LITTLE` of a step is lost to the network, or to avoiding it, and only to ways that make
the step shorter by `WORTH`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpctk.advise.predict import Prediction, fastest

#: A way that changes training more must make the step this much shorter; one of which little travels in a round, which
#: needed up to twice the samples where that was measured, by change:
WORTH, MORE = 1.25, {4: 2.0}
#: A way that loses less than this part of its step to the network, or to avoiding it, has nothing left to save.
LITTLE = 0.15
#: Ways within this factor of the fastest are equals: the preferred one, which stands first, is taken.
EQUALS = 1.05
#: What the arithmetic leaves out.
UNKNOWN = (
    "convergence: a step is not progress. Compare the loss on held-out data at equal samples before you rely on it",
    "the learning rate: each method may want another",
    "ranks that are slower than others, and a network that is used by others, too",
)


@dataclass(frozen=True)
class Advice:
    """What to do, and why."""

    choice: Prediction
    verdict: str
    reasons: tuple[str, ...]


def recommend(predictions: Sequence[Prediction]) -> Advice:
    """Return what to take among predictions of one question."""
    best = fastest(predictions)
    groups = sorted({(entry.change, entry.period) for entry in best})
    chosen = baseline = _first_of_equals([entry for entry in best if entry.change == 0])
    reasons = [_spent(baseline)]
    for change, period in groups:
        if lost(chosen, baseline) <= LITTLE:
            share = lost(chosen, baseline)
            reasons.append(f"{chosen.name} loses {share:.0%} of its step to the network: there is little left to save")
            break
        trusted = [e for e in best if (e.change, e.period) == (change, period) and not e.caveat and e.change > 0]
        if not trusted:
            continue
        candidate = _first_of_equals(trusted)
        gain = chosen.seconds / candidate.seconds
        worth = MORE.get(change, WORTH)
        if gain >= worth:
            reasons.append(f"{candidate.name} makes the step {gain:.2f} times shorter than {chosen.name}")
            chosen = candidate
        else:
            reasons.append(
                f"{candidate.name} would make it {gain:.2f} times shorter than {chosen.name}: "
                f"less than the {worth:g} that a change of training should bring"
            )
    return Advice(chosen, _verdict(chosen, baseline), tuple(reasons))


def _first_of_equals(entries: Sequence[Prediction]) -> Prediction:
    least = min(entry.seconds for entry in entries)
    return next(entry for entry in entries if entry.seconds <= EQUALS * least)


def _spent(baseline: Prediction) -> str:
    share = baseline.exposed_s / baseline.seconds
    return f"{baseline.name} waits for the network for {share:.0%} of its step"


def lost(entry: Prediction, baseline: Prediction) -> float:
    """Return the part of a step that is spent on waiting for the network, and on computing to wait less."""
    return (entry.exposed_s + max(0.0, entry.local_s - baseline.local_s)) / entry.seconds


def _verdict(chosen: Prediction, baseline: Prediction) -> str:
    if chosen.change == 0:
        return f"do not compress here: {chosen.name}"
    gain = baseline.seconds / chosen.seconds
    if chosen.change == 1:
        return f"send 16 bits, and compress no further: {chosen.name}, {gain:.1f} times as fast a step"
    return f"{chosen.name}, {gain:.1f} times as fast a step as {baseline.name}"
