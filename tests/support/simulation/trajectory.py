"""What a simulation hands back."""

from __future__ import annotations

from dataclasses import dataclass, field

from .tensors import Tensors


@dataclass
class Trajectory:
    """State after each step; index t is the state after step t, counted from 0.

    Attributes
    ----------
    held
        held[t][k]: the parameters worker k's model holds after step t.
    consensus
        consensus[t]: the parameters the method wants evaluated.
    log
        log[name][t]: what else the method computed in step t; None where step t had no such thing.
    """

    held: list[list[Tensors]] = field(default_factory=list)
    consensus: list[Tensors] = field(default_factory=list)
    log: dict[str, list] = field(default_factory=dict)

    def record(self, held: list[Tensors], consensus: Tensors, **entries: object) -> None:
        self.held.append(list(held))
        self.consensus.append(consensus)
        for name, entry in entries.items():
            self.log.setdefault(name, []).append(entry)
