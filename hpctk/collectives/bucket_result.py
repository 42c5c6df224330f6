"""What came of a bucket of gradients: flat, and divided only when it is written where it is to go."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch


class BucketResult(NamedTuple):
    """A flat tensor, or a part of one, whose quotient by `divisor` is the result.

    To divide a sum where it lies, and then to copy it, would be a pass over memory more.
    """

    flat: torch.Tensor
    divisor: int = 1

    def parts(self, sizes: Iterable[int]) -> list[BucketResult]:
        """Return the parts of these sizes, one after the other; views."""
        return [BucketResult(part, self.divisor) for part in self.flat.split(list(sizes))]

    def write(self, target: torch.Tensor) -> None:
        """Overwrite a tensor of as many elements. In place."""
        source, divisor = self.flat.view(target.shape), self.divisor
        if divisor == 1:
            target.copy_(source)
        elif divisor & (divisor - 1):
            torch.div(source, divisor, out=target)
        else:
            # The same bits as a division's, in less time: the inverse is exact.
            torch.mul(source, 1 / divisor, out=target)
