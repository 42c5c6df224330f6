"""What was measured nearest to a question: the map in benchmarks/results, which `./launch/bench train` writes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctk.advise.question import Question

FORMAT = "hpctk-bench-train"
#: Of a checkout; an installed package has none.
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@dataclass(frozen=True)
class Nearest:
    """A measured set-up: where, and seconds to the target by method, None where it was not reached."""

    where: str
    distance: float
    to_target_s: dict[str, float | None]

    @property
    def text(self) -> str:
        """One line."""
        reached = sorted((s, name) for name, s in self.to_target_s.items() if s is not None)
        missed = [name for name, s in self.to_target_s.items() if s is None]
        parts = [f"{name} {seconds:.1f} s" for seconds, name in reached]
        parts += [f"{name} did not reach it" for name in missed]
        return f"{self.where}, to the target: {', '.join(parts)}"


def load(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """Return the results in a folder, each with the `name` of its file; what is none of them is left out."""
    found = []
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        try:
            document = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        if isinstance(document, dict) and document.get("format") == FORMAT:
            found.append({**document, "name": path.stem})
    return found


def nearest(question: Question, rate: float, documents: Iterable[dict[str, Any]]) -> Nearest | None:
    """Return the measured set-up that is nearest in size, ranks and rate, by factors; None where there is none.

    `rate` in bits per second.
    """
    made = []
    for document in documents:
        settings = document["settings"]
        theirs = settings["bits_per_second"] or 1e11
        pairs = ((document["params"], question.params), (settings["hosts"], question.ranks), (theirs, rate))
        distance = sum(abs(math.log(max(1, a) / b)) for a, b in pairs)
        where = (
            f"{settings['task']} of {document['params']:,} parameters, {settings['hosts']} hosts at {settings['rate']}"
        )
        made.append(Nearest(where, distance, {row["name"]: row["to_target_s"] for row in document["summary"]}))
    return min(made, key=lambda one: one.distance, default=None)
