"""Ranges of indices that hold about equally many elements, from a few samples of every rank's list.

Gradients are not sparse evenly: an embedding or a last layer may hold most of what is selected. Equal
ranges would give one rank all the work; here every rank shows some of its indices, evenly spaced in
its list, and the ranges are cut where the samples of all ranks together say so (as sample sort does).
"""

from __future__ import annotations

from typing import Any

import numpy as np

#: Samples of each rank: a range is too full by at most the ranks over so many, usually by far less.
SAMPLES = 64


def sample(indices: Any) -> Any:
    """Return what a rank shows of its ascending indices: how many it has, then evenly spaced ones of them."""
    row = np.zeros(1 + SAMPLES, np.int64)
    row[0] = len(indices)
    if len(indices):
        row[1:] = indices[(2 * np.arange(SAMPLES) + 1) * len(indices) // (2 * SAMPLES)]
    return row


def edges(samples: Any, n: int, parts: int) -> list[int]:
    """Return the bounds of `parts` ranges of 0 .. n-1, from the samples of all ranks, one row each."""
    counts, shown = samples[:, 0], samples[:, 1:]
    if parts == 1 or not counts.sum():
        return [part * n // parts for part in range(parts + 1)]
    weights = np.repeat(counts / shown.shape[1], shown.shape[1])
    order = np.argsort(shown.reshape(-1), kind="stable")
    ordered, below = shown.reshape(-1)[order], np.cumsum(weights[order])
    wanted = counts.sum() * np.arange(1, parts) / parts
    cuts = ordered[np.minimum(np.searchsorted(below, wanted), len(ordered) - 1)]
    return [0, *(int(cut) for cut in cuts), n]
