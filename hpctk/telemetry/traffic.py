"""How much went to every peer and came from it, and how long messages were."""

from __future__ import annotations

from collections import defaultdict

from hpctk.telemetry.schema import SIZE_BINS


class Traffic:
    """Counters of every message of a recording, among `size` ranks.

    Attributes
    ----------
    outgoing, incoming : dict of (int, int) to int
        Messages by peer and length since the last `fold`. Whoever moves messages adds to them, in one operation: a
        call of a method would cost as much again.
    sent_bytes, sent_messages, received_bytes, received_messages : list of int
        By peer.
    sizes, size_bytes : list of int
        Messages sent, and bytes in them, by the logarithm of their length.
    """

    def __init__(self, size: int) -> None:
        self.outgoing: dict[tuple[int, int], int] = defaultdict(int)
        self.incoming: dict[tuple[int, int], int] = defaultdict(int)
        self.sent_bytes, self.sent_messages = [0] * size, [0] * size
        self.received_bytes, self.received_messages = [0] * size, [0] * size
        self.sizes, self.size_bytes = [0] * SIZE_BINS, [0] * SIZE_BINS

    def fold(self) -> None:
        """Add what was counted to the sums, which take no more memory however many lengths there are."""
        # Another thread may go on counting: it finds new dictionaries.
        outgoing, self.outgoing = self.outgoing, defaultdict(int)
        incoming, self.incoming = self.incoming, defaultdict(int)
        for (peer, nbytes), messages in list(outgoing.items()):
            self.sent_bytes[peer] += nbytes * messages
            self.sent_messages[peer] += messages
            size_bin = max(0, nbytes.bit_length() - 1)
            self.sizes[size_bin] += messages
            self.size_bytes[size_bin] += nbytes * messages
        for (peer, nbytes), messages in list(incoming.items()):
            self.received_bytes[peer] += nbytes * messages
            self.received_messages[peer] += messages
