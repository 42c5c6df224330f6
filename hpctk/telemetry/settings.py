"""Where statistics go, and how much of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hpctk.settings import check, documented, required, setting


@documented
@dataclass(frozen=True)
class StatsSettings:
    """How statistics are written."""

    folder: Path = field(metadata=required("the run's"))
    events: int = setting(200_000, "the most rows of calls, and of steps, in a file; 0 for sums alone", at_least=0)
    flush_steps: int = setting(1000, "a file is brought up to date after so many steps", at_least=1)
    flush_s: float = setting(5.0, "or after so many seconds", at_least=0)

    def __post_init__(self) -> None:
        check(self)
