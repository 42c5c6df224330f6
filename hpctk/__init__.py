"""Data-parallel training that needs less network.

Importing hpctk starts nothing and imports nothing heavy: names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from hpctk._version import __version__ as __version__

if TYPE_CHECKING:
    from hpctk import ddp as ddp
    from hpctk import stats as stats
    from hpctk.checkpoint import Checkpoints as Checkpoints
    from hpctk.checkpoint import Stopped as Stopped
    from hpctk.checkpoint import load_checkpoint as load_checkpoint
    from hpctk.checkpoint import save_checkpoint as save_checkpoint
    from hpctk.collectives.allgather import allgather as allgather
    from hpctk.collectives.allgather import iallgather as iallgather
    from hpctk.collectives.allreduce import allreduce as allreduce
    from hpctk.collectives.allreduce import iallreduce as iallreduce
    from hpctk.collectives.broadcast import broadcast as broadcast
    from hpctk.collectives.broadcast import ibroadcast as ibroadcast
    from hpctk.collectives.consensus import consensus as consensus
    from hpctk.collectives.engine.consensus_weights import ConsensusState as ConsensusState
    from hpctk.collectives.reduce_scatter import ireduce_scatter as ireduce_scatter
    from hpctk.collectives.reduce_scatter import reduce_scatter as reduce_scatter
    from hpctk.collectives.sparse_allreduce import sparse_allreduce as sparse_allreduce
    from hpctk.collectives.weighted_mean import weighted_mean as weighted_mean
    from hpctk.compressors import QSGD as QSGD
    from hpctk.compressors import Half as Half
    from hpctk.compressors import Identity as Identity
    from hpctk.compressors import PowerSGD as PowerSGD
    from hpctk.compressors import RandomK as RandomK
    from hpctk.compressors import Sign as Sign
    from hpctk.compressors import TopK as TopK
    from hpctk.errors import HpctkError as HpctkError
    from hpctk.methods.adacons import AdaCons as AdaCons
    from hpctk.methods.celgc import CELGC as CELGC
    from hpctk.methods.easgd import EASGD as EASGD
    from hpctk.methods.grawa import LGRAWA as LGRAWA
    from hpctk.methods.grawa import MGRAWA as MGRAWA
    from hpctk.methods.local_sgd import LocalSGD as LocalSGD
    from hpctk.methods.lsgd import LSGD as LSGD
    from hpctk.methods.mean import Mean as Mean
    from hpctk.methods.saef import SAEF as SAEF
    from hpctk.methods.sasg import SASG as SASG
    from hpctk.optimizer import DistributedOptimizer as DistributedOptimizer
    from hpctk.telemetry.settings import StatsSettings as StatsSettings

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
    "sparse_allreduce": "collectives.sparse_allreduce",
    "weighted_mean": "collectives.weighted_mean",
    "ConsensusState": "collectives.engine.consensus_weights",
    "HpctkError": "errors",
    "Checkpoints": "checkpoint",
    "Stopped": "checkpoint",
    "load_checkpoint": "checkpoint",
    "save_checkpoint": "checkpoint",
    "DistributedOptimizer": "optimizer",
    "StatsSettings": "telemetry.settings",
    "AdaCons": "methods.adacons",
    "CELGC": "methods.celgc",
    "LocalSGD": "methods.local_sgd",
    "EASGD": "methods.easgd",
    "LGRAWA": "methods.grawa",
    "LSGD": "methods.lsgd",
    "MGRAWA": "methods.grawa",
    "SAEF": "methods.saef",
    "SASG": "methods.sasg",
    "Mean": "methods.mean",
    "Identity": "compressors",
    "Half": "compressors",
    "TopK": "compressors",
    "RandomK": "compressors",
    "Sign": "compressors",
    "QSGD": "compressors",
    "PowerSGD": "compressors",
}

#: Other ways in, each a module of its own.
_MODULES = ("ddp", "horovod", "stats")

__all__ = ["__version__", *_HOMES, *_MODULES]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return importlib.import_module(f"hpctk.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'hpctk' has no attribute {name!r}")
    return getattr(importlib.import_module(f"hpctk.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
