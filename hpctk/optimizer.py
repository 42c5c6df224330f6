"""DistributedOptimizer: a torch optimizer that trains one model on many ranks, by any method.

    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    opt = hpctk.DistributedOptimizer(opt, hpctk.AdaCons(), model=model)
    ...
    opt.zero_grad(); loss.backward(); opt.step()

What counts is `.grad` when step() is called, however it got there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.utils.hooks import RemovableHandle

from hpctk.collectives.broadcast import broadcast_in_place
from hpctk.collectives.tuning import auto
from hpctk.comm import environment
from hpctk.comm.collective import collective
from hpctk.comm.world import world
from hpctk.errors import HpctkError, SettingError
from hpctk.methods.core import drift, survival
from hpctk.methods.core.buddies import Buddies
from hpctk.methods.core.method import GradientMethod, LocalStepMethod, Method
from hpctk.methods.core.replica import Replica
from hpctk.methods.core.run import Closure, GradientRun, LocalStepRun, Run
from hpctk.ways_in import handshake
from hpctk.ways_in.counters import Counters, StatsLike, wanted
from hpctk.ways_in.grad_scaler import LossScale, tell, unscale
from hpctk.ways_in.gradient_exchange import buckets_of
from hpctk.ways_in.gradient_steps import GradientSteps
from hpctk.ways_in.overlap import Overlap, release
from hpctk.ways_in.participant import Participant, note_one_rank

if TYPE_CHECKING:
    from hpctk.comm.world import Comm


class DistributedOptimizer(Participant, torch.optim.Optimizer):
    """An optimizer whose steps are shared by all ranks of a communicator.

    Collective over the communicator: making one, `step`, `synchronize`, `averaged_model` and leaving `join`.

    Making one compares method, settings, names, shapes and dtypes over all ranks (a difference is the same error
    on every rank), then gives rank 0's parameters, and buffers with `model`, to everyone.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Does the local steps: SGD, Adam, AdamW or any other whose step() needs no closure.
    method : Method
        Such as hpctk.SAEF(hpctk.TopK(0.01)).
    model : torch.nn.Module, optional
        Gives names to the parameters, and its buffers (batch norm) are broadcast, averaged for evaluation and
        protected.
    named_parameters : iterable of (str, Parameter), optional
        Instead of `model`, where there are no buffers to care for.
    schedule : str
        Of dense all-reduces: a name that `hpctk schedule list` shows, "mpi" (on a process group "torch") or "auto".
    overlap : bool
        Start communication during backward, bucket by bucket; for gradient methods.
    comm : MPI.Intracomm or torch.distributed.ProcessGroup, optional
        COMM_WORLD where not given.
    stats : path or StatsSettings, optional
        A folder in which every rank writes what it sends; HPCTK_STATS where not given.
    on_bad_gradient : {"raise", "skip"}
        What all ranks do when a gradient is NaN or infinite on one of them. Under a torch.amp.GradScaler such steps
        are skipped on all ranks in any case, and all scalers hear of it.
    check_every : int
        Steps between two looks whether the replicas have drifted apart (rates, and samples of what all ranks hold
        alike); 0 for never.
    on_lost_rank : {"raise", "shrink"}, optional
        What the others do when the process of a rank is gone: end the job, or go on without it (docs/faults.md; on
        Open MPI 5 started by `hpctk mpirun --with-ft`). HPCTK_ON_LOST_RANK where not given, else "raise".
    buddy : int, optional
        With "shrink": every so many steps each rank gives the next one a copy of its residuals, which are shared out
        among the others when it is lost. HPCTK_BUDDY where not given, else never.
    grad_scaler : torch.amp.GradScaler, optional
        The one that scales the loss; of use with overlap=True and with `synchronize`, which exchange gradients before
        it unscales them: what travels, and what residuals hold, is then unscaled from the first step on. Where not
        given it is known from the first step() on.
    """

    #: GradScaler asks us to step in any case, see hpctk/ways_in/grad_scaler.py.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        method: Method,
        *,
        model: torch.nn.Module | None = None,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
        schedule: str = "auto",
        overlap: bool = False,
        comm: Comm | None = None,
        stats: StatsLike = None,
        on_bad_gradient: str = "raise",
        check_every: int = 100,
        on_lost_rank: str | None = None,
        buddy: int | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        here = world(comm)
        with here.shared_errors("making a DistributedOptimizer"):
            handshake.check_not_wrapped(model)
            drift.check_every(check_every)
            if isinstance(optimizer, DistributedOptimizer):
                raise SettingError("optimizer is a DistributedOptimizer already: give the one that it was made from")
            handshake.check(optimizer, method, on_bad_gradient)
            names = handshake.names(optimizer, model, named_parameters)
            Overlap.check(method, overlap)
            auto.check(here, "allreduce", schedule)
            recorded = wanted(stats)
            chosen = environment.read("HPCTK_ON_LOST_RANK") if on_lost_rank is None else on_lost_rank
            survival.check(here, chosen)
            buddy = environment.read("HPCTK_BUDDY") if buddy is None and chosen == "shrink" else buddy
            Buddies.check(buddy, chosen)
        self._base = optimizer
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.method = method
        buffers = {} if model is None else dict(model.named_buffers())
        # Parameters that nobody optimizes are part of the model, too.
        parameters = names if model is None else dict(model.named_parameters())
        settings = [("schedule", schedule), ("overlap", overlap), ("on_bad_gradient", on_bad_gradient)]
        settings += [("stats", recorded), ("check_every", check_every), ("on_lost_rank", chosen)]
        settings += [("buddy", buddy), ("grad_scaler", grad_scaler is not None)]
        here.agree(
            "DistributedOptimizer", [*settings, *handshake.digest(optimizer, method, names, parameters, buffers)]
        )
        handshake.check_values({**parameters, **buffers})
        trained = {name: parameter for name, parameter in names.items() if parameter.requires_grad}
        frozen = {name: parameter for name, parameter in names.items() if name not in trained}
        self._replica = Replica(
            here, list(trained), list(trained.values()), model, frozen, schedule, on_bad_gradient, check_every
        )
        self._replica.hold_masters(optimizer)
        self._counters = Counters(self._replica, method, recorded)
        self._joining = False
        #: Steps that all ranks have made, so outside of join().
        self._common_steps = 0
        self._loss_scale = LossScale(self, grad_scaler)
        release(trained.values())
        with self._counters.preparing():
            broadcast_in_place(here, [x.detach() for x in (*parameters.values(), *buffers.values())])
        self._overlap: Overlap | None = None
        with self._counters.counting(), self._replica.float32():
            self._run, self._steps = self._begin(method, overlap)
        self._counters.begin()
        #: None where nobody looks after lost ranks.
        self._buddies: Buddies | None = None
        self._replica.buddies = buddy is not None
        if chosen == "shrink":
            self._buddies = Buddies(self._run, buddy)
            self._replica.survival = survival.Survival(here, self._forget, self._buddies)
        note_one_rank(here)

    def _forget(self, kept: list[int]) -> None:
        """Go on without ranks that are lost. Local."""
        self._run.forget(kept)
        self._counters.forget(kept)
        if self._replica.survival is not None and self._replica.survival.inside:
            self._run.counts["redone"] += 1
        if self._overlap is not None:
            self._overlap.give_up()
        if self._buddies is not None:
            self._buddies.forget(kept)

    def on_change(self, callback: Callable[[list[int]], object]) -> None:
        """Call `callback(kept)` whenever ranks were lost, after the step in which that was found out. Local.

        `kept` are the numbers that the ranks that are left had before, in the order of their new ones; `world` has the
        new size. Deal out data anew here. Nothing is ever called with on_lost_rank="raise".
        """
        if self._replica.survival is not None:
            self._replica.survival.listen(callback)

    def _begin(self, method: Method, overlap: bool) -> tuple[Run, GradientSteps | LocalStepRun]:
        """Return the method at work, and what makes its steps. Collective over the communicator."""
        if isinstance(method, GradientMethod):
            run = method.begin(self._replica)
            buckets = buckets_of(run) if overlap else None
            scale = partial(self._loss_scale.begin_exchange, run)
            if buckets is not None:
                self._overlap = Overlap(self._replica, buckets, self._counters.counting, scale)
            return run, GradientSteps(run, self._base, self._overlap, scale)
        assert isinstance(method, LocalStepMethod)
        steps = method.begin(self._replica, self._base)
        return steps, steps

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The base optimizer's groups: schedulers change them."""
        return self._base.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        # Torch's initialiser would make a list of its own.
        if hasattr(self, "_replica"):
            self._base.param_groups = groups

    @property
    def state(self) -> Any:
        """The base optimizer's state."""
        return self._base.state

    @state.setter
    def state(self, state: Any) -> None:
        if hasattr(self, "_replica"):
            self._base.state = state

    @property
    def finished(self) -> bool:
        """Whether a time budget has run out; the same on all ranks."""
        return self._run.finished

    def step(self, closure: Closure | None = None, *, loss: Any = None, grad_scaler: Any = None) -> Any:
        """Do one step, and return what the closure returns.

        Collective over the communicator; local for most steps of model methods.

        Parameters
        ----------
        closure : callable, optional
            Zeroes the gradients, runs forward and backward on one fixed minibatch, returns the loss.
        loss : float or tensor, optional
            The loss of this step, for methods that ask for it (LSGD) where there is no closure.
        grad_scaler : torch.amp.GradScaler, optional
            Given by `scaler.step(opt)`, never by users.
        """
        self._check_groups()
        if isinstance(self._run, GradientRun):
            self._loss_scale.unscale_residuals(self._run)
        with self._counters.counting(), self._replica.float32():
            scaled = grad_scaler is not None
            if scaled and closure is not None:
                raise SettingError(
                    "scaler.step(opt, closure): a GradScaler unscales what is in .grad before step(), so call backward "
                    "first and leave the closure out. A method that needs one (SASG) does not work under a GradScaler."
                )
            value = self._scaled_step(loss, grad_scaler) if scaled else self._steps.step(self._narrowed(closure), loss)
            self._end_common_step()
        self._counters.end_step(self._run.counts, value if loss is None else loss, self._lost_norms())
        return value

    def _narrowed(self, closure: Closure | None) -> Closure | None:
        """Return a closure that finds the model's own parameters, in half precision where they are."""
        if closure is None or self._replica.masters is None:
            return closure

        def narrowed() -> Any:
            with self._replica.forward_and_backward():
                return closure()

        return narrowed

    def _end_common_step(self) -> None:
        """Have residuals copied where that is due: not in join(), where ranks come to different numbers of steps."""
        if not self._joining:
            self._common_steps += 1
        if self._buddies is not None and not self._joining:
            self._buddies.end_step(self._run.common_steps(self._common_steps))

    def _lost_norms(self) -> dict[str, float]:
        return {} if self._buddies is None else self._buddies.take_norms()

    def _scaled_step(self, loss: Any, scaler: Any) -> Any:
        steps = self._steps
        with self._replica.under_scaler():
            if self._overlap is not None and isinstance(steps, GradientSteps):
                # Under way since backward.
                steps.ahead()
            exchanged = isinstance(steps, GradientSteps) and steps.synchronized
            self._loss_scale.learn(scaler, exchanged_scaled=exchanged)
            overflown = unscale(scaler, self)
            if isinstance(steps, GradientSteps) and steps.synchronized:
                # What came of the exchange is the same on all ranks, and so is what the scaler has found in it.
                steps.skipping |= overflown
            value = steps.step(None, loss)
        tell(scaler, self, steps.skipped)
        return value

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, also those of a synchronize() whose step is not to be made."""
        self.check_between_steps("zero_grad()")
        super().zero_grad(set_to_none)
        if isinstance(self._steps, GradientSteps):
            self._steps.forget()

    def check_between_steps(self, what: str) -> None:
        """Raise HpctkError where gradients are under way, so that `what` would leave the ranks apart."""
        if self._overlap is not None:
            self._overlap.check_between_steps(what)

    @collective
    def synchronize(self) -> None:
        """Exchange the gradients now, so that they can be looked at or clipped before step(). For gradient methods."""
        if not isinstance(self._steps, GradientSteps):
            raise SettingError(f"synchronize(): {type(self.method).__name__} does not exchange gradients")
        scaled = self._replica.under_scaler(self._loss_scale.scaler is not None)
        with scaled, self._counters.counting(), self._replica.float32(keep_gradients=True):
            self._steps.ahead()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients: backward inside starts no communication. Local; of use with overlap=True."""
        if self._overlap is None:
            yield
            return
        with self._overlap.paused():
            yield

    @contextmanager
    def averaged_model(self) -> Iterator[None]:
        """Let the model hold what the method wants evaluated, on every rank; afterwards what it held before.

        Collective over the communicator at its beginning. With `model`, floating point buffers are averaged too.
        Not inside `join`, where a rank that has run out of data could not take part.
        """
        if self._joining:
            raise HpctkError(
                "averaged_model() inside join(): ranks that have run out of data would not come. Evaluate after the "
                "block."
            )
        with super().averaged_model():
            yield

    @contextmanager
    def join(self) -> Iterator[None]:
        """Let ranks run out of data at different times: around the training loop, on every rank.

        Collective over the communicator at its end: a rank that is through goes on taking part, without
        gradients of its own, until all are. Means are over all ranks, as in PyTorch by default. With a gradient
        method the ranks that were through then take over what a rank holds that was not: its loop may have
        clipped gradients and stepped schedulers that they know nothing of.
        """
        self._joining = True
        try:
            yield
        finally:
            self._joining = False
        own_steps = self._counters.steps
        while self._idle_step():
            self._counters.end_step(self._run.counts, norms=self._lost_norms())
        with self._counters.counting(), self._replica.float32():
            if isinstance(self._steps, GradientSteps):
                self._steps.follow(own_steps)

    def _idle_step(self) -> bool:
        with self._counters.counting(), self._replica.float32():
            return self._steps.idle()

    def state_dict(self) -> dict[str, Any]:
        """Return the base optimizer's state and groups: what it would return without hpctk."""
        return self._base.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self._base.load_state_dict(state_dict)

    def register_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        """Call `hook(self)` before state_dict()."""
        return self._base.register_state_dict_pre_hook(lambda base: hook(self), prepend)

    def register_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        """Call `hook(self, state_dict)` after state_dict(); what it returns, if anything, is returned instead."""
        return self._base.register_state_dict_post_hook(lambda base, state: hook(self, state), prepend)

    def register_load_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        """Call `hook(self, state_dict)` before load_state_dict(); what it returns, if anything, is loaded instead."""
        return self._base.register_load_state_dict_pre_hook(lambda base, state: hook(self, state), prepend)

    def register_load_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        """Call `hook(self)` after load_state_dict()."""
        return self._base.register_load_state_dict_post_hook(lambda base: hook(self), prepend)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        raise HpctkError(
            "a DistributedOptimizer cannot be copied: it takes part in collective calls of all ranks. Copy the model "
            "and the base optimizer, and make a new DistributedOptimizer of them on every rank."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise HpctkError(
            "a DistributedOptimizer cannot be pickled: it takes part in collective calls of all ranks. Save "
            "opt.state_dict(), or everything with hpctk.save_checkpoint(path, opt, model)."
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: ranks have agreed on the parameters. Add it to the base optimizer and wrap that anew."""
        if hasattr(self, "_replica"):
            raise SettingError(
                "add_param_group: all ranks have agreed on the parameters. Give the group to the base optimizer "
                "and make a new DistributedOptimizer on every rank."
            )

    def _check_groups(self) -> None:
        known = len(self._replica.parameters) + len(self._replica.frozen)
        if sum(len(group["params"]) for group in self.param_groups) != known:
            raise SettingError(
                "the base optimizer was given other parameters than those that all ranks have agreed on: make a new "
                "DistributedOptimizer on every rank"
            )

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.method!r}, {type(self._base).__name__})"
