"""What is computed from statistics: from arrays to values, no files. docs/report.md has the formulas.

A value that cannot be had (a division by nothing) is None, never NaN.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

#: Larger amounts than this are no amounts: more than an exabyte, or than thirty billion years.
LARGEST = 1e18


def clean(values: Any) -> tuple[Any, int]:
    """Return amounts as float64, with those that make no sense as 0, and how many those were. Not in place."""
    amounts = np.asarray(values, np.float64)
    sound = np.isfinite(amounts) & (amounts >= 0) & (amounts <= LARGEST)
    return np.where(sound, amounts, 0.0), int(amounts.size - np.count_nonzero(sound))


def ratio(a: float, b: float) -> float | None:
    """Return a/b, None where there is no such number."""
    if not (math.isfinite(a) and math.isfinite(b)) or b == 0:
        return None
    quotient = a / b
    return quotient if math.isfinite(quotient) else None


class Efficiency(NamedTuple):
    """How well ranks use their time, as POP defines it; each between 0 and 1, None where nothing was measured.

    `load_balance` is mean over maximum of the ranks' useful seconds, `communication` that maximum over the runtime,
    `parallel` their product: the mean of useful seconds over the runtime.
    """

    load_balance: float | None
    communication: float | None
    parallel: float | None


def useful(seconds: Any, exposed: Any) -> Any:
    """Return the seconds that ranks computed: what steps took without the communication that was not hidden."""
    return np.maximum(np.asarray(seconds, np.float64) - np.asarray(exposed, np.float64), 0.0)


def hidden(communication_s: float, exposed_s: float) -> float | None:
    """Return the share of communication that ran behind computing; None where there was no communication."""
    share = ratio(exposed_s, communication_s)
    return None if share is None else max(0.0, 1 - share)


def efficiency(useful_s: Any, runtime_s: float) -> Efficiency:
    """Return POP's efficiencies from every rank's useful seconds and the run's seconds."""
    if len(useful_s) == 0:
        return Efficiency(None, None, None)
    most, mean = float(np.max(useful_s)), float(np.mean(useful_s))
    return Efficiency(ratio(mean, most), ratio(most, runtime_s), ratio(mean, runtime_s))


def imbalance(values: Any) -> float | None:
    """Return by how much the largest exceeds the mean, as a share of the mean."""
    if len(values) == 0:
        return None
    most = ratio(float(np.max(values)), float(np.mean(values)))
    return None if most is None else most - 1


def bus_factor(operation: str, size: int) -> float | None:
    """Return what nccl-tests multiply bytes per second with to get bus bandwidth, None for what they do not test.

    Bytes are those that each rank contributes: to an all-gather only its own part of the result.
    """
    if size < 1:
        return None
    factors = {
        "allreduce": 2 * (size - 1) / size,
        "reduce_scatter": (size - 1) / size,
        "allgather": float(size - 1),
        "broadcast": 1.0,
    }
    return factors.get(operation)


class Waiting(NamedTuple):
    """Who waits most and who is waited for, as indices of the arrays."""

    most: int
    share: float
    slowest: int


def waiting(waiting_s: Any, communication_s: Any) -> Waiting | None:
    """Return whose communication is waiting for the largest share, and who waits least: the one the others wait for."""
    shares = [ratio(a, b) for a, b in zip(waiting_s, communication_s, strict=True)]
    known = [(share, index) for index, share in enumerate(shares) if share is not None]
    if len(known) < 2:
        return None
    share, most = max(known, key=lambda one: (one[0], -one[1]))
    slowest = min(known)[1]
    return None if share == 0 or slowest == most else Waiting(most, share, slowest)


def at(x: Any, y: Any, limit: float) -> float | None:
    """Return y where x is `limit`, on a curve whose x never falls: interpolated, None outside or where y is unknown."""
    xs, ys = np.asarray(x, np.float64), np.asarray(y, np.float64)
    known = np.isfinite(xs) & np.isfinite(ys)
    xs, ys = xs[known], ys[known]
    # A sum of the same numbers in another order may fall short by a rounding.
    if len(xs) == 0 or not xs[0] * (1 - 1e-9) <= limit <= xs[-1] * (1 + 1e-9):
        return None
    return float(np.interp(limit, xs, ys))


def bins(n: int, most: int) -> Any:
    """Return to which of at most `most` bins each of n things in a row belongs; bins as even as can be."""
    count = min(n, most)
    return np.arange(n) * count // n if n else np.zeros(0, np.intp)


def bin_means(values: Any, indices: Any) -> Any:
    """Return the mean of each bin, of the numbers that are finite; NaN where there is none."""
    amounts = np.asarray(values, np.float64)
    count = int(indices[-1]) + 1 if len(indices) else 0
    known = np.isfinite(amounts)
    sums = np.bincount(indices[known], amounts[known], count)
    numbers = np.bincount(indices[known], minlength=count)
    return np.where(numbers > 0, sums / np.maximum(numbers, 1), np.nan)
