"""What a method is: frozen settings that users write down, and a run that does the work on one rank.

What travels decides the kind, and the kind the life of a step:

    gradient   backward -> exchange the gradients -> base step
    update     [step ahead] -> backward -> local step -> exchange the difference -> apply
    model      local steps -> now and then exchange the parameters -> pull

A new method is a file in this folder with a Method and its Run, an entry in `hpctk.methods`, a test and a row
in docs/methods.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import ClassVar

import torch

from hpctk.compressors import Compressor
from hpctk.methods.core.replica import Replica
from hpctk.methods.core.run import GradientRun, LocalStepRun
from hpctk.settings import check


@dataclass(frozen=True)
class Method(ABC):
    """The settings of a method. Says nothing about a model: one object may serve several."""

    kind: ClassVar[str]
    summary: ClassVar[str]

    def __post_init__(self) -> None:
        check(self)

    @property
    def lockstep(self) -> bool:
        """Whether all ranks do the same number of steps between two rounds."""
        return True

    def settings(self) -> dict[str, object]:
        """Return all settings with the method's name: for handshakes and checkpoints."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        readable = {
            name: value.settings() if isinstance(value, Compressor) else _readable(value)
            for name, value in values.items()
        }
        return {"method": type(self).__name__, **readable}


def _readable(value: object) -> object:
    # A function differs between ranks by its address only.
    return getattr(value, "__qualname__", value)


class GradientMethod(Method):
    """A method of gradients. It knows no optimizer: who that is, and when it steps, is the caller's affair."""

    kind: ClassVar[str] = "gradient"

    @abstractmethod
    def begin(self, replica: Replica) -> GradientRun:
        """Return the method at work on a replica. Collective over the communicator."""


class LocalStepMethod(Method):
    """A method of updates or models: the base optimizer makes local steps, and the ranks exchange what they come to."""

    @abstractmethod
    def begin(self, replica: Replica, base: torch.optim.Optimizer) -> LocalStepRun:
        """Return the method at work on a replica that `base` trains. Collective over the communicator."""


@contextmanager
def scaled_rates(optimizer: torch.optim.Optimizer, factor: float) -> Iterator[None]:
    """Let all learning rates be `factor` times as large for a while.

    The rates are put back as they were, not divided back: schedulers go on from the same bits.
    """
    kept = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, kept, strict=True):
            group["lr"] = rate
