"""The weights of AdaCons, from inner products: pure arithmetic in float64.

Choukroun, Azoulay, Kisilev, "Adaptive Consensus Gradients Aggregation for Scaled Distributed
Training", arXiv 2411.03742. g_i is the gradient of worker i of N, S their sum, eps = 1e-8:

    alpha_i = <g_i, S/N> / (||g_i|| + eps)           agreement with the consensus
    m <- beta*m + (1-beta)*sort(alpha)               momentum on the sorted values; m = sort(alpha) at first
    a~ = m put back in the workers' order, a = a~ / sum a~

and out = sum_i w_i g_i, with w_i by `scale`:

    unit          a_i / (||g_i|| + eps)                              the authors' way: the magnitude is lost
    mean_norm     the same times mean_j ||g_j||                      learning rates of SGD carry over
    coefficients  a_i / (||g_i|| + eps), scaled to the sum 1

When the terms nearly cancel (opposed gradients) the quotient explodes or turns round: then the
plain mean serves, m stays as it was, and the step is counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpctk.log import log
from hpctk.settings import Setting

EPS = 1e-8
#: The sum of the terms must be more than this share of the sum of their magnitudes.
GUARD = 0.1
SCALES = ("mean_norm", "unit", "coefficients")
MOMENTUM = Setting("beta, of the sorted agreements", float, at_least=0, below=1)
SCALE = Setting("what the weighted sum of directions is multiplied by", choices=SCALES)


@dataclass
class ConsensusState:
    """What AdaCons remembers: the sorted momentum of each group of tensors, the same on every rank.

    Attributes
    ----------
    sorted_momentum : dict
        Group -> N numbers, ascending.
    fallbacks : int
        How often the plain mean had to serve, over all groups.
    """

    sorted_momentum: dict[int, Any] = field(default_factory=dict)
    fallbacks: int = 0


def check(momentum: float, scale: str) -> None:
    """Raise SettingError unless the settings of AdaCons are in range."""
    MOMENTUM.check("momentum", momentum)
    SCALE.check("scale", scale)


def weights(inner: Any, squared_norms: Any, state: ConsensusState, group: int, *, momentum: float, scale: str) -> Any:
    """Return the N weights w_i of one group of tensors, and update its momentum in `state`.

    Parameters
    ----------
    inner, squared_norms : arrays of N
        <g_i, S> and ||g_i||^2, each over the group's elements.
    """
    n = len(inner)
    norms = np.sqrt(squared_norms)
    if n == 1:
        return np.ones(1) if scale != "unit" else 1 / (norms + EPS)
    alpha = inner / n / (norms + EPS)
    order = np.argsort(alpha, kind="stable")
    before = state.sorted_momentum.get(group)
    if before is not None and len(before) != n:
        log.warning("AdaCons's momentum was of %d ranks, now there are %d: it is dropped", len(before), n)
        # Of all groups at once, so that this is said once.
        for other in [key for key, kept in state.sorted_momentum.items() if len(kept) != n]:
            del state.sorted_momentum[other]
        before = None
    blended = alpha[order] if before is None else momentum * before + (1 - momentum) * alpha[order]
    terms = np.empty(n)
    terms[order] = blended
    out = _scaled(terms, norms, scale)
    if out is None:
        state.fallbacks += 1
        return np.full(n, 1 / n)
    state.sorted_momentum[group] = blended
    return out


def _scaled(terms: Any, norms: Any, scale: str) -> Any:
    """Return the weights, None where the guard forbids them."""
    if _cancels(terms):
        return None
    per_norm = np.where(norms > 0, terms / terms.sum() / (norms + EPS), 0.0)
    if scale == "unit":
        return per_norm
    if scale == "mean_norm":
        return per_norm * norms.mean()
    return None if _cancels(per_norm) else per_norm / per_norm.sum()


def _cancels(terms: Any) -> bool:
    total = terms.sum()
    return not np.isfinite(total) or bool(total <= GUARD * np.abs(terms).sum())
