"""Who sent how much to whom, in as many fields as a picture can show."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpctk.stats import metrics

#: Fields along each side; with more ranks several share one.
MOST = 64


class Matrix:
    """Bytes from every rank to every other, of all recordings.

    Parameters
    ----------
    size : int
        The number of ranks, of the largest recording.

    Attributes
    ----------
    places : array
        The field that each rank belongs to.
    sent : array
        Bytes from field to field. A rank whose file is missing is there by what others received from it.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.places = metrics.bins(size, MOST)
        fields = int(self.places[-1]) + 1 if size else 0
        self.sent = np.zeros((fields, fields))

    def add(self, rank: int, peers: dict[str, Any], missing: Any) -> int:
        """Add one rank's peers; `missing` ranks wrote nothing themselves. Return how many numbers made no sense."""
        ids = peers["peer"]
        sent, senseless = metrics.clean(peers["sent_bytes"])
        received, others = metrics.clean(peers["received_bytes"])
        known = (ids >= 0) & (ids < self.size)
        if 0 <= rank < self.size:
            np.add.at(self.sent[self.places[rank]], self.places[ids[known]], sent[known])
            silent = known & np.isin(ids, missing)
            np.add.at(self.sent[:, self.places[rank]], self.places[ids[silent]], received[silent])
        return senseless + others + int(len(ids) - np.count_nonzero(known))
