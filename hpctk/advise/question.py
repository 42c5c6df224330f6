"""What is asked: a model, a step, ranks and a network, each checked."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hpctk.errors import SettingError
from hpctk.schedules.cost.machine import Machine

#: What the headers of Ethernet, IP and TCP add to the bytes of a tensor.
HEADERS = 1.05
#: Units of a rate, in bits per second.
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
OPTIMIZERS = ("sgd", "adam")


@dataclass(frozen=True)
class Question:
    """A training job, as far as its cost depends on it.

    Attributes
    ----------
    params : int
        Trainable parameters, float32.
    step_s : float
        Seconds of a step on one rank alone: forward, backward, and the optimizer.
    ranks, per_node : int
        In all, and on each node.
    optimizer : str
        "sgd" for steps that are linear in the gradient, "adam" for its kin.
    overlap_share : float
        Part of `step_s` behind which communication can hide where a way overlaps: what backward takes, or 0 where the
        cores that compute also move the bytes.
    periods : tuple of int
        Of methods with local steps.
    densities : tuple of float
        Of methods that choose elements.
    """

    params: int
    step_s: float
    ranks: int
    per_node: int = 1
    optimizer: str = "sgd"
    overlap_share: float = 0.5
    periods: tuple[int, ...] = (4, 16, 64)
    densities: tuple[float, ...] = (0.01,)

    def __post_init__(self) -> None:
        _need(self.params >= 1, "--params", self.params, "1 or more parameters, such as 25e6")
        _need(0 < self.step_s < math.inf, "--step-seconds", self.step_s, "seconds above 0")
        _need(1 <= self.ranks <= 2**20, "--ranks", self.ranks, "1 to 1048576 ranks")
        _need(self.per_node >= 1, "--per-node", self.per_node, "1 or more ranks")
        _need(self.optimizer in OPTIMIZERS, "--optimizer", self.optimizer, " or ".join(OPTIMIZERS))
        _need(0 <= self.overlap_share <= 1, "--overlap-share", self.overlap_share, "a part of the step, 0 to 1")
        for period in self.periods:
            _need(period >= 1, "--periods", period, "1 or more steps")
        for density in self.densities:
            _need(0 < density <= 1, "--densities", density, "parts above 0, at most 1")

    @property
    def dense_bytes(self) -> int:
        """Bytes of all gradients, or of the model."""
        return 4 * self.params

    @property
    def nodes(self) -> list[range]:
        """The ranks of each node, filled one after the other."""
        return [range(first, min(first + self.per_node, self.ranks)) for first in range(0, self.ranks, self.per_node)]


def _need(holds: bool, option: str, value: object, what: str) -> None:
    if not holds:
        raise SettingError(f"{option} {value}: need {what}")


def bits_per_second(text: str) -> float:
    """Return a rate such as "1gbit". Raise SettingError if it is none."""
    for unit, factor in UNITS.items():
        number = text.lower().removesuffix(unit)
        if number != text.lower():
            try:
                rate = float(number) * factor
            except ValueError:
                break
            if 0 < rate < math.inf:
                return rate
    raise SettingError(f"--rate {text}: need a number and {', '.join(UNITS)}, such as 1gbit or 100mbit")


def at_rate(machine: Machine, rate: float, per_node: int) -> Machine:
    """Return the machine with links of `rate` bits per second, which the ranks of a node share."""
    return replace(machine, byte_s=8 * HEADERS / rate * per_node)
