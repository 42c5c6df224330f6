"""How much went to every peer and came from it, and how long messages were: the tables `peers` and `sizes`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from hpctk.telemetry.schema import PEERS, SIZE_BINS, SIZES


class Traffic:
    """Counters of every message of a recording, among `size` ranks.

    Whoever moves messages adds them to `outgoing` and `incoming`, by peer and length, in one operation: a call of a
    method would cost as much again. `fold` adds those to the tables.
    """

    def __init__(self, size: int) -> None:
        self.outgoing: dict[tuple[int, int], int] = defaultdict(int)
        self.incoming: dict[tuple[int, int], int] = defaultdict(int)
        self.peers, self.sizes = np.zeros(size, PEERS.dtype), np.zeros(SIZE_BINS, SIZES.dtype)
        #: The number in the tables of each rank that there is now.
        self._numbers = np.arange(size)
        self.peers["peer"], self.sizes["lower_bytes"] = np.arange(size), 1 << np.arange(SIZE_BINS)

    def fold(self) -> None:
        """Add what was counted to the tables, which take no more memory however many lengths there are."""
        # Another thread may go on counting: it finds new dictionaries.
        outgoing, self.outgoing = self.outgoing, defaultdict(int)
        incoming, self.incoming = self.incoming, defaultdict(int)
        for counted, direction in ((outgoing, "sent"), (incoming, "received")):
            rows = [(peer, length, messages) for (peer, length), messages in list(counted.items())]
            peers, lengths, messages = np.array(rows, np.int64).reshape(-1, 3).T
            peers = self._numbers[peers]
            np.add.at(self.peers[f"{direction}_bytes"], peers, lengths * messages)
            np.add.at(self.peers[f"{direction}_messages"], peers, messages)
            if direction == "sent":
                bins = np.frexp(np.maximum(lengths, 1).astype(np.float64))[1] - 1
                np.add.at(self.sizes["messages"], bins, messages)
                np.add.at(self.sizes["sent_bytes"], bins, lengths * messages)

    def forget(self, kept: Sequence[int]) -> None:
        """Count on under the numbers of the tables, where ranks are lost and those left are `kept`, numbered anew."""
        self.fold()
        self._numbers = self._numbers[list(kept)]
