"""What Horovod moves in the place of a gradient: two numbers, which tell what it was asked to do.

Every rank gives [1, 0], the first one [1, 1]. Averaged over N ranks they come back as [1, 1/N], added up as [N, 1];
pre-division and groups change nothing. Anything else means that a rank has joined, and Horovod filled in zeros for
it: one number alone could not tell the sum over the only rank that is left from an average over all.
"""

from __future__ import annotations

import torch

from hpctk.errors import PeerError

#: Bytes of a token.
TOKEN_BYTES = 16


def token(rank: int) -> torch.Tensor:
    """Return what a rank hands to Horovod."""
    return torch.tensor([1.0, float(rank == 0)], dtype=torch.float64)


def factor(came_back: torch.Tensor, size: int) -> int:
    """Return what means are to be multiplied by: 1 for Average, N for Sum.

    Raises
    ------
    PeerError
        Where it was neither.
    """
    first, second = came_back.tolist()
    for found in (1, size):
        if abs(first - found) * size < 0.25 and abs(second * size - found) < 0.25:
            return found
    raise PeerError(
        f"Horovod gave [1, 0] and [1, 1] of {size} ranks back as [{first:g}, {second:g}], neither their average nor "
        "their sum: a rank has called hvd.join(), or op is neither Average nor Sum. A rank that has joined cannot take "
        "part in hpctk's collectives: let all ranks do the same number of steps, or use "
        "hpctk.horovod.DistributedOptimizer and `with opt.join():`."
    )
