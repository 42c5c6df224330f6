"""The weighted mean of all ranks' tensors, for GRAWA: a gather of the weights, then one all-reduce.

Every rank scales its tensors by its share of the weights; the sum over the ranks is the mean. Extra
memory: one copy of the tensors, the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hpctk.collectives.allreduce import reduce_in_place
from hpctk.collectives.engine.fuse import describe, fuse, unfuse
from hpctk.collectives.engine.gather_rows import gather_rows
from hpctk.comm.buffers import DTYPES
from hpctk.comm.collective import collective
from hpctk.comm.world import world
from hpctk.errors import SettingError

if TYPE_CHECKING:
    from hpctk.comm.world import Comm


@collective
def weighted_mean(
    tensors: Sequence[Any], weight: float | Sequence[float], *, schedule: str = "auto", comm: Comm | None = None
) -> list[Any]:
    """Return sum_m w_m x_m / sum_m w_m over the ranks m, as new tensors.

    Not in place. A rank of weight 0 contributes nothing, not even
    its NaNs. Where all weights are 0 the plain mean is returned.

    Parameters
    ----------
    tensors : sequence of torch.Tensor
        float32 or float64, the same shapes on every rank.
    weight : float or sequence of float
        This rank's weight for the whole model, or one for each tensor; finite, not negative.
    schedule : str
        Of the all-reduce.
    comm : MPI.Intracomm or torch.distributed.ProcessGroup, optional
        COMM_WORLD where not given.
    """
    here = world(comm)
    with here.one_thread:
        with here.shared_errors("reading the weights"):
            mine = np.atleast_1d(np.asarray(weight, np.float64))
        here.agree("weighted_mean", [("weights", mine.size), ("schedule", schedule), *describe(tensors)])
        if mine.size not in (1, len(tensors)):
            raise SettingError(f"weight has {mine.size} numbers: give one, or one for each of {len(tensors)} tensors")
        shares = _shares(gather_rows(here, mine))[here.rank]
        flat, edges = fuse(tensors)
        factors = np.broadcast_to(shares, len(tensors))
        for lo, hi, factor in zip(edges[:-1], edges[1:], factors, strict=True):
            part = flat[lo:hi]
            if factor == 0:
                part.zero_()
            else:
                part *= float(factor)
        dtype = DTYPES[str(flat.dtype).removeprefix("torch.")]
        reduce_in_place(here, flat, dtype, "sum", schedule)
    return unfuse(flat, edges, tensors)


def _shares(everyone: Any) -> Any:
    bad = ~np.isfinite(everyone) | (everyone < 0)
    if bad.any():
        rank = int(np.argwhere(bad)[0][0])
        raise SettingError(f"rank {rank} gave a weight that is negative or not finite: {everyone[rank].tolist()}")
    totals = everyone.sum(0)
    uniform = np.full_like(everyone, 1 / len(everyone))
    return np.where(totals > 0, everyone / np.where(totals > 0, totals, 1), uniform)
