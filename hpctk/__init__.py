"""Data-parallel training that needs less network.

Importing hpctk starts nothing and imports nothing heavy: names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import TYPE_CHECKING

from hpctk._version import __version__ as __version__

if TYPE_CHECKING:
    from hpctk import ddp as ddp
    from hpctk import extend as extend
    from hpctk import fsdp as fsdp
    from hpctk import metrics as metrics
    from hpctk import ops as ops
    from hpctk import stats as stats
    from hpctk import testing as testing
    from hpctk.checkpoint import Checkpoints as Checkpoints
    from hpctk.checkpoint import Stopped as Stopped
    from hpctk.checkpoint import load_checkpoint as load_checkpoint
    from hpctk.checkpoint import save_checkpoint as save_checkpoint
    from hpctk.collectives.allreduce import allreduce as allreduce
    from hpctk.compressors import QSGD as QSGD
    from hpctk.compressors import ChunkTopK as ChunkTopK
    from hpctk.compressors import Half as Half
    from hpctk.compressors import Identity as Identity
    from hpctk.compressors import PowerSGD as PowerSGD
    from hpctk.compressors import RandomK as RandomK
    from hpctk.compressors import Sign as Sign
    from hpctk.compressors import TopK as TopK
    from hpctk.errors import HpctkError as HpctkError
    from hpctk.errors import MismatchError as MismatchError
    from hpctk.errors import PeerError as PeerError
    from hpctk.errors import SettingError as SettingError
    from hpctk.errors import TensorError as TensorError
    from hpctk.methods.adacons import AdaCons as AdaCons
    from hpctk.methods.celgc import CELGC as CELGC
    from hpctk.methods.core.period_rule import QSR as QSR
    from hpctk.methods.diloco import DiLoCo as DiLoCo
    from hpctk.methods.easgd import EASGD as EASGD
    from hpctk.methods.ef21 import EF21 as EF21
    from hpctk.methods.episode import EPISODE as EPISODE
    from hpctk.methods.grawa import LGRAWA as LGRAWA
    from hpctk.methods.grawa import MGRAWA as MGRAWA
    from hpctk.methods.local_sgd import LocalSGD as LocalSGD
    from hpctk.methods.lsgd import LSGD as LSGD
    from hpctk.methods.mean import Mean as Mean
    from hpctk.methods.saef import SAEF as SAEF
    from hpctk.methods.sasg import SASG as SASG
    from hpctk.methods.sparse_loco import SparseLoCo as SparseLoCo
    from hpctk.optimizer import DistributedOptimizer as DistributedOptimizer
    from hpctk.telemetry.settings import StatsSettings as StatsSettings

#: Public name: the module it lives in.
_HOMES = {
    "allreduce": "collectives.allreduce",
    "HpctkError": "errors",
    "SettingError": "errors",
    "TensorError": "errors",
    "MismatchError": "errors",
    "PeerError": "errors",
    "Checkpoints": "checkpoint",
    "Stopped": "checkpoint",
    "load_checkpoint": "checkpoint",
    "save_checkpoint": "checkpoint",
    "DistributedOptimizer": "optimizer",
    "StatsSettings": "telemetry.settings",
    "AdaCons": "methods.adacons",
    "CELGC": "methods.celgc",
    "EPISODE": "methods.episode",
    "EF21": "methods.ef21",
    "DiLoCo": "methods.diloco",
    "SparseLoCo": "methods.sparse_loco",
    "QSR": "methods.core.period_rule",
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
    "ChunkTopK": "compressors",
    "RandomK": "compressors",
    "Sign": "compressors",
    "QSGD": "compressors",
    "PowerSGD": "compressors",
}

#: Further names, each in a module of its own; not for `import *`, for Horovod or a trainer may not be there.
_MODULES = ("ddp", "extend", "fsdp", "horovod", "lightning", "accelerate", "metrics", "ops", "stats", "testing")

#: Names of earlier versions, and what they are called now.
_RENAMED = {
    "adacons_aggregate": "ops.adacons_aggregate",
    "sparse_allreduce": "ops.sparse_allreduce",
    "consensus": "ops.adacons_aggregate",
    "ConsensusState": "ops.ConsensusState",
    "allgather": "ops.allgather",
    "iallgather": "ops.iallgather",
    "iallreduce": "ops.iallreduce",
    "broadcast": "ops.broadcast",
    "ibroadcast": "ops.ibroadcast",
    "reduce_scatter": "ops.reduce_scatter",
    "ireduce_scatter": "ops.ireduce_scatter",
    "weighted_mean": "ops.weighted_mean",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return importlib.import_module(f"hpctk.{name}")
    if name in _RENAMED:
        warnings.warn(f"hpctk.{name} is hpctk.{_RENAMED[name]} now", DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module("hpctk.ops"), _RENAMED[name].removeprefix("ops."))
    if name not in _HOMES:
        # With name and module Python adds what was meant, from __dir__.
        raise AttributeError(f"module 'hpctk' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    return getattr(importlib.import_module(f"hpctk.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES])
