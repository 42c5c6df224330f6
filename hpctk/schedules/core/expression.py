"""Sums as symbols: which contributions a value holds, and in which order they were added.

Every distinct sum has a number. Sums are pairs without order, because floating-point addition commutes but
does not associate: two values with the same number are the same to the last bit, whoever computed them.
"""

from hpctk.errors import HpctkError


class Sums:
    """All sums met so far; the number of a lone contribution is its rank."""

    def __init__(self, size: int) -> None:
        self._members = [1 << rank for rank in range(size)]
        self._depths = [0] * size
        self._numbers: dict[tuple[int, int], int] = {}

    def add(self, a: int, b: int) -> int:
        """Return the number of a + b, or raise HpctkError if a contribution is in both."""
        pair = (a, b) if a < b else (b, a)
        number = self._numbers.get(pair)
        if number is not None:
            return number
        twice = self._members[a] & self._members[b]
        if twice:
            raise HpctkError(f"the contribution of {ranks_in(twice)} is added twice")
        self._numbers[pair] = number = len(self._members)
        self._members.append(self._members[a] | self._members[b])
        self._depths.append(1 + max(self._depths[a], self._depths[b]))
        return number

    def members(self, number: int) -> int:
        """Return the contributions in a sum, as a bit mask of ranks."""
        return self._members[number]

    def depth(self, number: int) -> int:
        """Return how many additions one contribution passes at most: rounding errors grow with it."""
        return self._depths[number]


def ranks_in(mask: int) -> str:
    """Spell a bit mask of ranks, for messages."""
    ranks = [rank for rank in range(mask.bit_length()) if mask >> rank & 1]
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return "ranks " + ", ".join(map(str, ranks)) if ranks else "no rank"
