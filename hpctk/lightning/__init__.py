"""hpctk under Lightning: a strategy that lets a method exchange what DDP would average in full.

    trainer = Trainer(strategy=hpctk.lightning.Strategy(hpctk.SAEF(hpctk.TopK(0.01))), devices=2, accelerator="cpu")

Needs Lightning: pip install 'hpctk[lightning]'.
"""

from __future__ import annotations

from importlib import import_module

from hpctk.errors import SettingError

try:
    import_module("lightning.pytorch")
except ImportError as error:
    raise SettingError(f"hpctk.lightning needs Lightning: pip install 'hpctk[lightning]' ({error})") from None

from hpctk.lightning.strategy import AveragedModel as AveragedModel
from hpctk.lightning.strategy import Strategy as Strategy

__all__ = ["AveragedModel", "Strategy"]
