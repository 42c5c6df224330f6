"""How much each worker weighs in GRAWA's centre: the inverse of its gradient norm, all together 1.

    beta_m = nhat_m^-1 / sum_j nhat_j^-1            for the whole model, or for each tensor

Pure: every rank computes all weights from the norms of all, and gets the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hpctk.errors import HpctkError

#: Norms below this share of the workers' mean are taken for it: a zero norm would have all the weight.
FLOOR = 1e-3
#: Instead of norms: of a worker that has never had a gradient. Bad gradients are NaN.
NONE_YET = -1.0


def weights(nhat: Any) -> Any:
    """Return the weights of workers from their norms.

    Parameters
    ----------
    nhat : ndarray
        A row for each worker. NONE_YET gives the worker no weight, and so does what is not finite.

    Returns
    -------
    ndarray
        Of the same shape; columns add up to 1. Uniform where all norms are zero, and where no worker has had
        a gradient yet.
    """
    without = (nhat < 0).any(axis=1)
    taking_part = np.isfinite(nhat).all(axis=1) & ~without
    if without.all():
        return np.full_like(nhat, 1 / len(nhat))
    if not taking_part.any():
        raise HpctkError(
            "in this round no rank has a gradient that is finite, so that none can have any weight: lower the "
            "learning rate, or look for what makes the loss NaN or infinite"
        )
    here = nhat[taking_part]
    largest = here.max(axis=0)
    # In units of the largest: inverses of tiny norms would overflow.
    scaled = here / np.where(largest == 0, 1, largest)
    floored = np.maximum(scaled, FLOOR * scaled.mean(axis=0))
    inverse = 1 / np.where(largest == 0, 1, floored)
    found = np.zeros_like(nhat)
    found[taking_part] = inverse / inverse.sum(axis=0)
    return found
