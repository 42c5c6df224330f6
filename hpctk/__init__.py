"""Data-parallel training that needs less network.

Importing hpctk starts nothing and imports nothing heavy: names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from hpctk._version import __version__ as __version__

if TYPE_CHECKING:
    from hpctk.collectives.allgather import allgather as allgather
    from hpctk.collectives.allgather import iallgather as iallgather
    from hpctk.collectives.allreduce import allreduce as allreduce
    from hpctk.collectives.allreduce import iallreduce as iallreduce
    from hpctk.collectives.broadcast import broadcast as broadcast
    from hpctk.collectives.broadcast import ibroadcast as ibroadcast
    from hpctk.collectives.consensus import consensus as consensus
    from hpctk.collectives.consensus_weights import ConsensusState as ConsensusState
    from hpctk.collectives.reduce_scatter import ireduce_scatter as ireduce_scatter
    from hpctk.collectives.reduce_scatter import reduce_scatter as reduce_scatter
    from hpctk.collectives.weighted_mean import weighted_mean as weighted_mean
    from hpctk.errors import HpctkError as HpctkError

#: Public name: the module it lives in.
_HOMES = {
    "allgather": "collectives.allgather",
    "iallgather": "collectives.allgather",
    "allreduce": "collectives.allreduce",
    "iallreduce": "collectives.allreduce",
    "broadcast": "collectives.broadcast",
    "ibroadcast": "collectives.broadcast",
    "consensus": "collectives.consensus",
    "reduce_scatter": "collectives.reduce_scatter",
    "ireduce_scatter": "collectives.reduce_scatter",
    "weighted_mean": "collectives.weighted_mean",
    "ConsensusState": "collectives.consensus_weights",
    "HpctkError": "errors",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'hpctk' has no attribute {name!r}")
    return getattr(importlib.import_module(f"hpctk.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
