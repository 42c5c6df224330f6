"""What the ranks tell each other when a step begins: one small message, and the same outcome on all of them.

    what travels, each with its negative where all must be equal     what comes of it
    which optimizer this is, how many steps it has done,             MismatchError: the ranks do not share this step
    the names, shapes and dtypes of its parameters
    which parameters have a gradient                                 a second message says which, where ranks differ
    now and then: rates and samples of what all hold alike           MismatchError: the replicas have drifted apart
    the first bad gradient                                           all ranks skip the step, or all raise
    the rank, where preparing the step failed                        all ranks raise its error
    whether this rank has data left                                  `active`
    the local steps of a round, where a rule says them               MismatchError: the rule sees different rates

Nothing that lasts has changed when the message is sent, so whatever comes of it leaves the state of the step before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hpctk.comm.agreement import digest_of
from hpctk.comm.world import World
from hpctk.errors import MismatchError
from hpctk.methods.core import drift

#: Greater than any code of a bad gradient and any digest.
NONE = 2**62

#: Returns what all ranks hold alike, by name.
Shared = Callable[[], Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class StepStatus:
    """What the ranks found out about a step, the same on all.

    Attributes
    ----------
    has : tuple of bool
        Which parameters have a gradient on some rank.
    bad : (int, str) or None
        The first rank whose gradient is NaN or infinite, and the parameter.
    active : bool
        Whether any rank still has data.
    period : int or None
        Of the ranks that have data, where it was compared.
    """

    has: tuple[bool, ...]
    bad: tuple[int, str] | None
    active: bool
    period: int | None = None

    @property
    def travels(self) -> bool:
        """Whether gradients are exchanged: some rank has one, and none is bad."""
        return self.active and self.bad is None and any(self.has)


@dataclass
class LocalStatus:
    """What one rank has to say of a step.

    Attributes
    ----------
    present : sequence of bool
        Which parameters have a gradient here; empty where none travels.
    bad : int or None
        The number of the first parameter with a bad gradient.
    active : bool
        Whether this rank has data.
    error : Exception or None
        Why this rank cannot make the step.
    """

    present: Sequence[bool] = ()
    bad: int | None = None
    active: bool = True
    error: Exception | None = None


@dataclass
class StatusExchange:
    """The opening messages of one optimizer's steps.

    Parameters
    ----------
    world : World
    names : list of str
        Of the parameters.
    layout : list of (str, str)
        Names, with shapes and dtypes as the ranks have agreed on them.
    check_every : int
        Steps between two looks for drift; 0 for never.
    """

    world: World
    names: list[str]
    layout: list[tuple[str, str]]
    check_every: int = 100
    #: Which of the optimizers on these ranks this is, and how many steps it has opened; the same on all ranks.
    number: int = field(init=False)
    opened: int = field(init=False, default=0)
    _layout: int = field(init=False)

    def __post_init__(self) -> None:
        # All ranks make their optimizers in the same order: making one is collective.
        self.number = self.world.attached.get(StatusExchange, 0) + 1
        self.world.attached[StatusExchange] = self.number
        self._layout = digest_of(repr(self.layout).encode())

    def check_same_step(self) -> None:
        """Raise MismatchError unless all ranks are in the same step of the same optimizer. Collective."""
        code = self._identity()
        least, negated = self.world.minimum([code, -code], "comparing steps")
        if least != -negated:
            self._refuse_to_mix()

    def exchange(
        self,
        mine: LocalStatus,
        groups: Sequence[Mapping[str, Any]],
        shared: Shared,
        steps: int = 1,
        operation: str = "opening a step",
        period: int | None = None,
    ) -> StepStatus:
        """Tell the others, and return what all together have said. Collective over the communicator.

        Parameters
        ----------
        mine : LocalStatus
        groups : sequence of mappings
            The base optimizer's.
        shared : callable
            Returns what all ranks hold alike; asked only where it is time to compare it.
        steps : int
            Steps between two openings, where not every step has one.
        operation : str
        period : int or None
            Local steps of this round, to be compared; on all ranks, or on none.
        """
        here, size = self.world, self.world.size
        present, same = digest_of(bytes(mine.present)), self._identity()
        looks = self._samples(groups, shared, steps) if mine.active and mine.error is None else None
        sample = NONE if looks is None else digest_of(repr(looks).encode())
        periods = [period, -period] if period is not None and mine.active and mine.error is None else [NONE, NONE]
        least = here.minimum(
            [
                present,
                -present,
                same,
                -same,
                sample,
                NONE if looks is None else -sample,
                NONE if mine.bad is None else here.rank * len(self.names) + mine.bad,
                here.rank if mine.active else size,
                int(mine.active),
                size if mine.error is None else here.rank,
                *(() if period is None else periods),
            ],
            operation,
        )
        if least[2] != -least[3]:
            self._refuse_to_mix()
        self.opened += 1
        if least[9] < size:
            raise here.shared_error(mine.error, least[9], operation) from mine.error
        of_all = least[10] if period is not None and least[7] < size else None
        if of_all is not None and of_all != -least[11]:
            raise MismatchError(
                f"{operation}: it comes after {of_all} local steps on one rank and after {-least[11]} on another. A "
                "rule for the period must find the same learning rate and the same number of steps on every rank."
            )
        # Ranks without data have followed no schedule of rates since.
        if least[8] and looks is not None and least[4] != -least[5]:
            self._refuse_drift(looks)
        has = list(mine.present)
        if least[0] != -least[1]:
            has = [not lacking for lacking in here.minimum([int(not one) for one in has], operation)]
        return StepStatus(tuple(has), self._decoded(least[6]), least[7] < size, of_all)

    def _identity(self) -> int:
        return digest_of(b"%d %d %d" % (self.number, self.opened, self._layout))

    def _samples(
        self, groups: Sequence[Mapping[str, Any]], shared: Shared, steps: int
    ) -> list[tuple[str, object]] | None:
        if not self.check_every or self.world.size == 1:
            return None
        number, rest = divmod(self.opened, max(1, self.check_every // steps))
        return None if rest else drift.items(groups, shared(), number)

    def _refuse_to_mix(self) -> None:
        """Raise what tells the ranks apart. Collective over the communicator."""
        seen = [("the optimizer", f"number {self.number}"), ("its steps so far", self.opened), *self.layout]
        try:
            self.world.agree("this step", seen)
        except MismatchError as error:
            raise MismatchError(
                f"{error} Optimizers are numbered as they were made; step them in the same order on every rank."
            ) from None

    def _refuse_drift(self, looks: list[tuple[str, object]]) -> None:
        """Raise what has drifted apart. Collective over the communicator."""
        try:
            self.world.agree("replicas", looks)
        except MismatchError as error:
            raise MismatchError(
                f"{error} The replicas have drifted apart: change rates and load weights on every rank alike. "
                "check_every=0 turns this look off."
            ) from None

    def _decoded(self, code: int) -> tuple[int, str] | None:
        if code == NONE:
            return None
        rank, i = divmod(code, len(self.names))
        return rank, self.names[i]


def prepared(find: Callable[[], LocalStatus]) -> LocalStatus:
    """Return what `find` finds; where it fails, that: the other ranks must hear of it."""
    try:
        return find()
    except Exception as error:
        return LocalStatus(error=error)
