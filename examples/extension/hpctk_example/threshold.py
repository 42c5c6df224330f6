"""Threshold: the elements whose magnitude is `least` or more, whichever their number."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hpctk.extend import SparseCompressor, documented, setting


@documented
@dataclass(eq=False, repr=False)
class Threshold(SparseCompressor):
    """Send the elements whose magnitude is `least` or more."""

    least: float = setting(0.05, "smallest magnitude that is sent", above=0)

    def _choose(self, flat: torch.Tensor) -> torch.Tensor:
        return (flat.abs() >= self.least).nonzero().view(-1)
