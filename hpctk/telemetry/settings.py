"""Where statistics go, and how much of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpctk.errors import SettingError


@dataclass(frozen=True)
class StatsSettings:
    """How statistics are written.

    Attributes
    ----------
    folder : Path
        The run's.
    events : int
        The most rows of calls, and of steps, in a file; 0 for sums alone.
    flush_steps : int
    flush_s : float
        A file is brought up to date after so many steps, or seconds.
    """

    folder: Path
    events: int = 200_000
    flush_steps: int = 1000
    flush_s: float = 5.0

    def __post_init__(self) -> None:
        if not isinstance(self.events, int) or self.events < 0:
            raise SettingError(f"events={self.events!r}: need a number of rows, 0 for none")
        if not isinstance(self.flush_steps, int) or self.flush_steps < 1:
            raise SettingError(f"flush_steps={self.flush_steps!r}: need a number of steps above 0")
        if not 0 <= self.flush_s < float("inf"):
            raise SettingError(f"flush_s={self.flush_s!r}: need a number of seconds, 0 for every call")
