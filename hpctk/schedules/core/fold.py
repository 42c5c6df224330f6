"""Fold any number of ranks into a power of two of teams, for schedules that halve and double.

With P = 2^k + e ranks the first 2e ranks form e teams of two neighbours and the others are teams of one, so
that there are 2^k teams, in rank order. A team of one is its own lower and upper rank.
"""

from dataclasses import dataclass

from hpctk.schedules.core.plan import checked_size


@dataclass(frozen=True, slots=True)
class Fold:
    """The teams of `size` ranks."""

    size: int

    def __post_init__(self) -> None:
        checked_size(self.size)

    @property
    def levels(self) -> int:
        """Return k, the number of times the teams can be halved."""
        return self.size.bit_length() - 1

    @property
    def teams(self) -> int:
        """Return 2^k, the number of teams."""
        return 1 << self.levels

    @property
    def pairs(self) -> int:
        """Return e, the number of teams with two ranks: the first ones."""
        return self.size - self.teams

    def team(self, rank: int) -> int:
        """Return the team that `rank` is in."""
        return rank // 2 if rank < 2 * self.pairs else rank - self.pairs

    def lower(self, team: int) -> int:
        """Return the lower rank of `team`."""
        return 2 * team if team < self.pairs else team + self.pairs

    def upper(self, team: int) -> int:
        """Return the upper rank of `team`."""
        return 2 * team + 1 if team < self.pairs else team + self.pairs
