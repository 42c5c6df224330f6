"""Which elements of a sum that lies in ranges on all ranks are the k largest: exactly, in a few small rounds.

The magnitudes are read as whole numbers (the bits without the sign keep their order) and their k-th
largest is found digit by digit, 8 bits at a time: every rank counts its elements by their next digit,
the counts are summed, and all know in which digit the k-th lies. Elements equal to it are taken from the
lowest index on.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hpctk.collectives.engine.elements import InPlace
from hpctk.collectives.engine.engine import engine_of
from hpctk.collectives.engine.gather_rows import gather_rows
from hpctk.comm.world import World
from hpctk.schedules import recursive_doubling

DIGIT_BITS = 8


def largest(here: World, values: Any, k: int) -> Any:
    """Return which of this rank's `values` are among the k largest magnitudes of all ranks, as a mask.

    Collective over the communicator. Ranks hold ascending ranges; of equal magnitudes those on lower
    ranks, and there those that stand first, are taken.
    """
    bits = values.view(f"u{values.itemsize}")
    magnitudes = bits & bits.dtype.type(2 ** (8 * values.itemsize - 1) - 1)
    undecided = np.arange(len(values))
    taken = np.zeros(len(values), bool)
    if k == 0:
        return taken
    for shift in range(8 * values.itemsize - DIGIT_BITS, -1, -DIGIT_BITS):
        digits = (magnitudes[undecided] >> magnitudes.dtype.type(shift)).astype(np.intp) & 255
        counts = _sum_over_ranks(here, np.bincount(digits, minlength=256).astype(np.int64))
        # above[d]: elements whose digit is larger than d.
        above = counts[::-1].cumsum()[::-1] - counts
        if counts.sum() <= k:
            taken[undecided] = True
            return taken
        digit = int(np.flatnonzero(above < k)[0])
        taken[undecided[digits > digit]] = True
        undecided = undecided[digits == digit]
        k -= int(above[digit])
        if counts[digit] == k:
            taken[undecided] = True
            return taken
    ties = gather_rows(here, np.array([len(undecided)], np.int64))[:, 0]
    mine = max(0, k - int(ties[: here.rank].sum()))
    taken[undecided[:mine]] = True
    return taken


def _sum_over_ranks(here: World, counts: Any) -> Any:
    plan = recursive_doubling.allreduce(here.size)
    engine_of(here).run(plan, InPlace(counts, 8, "int64"), overhead=True)
    return counts
