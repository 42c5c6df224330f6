"""The random numbers of compressors: own streams, keyed, never the global generators.

Philox 4x64 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) turns a key and a
counter into random bits. The key is (seed, name of the parameter), the high half of the counter is
(draw, rank): streams of different draws and ranks can not overlap, and any draw can be repeated
without those before it. Only the raw stream is used, which numpy keeps the same from version to
version; what its Generator makes of it may change.
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from hpctk.errors import HpctkError

_DRAW_BITS = 32
#: The largest seed.
MAX_SEED = 2**64 - 1


def stamp(name: str, draw: int) -> int:
    """Return one number for a parameter's name and the draw made for it."""
    return zlib.crc32(name.encode()) << _DRAW_BITS | draw % (1 << _DRAW_BITS)


def name_of(stamped: int) -> int:
    """Return the part of a stamp that stands for the name."""
    return stamped >> _DRAW_BITS


def key_and_counter(seed: int, stamped: int, rank: int = 0) -> tuple[Any, Any]:
    """Return what `stream` starts from, for kernels that make its words themselves: 2 and 4 words."""
    key = np.array([seed, name_of(stamped)], np.uint64)
    return key, np.array([0, 0, stamped % (1 << _DRAW_BITS), rank], np.uint64)


def stream(seed: int, stamped: int, rank: int = 0) -> np.random.Philox:
    """Return the stream that belongs to a seed, a stamp and, where ranks draw independently, a rank."""
    key, counter = key_and_counter(seed, stamped, rank)
    return np.random.Philox(counter=counter, key=key)


def uniform(bits: np.random.Philox, n: int, dtype: Any) -> Any:
    """Return n numbers from [0, 1) in float32 or float64, and move the stream on."""
    if np.dtype(dtype) == np.float64:
        return (bits.random_raw(n) >> np.uint64(11)) * 2.0**-53
    words = bits.random_raw((n + 1) // 2).view(np.uint32)[:n]
    return (words >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


def subset(bits: np.random.Philox, k: int, n: int) -> Any:
    """Return k different numbers below n, ascending, every subset equally likely.

    Numbers are drawn with replacement and repeats drawn anew. More than half is drawn by leaving the
    rest out, so that few draws are in vain. Costs k draws and a sort, or n bytes where k is a sizable
    part of n; never a permutation of n.
    """
    index = np.int32 if n < 2**31 else np.int64
    if k > n // 2:
        chosen = np.ones(n, bool)
        chosen[subset(bits, n - k, n)] = False
        return np.flatnonzero(chosen).astype(index)
    # Sorting k numbers costs more than marking them in n bytes unless they are few.
    return (_sorted if k < n // 16 else _marked)(bits, k, n).astype(index)


def _sorted(bits: np.random.Philox, k: int, n: int) -> Any:
    chosen = np.empty(0, np.int64)
    while len(chosen) < k:
        chosen = np.sort(np.concatenate([chosen, _below(bits, k - len(chosen), n)]))
        # numpy's own `unique` hashes, which takes fifty times as long as this.
        chosen = chosen[np.append(True, chosen[1:] != chosen[:-1])]
    return chosen


def _marked(bits: np.random.Philox, k: int, n: int) -> Any:
    chosen = np.zeros(n, bool)
    missing = k
    while missing:
        chosen[_below(bits, missing, n)] = True
        missing = k - int(np.count_nonzero(chosen))
    return np.flatnonzero(chosen)


def _below(bits: np.random.Philox, count: int, n: int) -> Any:
    """Return `count` numbers below n: 53 random bits times n, which is never rounded up to n."""
    return (uniform(bits, count, np.float64) * n).astype(np.int64)


class Counters:
    """How often each parameter has drawn."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def next_stamp(self, name: str) -> int:
        """Return the stamp of a parameter's next draw, and count it."""
        draw = self._counts.get(name, 0)
        self._counts[name] = draw + 1
        return stamp(name, draw)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the counts, as {name: {"draws": count}}."""
        return {name: {"draws": count} for name, count in self._counts.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace the counts; HpctkError for anything but {name: {"draws": count}}."""
        counts = {}
        for name, entry in state.items():
            try:
                count = operator.index(entry["draws"])
            except (KeyError, TypeError):
                count = -1
            if count < 0 or len(entry) > 1:
                raise HpctkError(f"the state of {name!r} is {dict(entry)}: need {{'draws': 0 or more}}")
            counts[name] = count
        self._counts = counts
