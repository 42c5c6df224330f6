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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch

from hpctk.compressors import Compressor
from hpctk.errors import HpctkError
from hpctk.methods.core.replica import Gradients, Replica
from hpctk.methods.core.resharding import SavedRanks
from hpctk.methods.core.step_status import StepStatus
from hpctk.settings import check

Closure = Callable[[], Any]


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

    @abstractmethod
    def begin(self, replica: Replica) -> Run:
        """Return the method at work on a replica. Collective over the communicator."""

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


class Run(ABC):
    """A method at work on one rank.

    Attributes
    ----------
    counts : Counter
        What happened so often: rounds, uploads, skips, skipped_steps, fallbacks.
    finished : bool
        Whether a time budget has run out; the same on all ranks.
    skipped : bool
        Whether the last step was not applied because a gradient was bad.
    """

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.counts: Counter[str] = Counter()
        self.finished = False
        self.skipped = False

    @abstractmethod
    def step(self, closure: Closure | None, loss: float | None) -> Any:
        """Do one optimizer step and return what the closure returned. Collective, but for local steps."""

    @abstractmethod
    def idle(self) -> bool:
        """Take part in what the others do without data of one's own; return whether any rank has some left.

        Collective over the communicator: it pairs with a step, or with a round of a model method.
        """

    def consensus_parameters(self) -> list[torch.Tensor] | None:
        """Return the parameters that the method wants evaluated, None for those the model holds.

        Collective over the communicator.
        """
        return None

    def local_state(self) -> dict[str, Any]:
        """Return what this rank alone knows: tensors, numbers and dicts of them. Not copies."""
        return {}

    def load_local_state(self, state: dict[str, Any]) -> None:
        """Go on from what `local_state` returned."""
        if state:
            raise HpctkError(f"{type(self).__name__} keeps no state, but was given {', '.join(state)}")

    def resized_state(self, earlier: SavedRanks) -> dict[str, Any]:
        """Return the local state to go on from where another number of ranks saved theirs.

        Rank 0's by default, which is right for what all ranks have in common.
        """
        state: dict[str, Any] = earlier.first()
        return state

    def shared_state(self) -> Mapping[str, torch.Tensor]:
        """Return what all ranks hold alike between steps, by name: the parameters, unless a method says otherwise."""
        return self.replica.named(self.replica.values)

    def exchange_status(
        self, *, active: bool = True, gradients: Callable[[], Gradients] | None = None
    ) -> StepStatus:
        """Learn what all ranks have: gradients, bad ones, data. Collective over the communicator."""
        return self.replica.exchange_status(
            self.shared_state, self.prepare, active=active, gradients=gradients
        )

    def prepare(self, gradients: Gradients) -> None:  # noqa: B027 - most methods have nothing to do here
        """Raise HpctkError where this rank cannot make the step, on gradients that are finite; nothing by default.

        Before the ranks open the step, which tells all of them. Changes nothing that lasts.
        """

    def skip_or_raise(self, status: StepStatus) -> bool:
        """Return whether all ranks skip this step because a gradient is bad; raise where that was asked for."""
        if status.bad is None:
            return False
        # Not applied in either case.
        self.counts["skipped_steps"] += 1
        if self.replica.on_bad_gradient == "raise" and not self.replica.scaled:
            rank, name = status.bad
            raise HpctkError(
                f"rank {rank}: the gradient of {name!r} is NaN or infinite. It was not applied; "
                "on_bad_gradient='skip' would skip such steps on all ranks and count them, as a GradScaler wants it."
            )
        return True


def evaluate(closure: Closure | None) -> Any:
    """Return what the closure returns, with gradients enabled; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


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
