"""How much went to every peer and came from it, and how long messages were. In constant memory."""

from __future__ import annotations

from hpctk.stats.schema import SIZE_BINS


class Traffic:
    """Counts every message of a recording, among `size` ranks."""

    __slots__ = ("received_bytes", "received_messages", "sent_bytes", "sent_messages", "size_bytes", "sizes")

    def __init__(self, size: int) -> None:
        self.sent_bytes, self.sent_messages = [0] * size, [0] * size
        self.received_bytes, self.received_messages = [0] * size, [0] * size
        #: Messages sent, and bytes in them, by the logarithm of their length.
        self.sizes, self.size_bytes = [0] * SIZE_BINS, [0] * SIZE_BINS

    def sent(self, peer: int, nbytes: int) -> None:
        """Count a message to a peer."""
        self.sent_bytes[peer] += nbytes
        self.sent_messages[peer] += 1
        place = max(0, nbytes.bit_length() - 1)
        self.sizes[place] += 1
        self.size_bytes[place] += nbytes

    def received(self, peer: int, nbytes: int) -> None:
        """Count a message from a peer."""
        self.received_bytes[peer] += nbytes
        self.received_messages[peer] += 1
