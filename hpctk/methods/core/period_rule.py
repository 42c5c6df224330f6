"""How many local steps lie between two rounds, where that follows the learning rate.

Gu, Lyu, Arora, Zhang, Huang, "A Quadratic Synchronization Rule for Distributed Deep Learning", ICLR 2024, arXiv
2310.14423. At the first step t of a round, with the first group's learning rate lr of that step:

    H = max(period, floor((alpha / lr)^power)), and no more than what is left of `steps`

Without `steps` the end of a cosine schedule never comes to a round again.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field

from hpctk.errors import SettingError
from hpctk.settings import check, documented, required, setting

#: What a setting that is a rule allows, in words.
A_RULE = "a rule such as hpctk.QSR(0.1); qsr:ALPHA or qsr:ALPHA:STEPS on a command line"


@documented
@dataclass(frozen=True)
class QSR:
    """Let the period grow as the learning rate falls: the quadratic synchronization rule."""

    alpha: float = field(metadata=required("the learning rate at which a round would be one step long", above=0))
    power: float = setting(2.0, "how fast the period grows; 2 is the paper's", above=0)
    warmup: int = setting(0, "steps at the start that keep the least period", at_least=0)
    steps: int | None = setting(None, "all steps of the run: the last round ends with them", at_least=1)

    def __post_init__(self) -> None:
        check(self)

    def period(self, least: int, rate: float, t: int) -> int:
        """Return the number of local steps of the round that begins with step t, counted from 0."""
        found = least
        if t >= self.warmup and rate > 0:
            try:
                found = max(least, math.floor((self.alpha / rate) ** self.power))
            except OverflowError:
                found = sys.maxsize
        return found if self.steps is None else max(1, min(found, self.steps - t))


def rule_by_name(text: str) -> QSR:
    """Return the rule that a command line names: "qsr:0.1", "qsr:0.1:400"; SettingError for any other text."""
    name, *values = text.split(":")
    try:
        if name == "qsr" and len(values) in (1, 2):
            return QSR(float(values[0]), steps=int(values[1]) if len(values) > 1 else None)
    except ValueError:
        pass
    raise SettingError(f"period_rule={text!r}: need {A_RULE}")
