"""How large residuals can be at most, without looking at them.

Whether a gradient and its residual overflow must be known before a step is opened. The look for bad gradients tells the
largest gradient, and a compressor that never leaves more behind than the sum it was given makes residuals grow by no
more than that: while the bound is far from the largest number of the dtype, nobody has to form the sums.
"""

from __future__ import annotations

import torch

from hpctk.compressors import Compressor, Residuals
from hpctk.methods.core.replica import look


class ResidualBound:
    """A number that no element of some residuals exceeds.

    Parameters
    ----------
    compressor : Compressor or None
        Who leaves the residuals.
    """

    def __init__(self, compressor: Compressor | None) -> None:
        self._holds = compressor is not None and compressor.shrinks
        #: None where nothing is known: the residuals were loaded, or changed from outside.
        self._bound: float | None = 0.0
        self._next: float | None = 0.0

    def reset(self) -> None:
        """Take the residuals for such of which nothing is known."""
        self._bound = None

    def allows(self, largest: float, residuals: Residuals, dtype: torch.dtype) -> bool:
        """Return whether gradients of at most this magnitude cannot overflow with the residuals. Changes nothing.

        False also where that cannot be told without forming the sums.
        """
        self._next = None
        if not self._holds:
            return False
        kind = torch.finfo(dtype)
        limit = kind.max / 4
        if self._bound is None or self._bound + largest > limit:
            seen = look(list(residuals.state_dict().values()))
            self._bound = None if seen.bad is not None else seen.largest
        if self._bound is None or self._bound + largest > limit:
            return False
        # Sums are rounded.
        self._next = (self._bound + largest) * (1 + 2 * kind.eps)
        return True

    def advance(self) -> None:
        """Take the residuals for such that the gradients of the last `allows` were added to."""
        self._bound = self._next
