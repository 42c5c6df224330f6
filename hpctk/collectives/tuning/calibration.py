"""What was measured on a user's own ranks: the machine's figures, and how long every schedule took.

Kept in a small JSON file. Where a program's own calls were timed (learning.py), these times decide; else, for as many
ranks on as many nodes as it was measured with, the measured times; for any other layout, the cost model with the
measured figures.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from hpctk.errors import SettingError
from hpctk.schedules.core.plan import Plan
from hpctk.schedules.core.registry import SHARED_MEMORY
from hpctk.schedules.cost.machine import Machine
from hpctk.schedules.cost.prices import best, price, site

FORMAT, VERSION = "hpctk-calibration", 1
#: Uncalibrated: below this many bytes MPI's own all-reduce is hard to beat from Python.
MPI_BELOW_BYTES = 16384
#: The same on one node, where it may block: its memory beats messages of Python's at every size, and the memory that
#: hpctk shares beats it once a tensor no longer fits into the cache.
SHARED_FROM_BYTES = 2**24
#: A call that returns at once is a call of MPI's own only up to here: polled, it takes several times as long as the
#: same call that blocks, which is what was measured.
POLLED_BELOW_BYTES = 65536

#: What a choice is made for, beside the other collectives; see `Calibration.best`.
OUT_OF_PLACE = "allreduce out of place"
REDUCTIONS = ("allreduce", "iallreduce", OUT_OF_PLACE)

Nodes = Sequence[Sequence[int]]
Points = tuple[tuple[int, float], ...]
Times = Mapping[str, float]


@dataclass(frozen=True)
class Calibration:
    """Figures for the cost model, and measured times.

    Attributes
    ----------
    machine : Machine
    factors : mapping
        Schedule -> (bytes, measured time over the model's), by ascending bytes: what the engine's
        overlap of rounds gains (below 1), or what the model does not know of (above).
    layout : tuple of int
        How many ranks lay on each node when it was measured; empty for none.
    measured : mapping
        Schedule ("mpi" too) -> (bytes, seconds) of all-reduces, by ascending bytes.
    learned : mapping
        Where (`place_of`) -> class of sizes (`size_class`) -> schedule -> seconds that calls of a program took.
    """

    machine: Machine = field(default_factory=Machine)
    factors: Mapping[str, Points] = field(default_factory=dict)
    layout: tuple[int, ...] = ()
    measured: Mapping[str, Points] = field(default_factory=dict)
    learned: Mapping[str, Mapping[int, Times]] = field(default_factory=dict)

    def seconds(self, plan: Plan, nbytes: int, nodes: Nodes | None = None) -> float:
        """Return the predicted time of a plan on ranks that lie on `nodes` (one each where not given)."""
        return price(plan, nbytes, site(self.machine, nodes)) * self._factor(nbytes, plan)

    def best(
        self,
        kind: str,
        size: int,
        nbytes: int,
        nodes: Nodes,
        *,
        shares_memory: bool = False,
        blocks: bool = False,
        library: str = "mpi",
    ) -> str:
        """Return the name of the schedule to use; "mpi" for the library's own all-reduce.

        An "iallreduce" is an all-reduce that returns at once, OUT_OF_PLACE one that leaves what it reads as it is: that
        costs the library a copy, but not memory that ranks share. `shares_memory` says whether the ranks can do that,
        `blocks` whether the library's own blocks where nothing returns at once.
        """
        if kind in REDUCTIONS:
            left_out = set() if shares_memory else {SHARED_MEMORY}
            if blocks and kind == "iallreduce" and nbytes >= POLLED_BELOW_BYTES:
                left_out.add("mpi")
            times = self.learned_times(library, nodes, nbytes)
            known = min(times.keys() - left_out, key=times.__getitem__, default="") or self._reduces_best(
                nbytes, nodes, left_out, blocks and kind != OUT_OF_PLACE
            )
            if known:
                return known
        correct = partial(self._factor, nbytes)
        return best("allreduce" if kind in REDUCTIONS else kind, size, nbytes, self.machine, nodes, correct)[0]

    def learned_times(self, library: str, nodes: Nodes, nbytes: int) -> Times:
        """Return how long calls of about so many bytes took, by schedule; empty where that was not learned."""
        return self.learned.get(place_of(library, nodes), {}).get(size_class(nbytes), {})

    def with_learned(self, place: str, of_size: int, times: Times) -> Calibration:
        """Return a calibration that knows how long calls of a class of sizes took, too."""
        there = {**self.learned.get(place, {}), of_size: dict(times)}
        return replace(self, learned={**self.learned, place: there})

    def _reduces_best(self, nbytes: int, nodes: Nodes, left_out: Container[str], blocks: bool) -> str:
        """Return the best all-reduce that is known without asking the cost model, "" where there is none."""
        if self.measured and layout_of(nodes) == self.layout:
            names = [name for name in self.measured if name not in left_out]
            return min(names, key=lambda name: interpolate(self.measured[name], nbytes))
        below = SHARED_FROM_BYTES if blocks and SHARED_MEMORY not in left_out else MPI_BELOW_BYTES
        if nbytes < below and "mpi" not in left_out:
            return "mpi"
        return "" if SHARED_MEMORY in left_out else SHARED_MEMORY

    def _factor(self, nbytes: int, plan: Plan) -> float:
        return factor_at(self.factors.get(plan.name, ()), nbytes)

    def to_json(self) -> str:
        """Return the text of a calibration file."""
        document = {
            "format": FORMAT,
            "version": VERSION,
            "machine": self.machine.to_document(),
            "factors": _listed(self.factors),
            "layout": list(self.layout),
            "measured": _listed(self.measured),
            "learned": self.learned,
        }
        return json.dumps(document, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Calibration:
        """Return the calibration in a file's text; SettingError says what is wrong with it."""
        document = _parsed(text)
        try:
            machine = Machine.from_document(document["machine"])
            factors, measured = _points(document["factors"]), _points(document["measured"])
            layout = tuple(int(ranks) for ranks in document["layout"])
            # Files of earlier versions have none.
            learned = {
                str(place): {
                    int(of_size): {str(name): float(seconds) for name, seconds in times.items()}
                    for of_size, times in classes.items()
                }
                for place, classes in document.get("learned", {}).items()
            }
            return cls(machine, factors, layout, measured, learned)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SettingError(f"calibration file: {type(error).__name__}: {error}; run `hpctk calibrate`") from None


def read(path: Path) -> str:
    """Return the text of a calibration file, empty where there is none."""
    return path.read_text() if path.exists() else ""


def keep(path: Path, text: str) -> None:
    """Write a calibration file, whole or not at all, and the folders it is in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        beside.write_text(text)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def place_of(library: str, nodes: Nodes) -> str:
    """Return what joins the ranks, and how many of them lie on each node, as text."""
    return " ".join([library, *map(str, layout_of(nodes))])


def size_class(nbytes: int) -> int:
    """Return the class of sizes that are taken for alike: from a power of two to the next."""
    return nbytes.bit_length()


def layout_of(nodes: Nodes) -> tuple[int, ...]:
    """Return the number of ranks on each node."""
    return tuple(len(ranks) for ranks in nodes)


def interpolate(points: Points, nbytes: int) -> float:
    """Return the time for `nbytes` from measured points: straight lines between logarithms.

    Below the first point the time is that of the first; above the last it grows with the bytes.
    """
    if nbytes <= points[0][0]:
        return points[0][1]
    for (lo, lo_s), (hi, hi_s) in pairwise(points):
        if nbytes <= hi:
            share = math.log(nbytes / lo) / math.log(hi / lo)
            return float(lo_s * (hi_s / lo_s) ** share)
    return points[-1][1] * nbytes / points[-1][0]


def factor_at(points: Points, nbytes: int) -> float:
    """Return the factor for `nbytes`: straight lines over the logarithm of the bytes, level beyond the ends."""
    if not points:
        return 1.0
    if nbytes <= points[0][0]:
        return points[0][1]
    for (lo, before), (hi, after) in pairwise(points):
        if nbytes <= hi:
            return before + (after - before) * math.log(nbytes / lo) / math.log(hi / lo)
    return points[-1][1]


def _listed(rows: Mapping[str, Points]) -> dict[str, list[list[float]]]:
    return {name: [list(point) for point in points] for name, points in rows.items()}


def _points(rows: Mapping[str, Any]) -> dict[str, Points]:
    return {str(name): tuple((int(n), float(value)) for n, value in points) for name, points in rows.items()}


def _parsed(text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise SettingError(f"calibration file: not JSON ({error}); run `hpctk calibrate`") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise SettingError(f'calibration file: "format" must be "{FORMAT}"; run `hpctk calibrate`')
    if document.get("version") != VERSION:
        raise SettingError(
            f"calibration file: version {document.get('version')!r}, this hpctk reads {VERSION}; run `hpctk calibrate`"
        )
    return document
