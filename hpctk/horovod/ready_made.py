"""Compressions by name, in Horovod's own manner: hvd.Compression.fp16 is Compression.half(model) here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import torch

from hpctk.compressors import QSGD, Half, PowerSGD, RandomK, Sign, TopK
from hpctk.methods.adacons import AdaCons
from hpctk.methods.celgc import CELGC
from hpctk.methods.easgd import EASGD
from hpctk.methods.grawa import LGRAWA, MGRAWA
from hpctk.methods.local_sgd import LocalSGD
from hpctk.methods.mean import Mean
from hpctk.methods.saef import SAEF


class ReadyMade:
    """The names. What else Compression takes, such as process_set, follows the model by keyword."""

    if TYPE_CHECKING:
        # Compression's.
        def __init__(self, method: Any, model: torch.nn.Module, **settings: Any) -> None: ...

    @classmethod
    def none(cls, model: torch.nn.Module, **settings: Any) -> Self:
        """Average dense gradients, by hpctk's schedules."""
        return cls(Mean(), model, **settings)

    @classmethod
    def half(cls, model: torch.nn.Module, **settings: Any) -> Self:
        """Average gradients that travel in half precision, with error feedback."""
        return cls(Half(), model, **settings)

    @classmethod
    def topk(cls, density: float, model: torch.nn.Module, **settings: Any) -> Self:
        """Average the largest elements, with error feedback."""
        return cls(TopK(density), model, **settings)

    @classmethod
    def randomk(cls, density: float, model: torch.nn.Module, **settings: Any) -> Self:
        """Average elements drawn at random, the same on all ranks, with error feedback."""
        return cls(RandomK(density), model, **settings)

    @classmethod
    def sign(cls, model: torch.nn.Module, **settings: Any) -> Self:
        """Average one bit of each element, with error feedback."""
        return cls(Sign(), model, **settings)

    @classmethod
    def qsgd(cls, bits: int, model: torch.nn.Module, **settings: Any) -> Self:
        """Average elements that were rounded to few bits, with error feedback."""
        return cls(QSGD(bits), model, **settings)

    @classmethod
    def powersgd(cls, rank: int, model: torch.nn.Module, **settings: Any) -> Self:
        """Average factors of low rank, with error feedback."""
        return cls(PowerSGD(rank), model, **settings)

    @classmethod
    def adacons(cls, model: torch.nn.Module, **settings: Any) -> Self:
        """Weigh gradients by their agreement."""
        return cls(AdaCons(), model, **settings)

    @classmethod
    def saef(cls, density: float, model: torch.nn.Module, **settings: Any) -> Self:
        """Exchange the largest elements of updates, gradients taken a step ahead. Needs `attach`."""
        return cls(SAEF(TopK(density)), model, **settings)

    @classmethod
    def mgrawa(cls, period: int, model: torch.nn.Module, **settings: Any) -> Self:
        """Pull workers toward a mean in which flat ones weigh more. Needs `attach`."""
        return cls(MGRAWA(period), model, **settings)

    @classmethod
    def lgrawa(cls, period: int, model: torch.nn.Module, **settings: Any) -> Self:
        """Do as `mgrawa`, with weights of its own for every tensor. Needs `attach`."""
        return cls(LGRAWA(period), model, **settings)

    @classmethod
    def celgc(cls, clip: float, period: int, model: torch.nn.Module, **settings: Any) -> Self:
        """Clip locally, average models every `period` steps. Needs `attach`."""
        return cls(CELGC(clip, period), model, **settings)

    @classmethod
    def localsgd(cls, period: int, model: torch.nn.Module, **settings: Any) -> Self:
        """Average models every `period` steps. Needs `attach`."""
        return cls(LocalSGD(period), model, **settings)

    @classmethod
    def easgd(cls, period: int, model: torch.nn.Module, **settings: Any) -> Self:
        """Let workers and a centre pull each other every `period` steps. Needs `attach`."""
        return cls(EASGD(period), model, **settings)
