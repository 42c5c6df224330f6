"""What a package needs that brings a method or a compressor of its own; docs/extend.md shows how.

Schedules need no torch: what they are made of is in `hpctk.schedules`.
"""

from __future__ import annotations

from hpctk.collectives.compressed_mean import compressed_mean as compressed_mean
from hpctk.collectives.dense_mean import dense_mean as dense_mean
from hpctk.collectives.engine.gather_rows import gather_rows as gather_rows
from hpctk.compressors.core.compressor import Compressor as Compressor
from hpctk.compressors.core.compressor import Residuals as Residuals
from hpctk.compressors.core.compressor import expect_length as expect_length
from hpctk.compressors.core.packet import Packet as Packet
from hpctk.compressors.core.sparse import SparseCompressor as SparseCompressor
from hpctk.methods.core.clipping import global_norm as global_norm
from hpctk.methods.core.method import GradientMethod as GradientMethod
from hpctk.methods.core.method import LocalStepMethod as LocalStepMethod
from hpctk.methods.core.model_step import ModelRun as ModelRun
from hpctk.methods.core.replica import Replica as Replica
from hpctk.methods.core.resharding import SavedRanks as SavedRanks
from hpctk.methods.core.resharding import reshard as reshard
from hpctk.methods.core.run import GradientRun as GradientRun
from hpctk.methods.core.run import UpdateRun as UpdateRun
from hpctk.settings import documented as documented
from hpctk.settings import required as required
from hpctk.settings import setting as setting

__all__ = [
    "Compressor",
    "GradientMethod",
    "GradientRun",
    "LocalStepMethod",
    "ModelRun",
    "Packet",
    "Replica",
    "Residuals",
    "SavedRanks",
    "SparseCompressor",
    "UpdateRun",
    "compressed_mean",
    "dense_mean",
    "documented",
    "expect_length",
    "gather_rows",
    "global_norm",
    "required",
    "reshard",
    "setting",
]
