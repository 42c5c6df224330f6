"""Checkpoints that lose nothing: residuals and all, one HDF5 file per rank, no pickle."""

from hpctk.checkpoint.checkpoints import Checkpoints, Stopped
from hpctk.checkpoint.save_load import load_checkpoint, save_checkpoint

__all__ = ["Checkpoints", "Stopped", "load_checkpoint", "save_checkpoint"]
