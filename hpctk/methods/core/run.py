"""A method at work on one rank: what it keeps, and how a step is prepared, exchanged and committed.

GradientRun    backward -> exchange the gradients -> base step
UpdateRun      [step ahead] -> backward -> local step -> exchange the difference -> apply
ModelRun       local steps -> now and then exchange the parameters -> pull     (model_step.py)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from hpctk import torch_private
from hpctk.collectives.bucket_memory import BucketMemory
from hpctk.collectives.bucket_result import BucketResult
from hpctk.errors import HpctkError, TensorError
from hpctk.methods.core.replica import Gradients, Look, Replica, look, look_at_others
from hpctk.methods.core.resharding import SavedRanks
from hpctk.methods.core.step_status import LocalStatus, StepStatus, prepared
from hpctk.methods.core.survival import Undo, copied

Closure = Callable[[], Any]
#: Applies what was exchanged. Local.
Commit = Callable[[], None]


class Run:
    """A method at work on one rank.

    Attributes
    ----------
    counts : Counter
        What happened so often: rounds, uploads, skips, skipped_steps, fallbacks.
    finished : bool
        Whether a time budget has run out; the same on all ranks.
    set_aside : list of torch.Tensor or None
        The parameters, as long as `averaged_model` has something else in their place.
    """

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.counts: Counter[str] = Counter()
        self.finished = False
        self.set_aside: list[torch.Tensor] | None = None
        #: A copy of what the method kept before the last exchange, where ranks may be lost in it.
        self._kept_state: dict[str, Any] | None = None
        #: What was found in the gradients of the step that was opened last: nobody has to look again.
        self.look = Look(None, 0.0)

    def evaluated_parameters(self) -> list[torch.Tensor] | None:
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

    def kept_state(self) -> dict[str, Any]:
        """Return what `undo` puts back by `load_local_state`: the local state. Local. Not copies."""
        return self.local_state()

    def undo(self) -> Undo:
        """Return what puts back what this rank keeps of the method, should the exchange that comes not count. Local."""
        state, counts = copied(self.kept_state(), self._kept_state), self.counts.copy()
        self._kept_state = state

        def undo() -> None:
            # What is loaded may be held from now on.
            self._kept_state = None
            self.load_local_state(state)
            self.counts = counts

        return undo

    def forget(self, kept: list[int]) -> None:
        """Forget ranks that are lost; `kept` are the numbers that the others had, in their new order.

        Local; nothing by default. What only all ranks together can know waits for the next exchange.
        """

    def common_steps(self, own: int) -> int:
        """Return how many steps all ranks have done, given this rank's: as many, unless some do more. Local."""
        return own

    def lasting(self, path: tuple[str, ...], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return tensors of the local state in a form that means the same some steps later (buddies.py); as they are.

        Local. Not in place.
        """
        return tensors

    def of_now(self, path: tuple[str, ...], held: Mapping[tuple[str, ...], Any]) -> dict[str, torch.Tensor]:
        """Return tensors that `lasting` returned some steps ago as they would be in the local state now. Local."""
        return dict(held.get(path, {}))

    def load_recovered(self, state: dict[str, Any]) -> None:
        """Go on from a local state with shares of what lost ranks had. Local."""
        self.load_local_state(state)

    def open_step(
        self,
        gradients: Callable[[], Gradients],
        groups: Sequence[Mapping[str, Any]] = (),
        *,
        active: bool = True,
        looks: Mapping[str, Look] = MappingProxyType({}),
    ) -> StepStatus:
        """Prepare a step, and learn what all ranks have: gradients, bad ones, data, errors. Changes nothing.

        Collective over the communicator: one small message, a second one in steps in which some ranks have gradients
        that others lack.

        Parameters
        ----------
        gradients : callable
            Returns this rank's, one of each parameter.
        groups : sequence of mappings
            The base optimizer's, where it is known: their rates are compared now and then.
        active : bool
            Whether this rank has data.
        looks : mapping of str to Look
            What was found in gradients that have been looked at, by name.
        """

        def find() -> LocalStatus:
            held = gradients()
            self.look = look_at_others(self.replica.names, held, looks) if looks else look(held)
            if self.look.bad is None:
                self.prepare(held)
            return LocalStatus([gradient is not None for gradient in held], self.look.bad, active)

        return self.replica.status.exchange(prepared(find), groups, self.shared_state)

    def prepare(self, gradients: Gradients) -> None:
        """Raise HpctkError where this rank cannot make the step with these finite gradients; nothing by default.

        Local, before the step is opened, which tells all ranks. Changes nothing that lasts.
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


class GradientRun(Run, ABC):
    """A gradient method at work: a step is prepared, exchanged and committed.

    ways_in/gradient_exchange.py calls the three, for every way in.
    """

    def __init__(self, replica: Replica) -> None:
        super().__init__(replica)
        #: What writes results into gradients once they count.
        self._unwritten: list[Callable[[], None]] = []

    def begin_anew(self) -> None:
        """Forget what waits to be written: it is of an attempt that does not count. Local."""
        self._unwritten.clear()

    @abstractmethod
    def exchange(self, gradients: dict[str, torch.Tensor]) -> None:
        """Replace gradients, contiguous and by name, by what the base optimizer is to see.

        Collective over the communicator. In place.
        """

    def exchange_into(self, gradients: dict[str, torch.Tensor], into: dict[str, torch.Tensor]) -> None:
        """Write into tensors like them what the base optimizer is to see, and leave the gradients as they are.

        Collective over the communicator. Where a rank is lost meanwhile, the others begin anew with their gradients.
        Of those that are `expendable` the caller may give the gradients themselves: some are written by `commit` only.
        """
        torch_private.foreach_copy_(list(into.values()), list(gradients.values()))
        self.exchange(into)

    def expendable(self, gradients: dict[str, torch.Tensor], *, scaled: bool) -> Collection[str]:
        """Return the names of those gradients that may be written over: none by default. Local.

        `undo` does without them, or they stay as they are until `commit`; not where results are going to be `scaled`
        before that.
        """
        return ()

    def commit(self) -> None:
        """Keep what the last exchange has taught, now that its result is going to be used. Local.

        And write into the gradients what waits for that.
        """
        self.counts["rounds"] += 1
        for write in self._unwritten:
            write()
        self._unwritten.clear()

    @staticmethod
    def _in_place(gradients: dict[str, torch.Tensor], into: dict[str, torch.Tensor]) -> bool:
        """Return whether some results are to go into the gradients themselves."""
        return any(into[name] is gradient for name, gradient in gradients.items())

    def rescale(self, factor: float) -> None:
        """Take what is left of earlier gradients for `factor` times as much: the loss is scaled otherwise now.

        Nothing by default. In place.
        """

    def meet(self, base: torch.optim.Optimizer) -> None:
        """Learn which optimizer will step on what comes of the exchanges; nothing by default. Local."""

    def apply(self, base: torch.optim.Optimizer) -> None:
        """Let the base optimizer step on the exchanged gradients."""
        base.step()


class BucketRun(GradientRun):
    """A gradient method that can exchange a part of the gradients before the others are there."""

    def __init__(self, replica: Replica) -> None:
        super().__init__(replica)
        #: Of its buckets.
        self.memory = BucketMemory()

    @property
    @abstractmethod
    def by_buckets(self) -> bool:
        """Whether it can with these settings: then backward may overlap."""

    def meet_buckets(self) -> None:
        """Get ready for buckets, before the first one; nothing by default. Collective over the communicator."""

    @abstractmethod
    def start_bucket(self, lane: int, gradients: dict[str, torch.Tensor], *, in_order: bool = False) -> Any:
        """Start exchanging some gradients; return what `finish_buckets` needs.

        Collective over the communicator. Not in place. `lane` and the next one are the engine's, reserved for this
        bucket: ranks come to it at different times, unless it is known that they start all their collectives
        `in_order`. What lasts is changed by `commit` only.
        """

    @abstractmethod
    def finish_buckets(self, buckets: list[Any], has: set[str]) -> list[BucketResult]:
        """Return what the base optimizer is to see of each bucket, flat.

        Collective over the communicator. `has` names the parameters that have a gradient on some rank.
        """

    def forget_buckets(self) -> None:
        """Leave the memory of buckets to messages that may still be on their way. Local."""
        self.memory = BucketMemory()


class LocalStepRun(Run, ABC):
    """An update or model method at work.

    Attributes
    ----------
    base : torch.optim.Optimizer
        Does the local steps.
    skipped : bool
        Whether the last step was not applied because a gradient was bad.
    """

    def __init__(self, replica: Replica, base: torch.optim.Optimizer) -> None:
        super().__init__(replica)
        self.base = base
        self.skipped = False

    @abstractmethod
    def step(self, closure: Closure | None, loss: float | None) -> Any:
        """Do one optimizer step and return what the closure returned. Collective, but for local steps."""

    @abstractmethod
    def idle(self) -> bool:
        """Take part in what the others do without data of one's own; return whether any rank has some left.

        Collective over the communicator: it pairs with a step, or with a round of a model method.
        """


class UpdateRun(LocalStepRun):
    """An update method at work: derive, and say what an iteration does once gradients are known to be good."""

    def __init__(self, replica: Replica, base: torch.optim.Optimizer) -> None:
        super().__init__(replica, base)
        #: Iterations so far, t; the same on all ranks. One that all ranks skipped does not count.
        self.t = 0
        #: Whether the base optimizer has stepped in this iteration.
        self.stepped = False
        #: Copies of the model and of what the base optimizer keeps, where ranks may be lost.
        self._kept_model: dict[str, Any] | None = None
        #: Why this rank's last update could not be sent: the next step tells all ranks.
        self._unsent: HpctkError | None = None

    def prepare(self, gradients: Gradients) -> None:
        """Raise what came up when the last step was under way already."""
        error, self._unsent = self._unsent, None
        if error is not None:
            raise error

    def keep_unsent(self, error: HpctkError, fate: str) -> None:
        """Let all ranks raise `error` in the next step: this one goes on, without an update of this rank.

        `fate` is what became of that update, as a sentence.
        """
        self._unsent = TensorError(f"{error} {fate}")

    @abstractmethod
    def exchange(self, *, active: bool) -> Commit | None:
        """Exchange what one iteration sends, or take part in the others' where this rank has no data.

        Collective over the communicator. Return what applies it, in place; None where that is done. Where a rank is
        lost meanwhile it is called again, after `undo`: that puts back what it has changed, and sets `stepped` back,
        unless the base optimizer's step is to stay.
        """

    def step(self, closure: Closure | None, loss: float | None) -> Any:
        """Do one iteration on the gradient that is there, or that the closure makes."""
        value = evaluate(closure)
        self._together(self._iterate)
        return value

    def _together(self, iterate: Callable[[], tuple[bool, Commit]]) -> bool:
        """Do an iteration, and apply what came of it; return whether any rank has data. Collective."""
        self.stepped = False
        active, _ = self.replica.together(iterate, self.undo, lambda made: made[1]())
        self.concluded()
        return active

    def concluded(self) -> None:
        """Do what follows an iteration that counts; nothing by default. Collective over the communicator."""

    def _iterate(self, *, active: bool = True) -> tuple[bool, Commit]:
        """Open an iteration and exchange; return whether any rank has data, and what applies what came of it.

        Collective over the communicator.
        """
        status = self.open_step(self.replica.gradients, self.base.param_groups, active=active)
        return status.active, self._advance(status, active=active) if status.active else nothing

    def undo(self) -> Undo:
        """Return what puts back model, base optimizer and all that the method keeps. Local."""
        replica, base = self.replica, self.base
        undo_method, t, stepped = super().undo(), self.t, self.stepped
        # No message is about gradients here, so that they need no copy.
        gradients = [parameter.grad for parameter in replica.parameters]
        held: dict[str, Any] = {"base": dict(base.state)}
        if "parameters" not in (self._kept_state or {}):
            held["values"] = replica.named(replica.values)
        kept = self._kept_model = copied(held, self._kept_model)

        def undo() -> None:
            self._kept_model = None
            base.state.clear()
            base.state.update(kept["base"])
            undo_method()
            if "values" in kept:
                replica.load(list(kept["values"].values()))
            for parameter, gradient in zip(replica.parameters, gradients, strict=True):
                parameter.grad = gradient
            self.t, self.stepped = t, stepped

        return undo

    def idle(self) -> bool:
        """Take part in an iteration without a gradient of one's own."""
        for parameter in self.replica.parameters:
            parameter.grad = None
        return self._together(lambda: self._iterate(active=False))

    def _advance(self, status: StepStatus, *, active: bool) -> Commit:
        self.skipped = self.skip_or_raise(status)
        if self.skipped:
            return nothing
        apply = self.exchange(active=active)

        def commit() -> None:
            if apply is not None:
                apply()
            self.t += 1

        return commit


def nothing() -> None:
    """Apply nothing."""


def evaluate(closure: Closure | None) -> Any:
    """Return what the closure returns, with gradients enabled; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
