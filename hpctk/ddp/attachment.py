"""hpctk under torchrun: methods for DistributedDataParallel, and for bare models, over torch.distributed.

    model = DistributedDataParallel(model)
    hpctk.ddp.attach(model, hpctk.AdaCons())                                    # gradient methods

    opt = hpctk.ddp.DistributedOptimizer(opt, hpctk.MGRAWA(), model=model)      # all others, on the bare model

No MPI is needed or started. `attach` registers a communication hook: DDP hands over its buckets during backward and
finds in them what the method makes of all ranks' gradients. Where a part of the gradients can be exchanged by itself
(AdaCons, Mean with all compressors but PowerSGD) a bucket starts when it is full and is driven by a thread while
backward goes on; elsewhere all are exchanged when the last one is there.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hpctk import optimizer, torch_private
from hpctk.collectives.engine.engine import engine_of
from hpctk.collectives.tuning import auto
from hpctk.comm import buffers
from hpctk.comm.world import World, world
from hpctk.ddp.driver import Driver
from hpctk.ddp.dropped_step import DroppedStep
from hpctk.errors import HpctkError, SettingError
from hpctk.methods.core import drift
from hpctk.methods.core.method import GradientMethod, Method
from hpctk.methods.core.replica import Replica
from hpctk.methods.core.run import GradientRun
from hpctk.methods.core.step_status import StatusExchange, StepStatus
from hpctk.methods.mean import Mean
from hpctk.telemetry.settings import StatsSettings
from hpctk.ways_in import handshake
from hpctk.ways_in.counters import Counters, StatsLike, kept_loss, wanted
from hpctk.ways_in.gradient_exchange import buckets_of, exchange_gradients
from hpctk.ways_in.participant import Participant, note_one_rank


class DistributedOptimizer(optimizer.DistributedOptimizer):
    """hpctk.DistributedOptimizer over torch.distributed, for all methods on a bare model.

    Collective over the group. Parameters are those of hpctk.DistributedOptimizer, but for:

    Parameters
    ----------
    group : ProcessGroup, optional
        The default group where not given.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        method: Method,
        *,
        model: torch.nn.Module | None = None,
        group: dist.ProcessGroup | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(optimizer, method, model=model, comm=_initialised(group), **settings)


def attach(
    ddp_model: DistributedDataParallel,
    method: Method,
    *,
    schedule: str = "auto",
    stats: StatsLike = None,
    on_bad_gradient: str = "raise",
    check_every: int = 100,
    grad_scaler: torch.amp.GradScaler | None = None,
) -> Attached:
    """Let a gradient method exchange the gradients of a DistributedDataParallel model.

    Collective over the model's process group. Once for each model, before its first backward.

    Parameters
    ----------
    ddp_model : DistributedDataParallel
    method : Method
        Mean, with any compressor, or AdaCons.
    schedule : str
        Of dense all-reduces: a name that `hpctk schedule list` shows, "torch" or "auto".
    stats : path or StatsSettings, optional
        A folder in which every rank writes what it sends; HPCTK_STATS where not given.
    on_bad_gradient : {"raise", "skip"}
        What all ranks do when a gradient is NaN or infinite on one of them. "raise" raises the same error from
        backward() on all, and leaves every parameter's `.grad` None. "skip" leaves an infinity on all ranks, as DDP
        itself does, so that a GradScaler finds it everywhere; a step() on it changes nothing.
    check_every : int
        Steps between two looks whether the parameters have drifted apart; 0 for never.
    grad_scaler : torch.amp.GradScaler, optional
        The one that scales the loss: what travels, and what residuals hold, is then unscaled. Without it residuals
        stay in the scale that they were made in.
    """
    if not isinstance(ddp_model, DistributedDataParallel):
        raise SettingError(
            f"attach: need a model in torch.nn.parallel.DistributedDataParallel, not {type(ddp_model).__name__}; for a "
            "bare model use hpctk.ddp.DistributedOptimizer"
        )
    here = world(ddp_model.process_group)
    with here.shared_errors("hpctk.ddp.attach"):
        _check(ddp_model.module, method, on_bad_gradient)
        auto.check(here, "allreduce", schedule)
        drift.check_every(check_every)
        recorded = wanted(stats)
    attached = Attached(
        here, ddp_model.module, cast(GradientMethod, method), schedule, on_bad_gradient, recorded, check_every,
        zeros_are_absent=ddp_model.find_unused_parameters or ddp_model.static_graph, grad_scaler=grad_scaler,
    )  # fmt: skip
    try:
        ddp_model.register_comm_hook(attached, lambda state, bucket: state.arrived(bucket))
    except RuntimeError as error:
        raise SettingError(f"attach: this model has a communication hook already ({error})") from error
    return attached


class CommState:
    """What `comm_hook` works with, for those who know PowerSGDState and powerSGD_hook.

        state = hpctk.ddp.CommState(hpctk.Mean(hpctk.TopK(0.01)), model)
        ddp_model.register_comm_hook(state, hpctk.ddp.comm_hook)

    Local to make, also before there are process groups or a DistributedDataParallel: the ranks meet in the first
    backward. Where the wrapped model is at hand `attach` does the same, and finds more mistakes before training.

    Parameters
    ----------
    method : Method
        Mean, with any compressor, or AdaCons.
    model : torch.nn.Module
        The bare one, which gives names to the parameters; or the DistributedDataParallel.
    process_group : ProcessGroup, optional
        That of the DistributedDataParallel; the default group where not given.
    find_unused_parameters : bool
        Whether DistributedDataParallel was asked to, or has a static graph: parameters that no rank has used then come
        as zeros.
    **settings
        Those of `attach`: schedule, stats, on_bad_gradient, check_every, grad_scaler.
    """

    def __init__(
        self,
        method: Method,
        model: torch.nn.Module,
        process_group: dist.ProcessGroup | None = None,
        *,
        find_unused_parameters: bool = False,
        schedule: str = "auto",
        stats: StatsLike = None,
        on_bad_gradient: str = "raise",
        check_every: int = 100,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self._module, self._grad_scaler = model, grad_scaler
        self._zeros_are_absent = find_unused_parameters
        if isinstance(model, DistributedDataParallel):
            process_group = model.process_group if process_group is None else process_group
            self._module = model.module
            self._zeros_are_absent |= model.find_unused_parameters or model.static_graph
        _check(self._module, method, on_bad_gradient)
        self._method, self._group = cast(GradientMethod, method), process_group
        self._settings = (schedule, on_bad_gradient, wanted(stats), check_every)
        self._attached: Attached | None = None

    @property
    def attached(self) -> Attached:
        """The method at work, for checkpoints and statistics. Collective over the group until the first backward."""
        if self._attached is None:
            here = world(_initialised(self._group))
            schedule, _, _, check_every = self._settings
            with here.shared_errors("hpctk.ddp.comm_hook"):
                auto.check(here, "allreduce", schedule)
                drift.check_every(check_every)
            self._attached = Attached(
                here, self._module, self._method, *self._settings, zeros_are_absent=self._zeros_are_absent,
                grad_scaler=self._grad_scaler,
            )  # fmt: skip
        return self._attached


def comm_hook(state: CommState, bucket: Any) -> Any:
    """Exchange a bucket of gradients by a method: the hook to register with a CommState.

    Collective over the model's process group, during backward.
    """
    return state.attached.arrived(bucket)


# DDP compares annotations with classes, and takes the text of one for a wrong one.
comm_hook.__annotations__.clear()


class Attached(Participant):
    """A gradient method at work on a DistributedDataParallel model. Made by `attach`."""

    def __init__(
        self,
        here: World,
        module: torch.nn.Module,
        method: GradientMethod,
        schedule: str,
        on_bad_gradient: str,
        stats: StatsSettings | None,
        check_every: int,
        *,
        zeros_are_absent: bool,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        shapes = [(name, f"{p.dtype} {tuple(p.shape)}") for name, p in named.items()]
        settings: list[tuple[str, object]] = [
            ("schedule", schedule),
            ("on_bad_gradient", on_bad_gradient),
            ("stats", stats),
        ]
        settings.append(("check_every", check_every))
        here.agree("hpctk.ddp.attach", [*settings, *method.settings().items(), *shapes])
        self._replica = Replica(
            here,
            list(named),
            list(named.values()),
            schedule=schedule,
            on_bad_gradient=on_bad_gradient,
            check_every=check_every,
        )
        self._counters = Counters(self._replica, method, stats)
        with self._counters.counting():
            self._run: GradientRun = method.begin(self._replica)
        self.method = method
        self._loss: Any = None
        self._buckets = buckets_of(self._run)
        self._driver = Driver(engine_of(here))
        self._names = {id(parameter): name for name, parameter in named.items()}
        # A parameter that no rank has used comes as zeros; DDP then leaves its .grad alone.
        self._zeros_are_absent = zeros_are_absent
        self._grad_scaler = grad_scaler
        #: Of the loss of this backward.
        self._scale = 1.0
        #: What DDP has handed over in this backward: its buffers, the futures of these, and the gradients by name.
        self._handed: list[tuple[torch.Tensor, Any]] = []
        self._gradients: dict[str, torch.Tensor] = {}
        self._dropped = DroppedStep(named.values())
        self._counters.begin()
        note_one_rank(here)

    def note_loss(self, loss: Any) -> None:
        """Say, before backward, what the loss is; for the statistics."""
        self._loss = kept_loss(loss)

    def check_between_steps(self, what: str) -> None:
        """Raise HpctkError where backward has not ended, so that `what` would leave the ranks apart."""
        if self._handed:
            raise HpctkError(f"{what} in the middle of backward")

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: DDP's users have an optimizer of their own, and its state is theirs to keep."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""

    def arrived(self, bucket: Any) -> Any:
        """Take a bucket (dist.GradBucket) and return the future of its exchange. Collective over the group."""
        if bucket.index() == 0:
            self._begin_backward()
        buffer = bucket.buffer()
        future: Any = torch.futures.Future(devices=[] if buffer.is_cpu else [buffer.device])
        self._handed.append((buffer, future))
        gradients = {
            self._names[id(parameter)]: _laid_out_like(parameter, gradient)
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True)
        }
        self._gradients |= gradients
        if self._buckets is not None:
            with self._driver.lock, self._counters.counting():
                # DDP hands over the same buckets in the same order on all ranks.
                self._buckets.start(gradients.items(), in_order=True, scale=self._scale)
            if not bucket.is_last():
                self._driver.start()
        if bucket.is_last():
            self._driver.stop()
            with self._counters.counting():
                self._finish()
            self._counters.end_step(self._run.counts, self._loss)
            self._loss = None
        return future

    def _begin_backward(self) -> None:
        self._forget()
        self._dropped.over()
        self._scale = 1.0 if self._grad_scaler is None else float(self._grad_scaler.get_scale())
        if self._replica.world.attached[StatusExchange] > 1:
            # Another model's buckets may come on another rank: they would mix before anybody notices.
            self._replica.status.check_same_step()

    def _forget(self) -> None:
        self._handed, self._gradients = [], {}
        if self._buckets is not None:
            self._buckets.forget()

    def _finish(self) -> None:
        """Exchange what has not left yet, bring home what has, and hand it back. Collective over the group."""
        gradients = self._gradients
        status, made = exchange_gradients(
            self._run,
            lambda: [self._present(gradients.get(name)) for name in self._replica.names],
            # A rank without data, under DDP's join, takes part outside of any backward, with an earlier model.
            active=torch_private.backward_id() is not None,
            buckets=self._buckets,
            scale=self._scale,
        )
        for name, gradient in made.items():
            gradients[name].copy_(gradient)
        for buffer, future in self._handed:
            if not buffer.is_cpu:
                buffers.synchronize(buffer)
            future.set_result(buffer)
        self._forget()
        if status.bad is not None:
            torch_private.after_backward(lambda: self._drop(status))

    def _present(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        absent = gradient is None or (self._zeros_are_absent and not gradient.any())
        return None if absent else gradient

    def _drop(self, status: StepStatus) -> None:
        """Leave nothing to step on, and raise where that was asked for."""
        assert status.bad is not None
        if self._replica.on_bad_gradient == "skip":
            self._dropped.begin(self._replica.names.index(status.bad[1]))
        else:
            self._dropped.clear()
        self._run.skip_or_raise(status)

    def __repr__(self) -> str:
        return f"Attached({self.method!r})"


def _check(module: torch.nn.Module, method: Any, on_bad_gradient: str) -> None:
    handshake.check_method(method, on_bad_gradient)
    if not isinstance(method, GradientMethod):
        raise SettingError(
            f"attach: {type(method).__name__} does not exchange gradients: use "
            "hpctk.ddp.DistributedOptimizer(optimizer, method, model=model) on the bare model, not wrapped in "
            "DistributedDataParallel"
        )
    if isinstance(method, Mean) and method.clip is not None:
        raise SettingError(
            f"attach: Mean(clip={method.clip}) shortens the optimizer's step, which a communication hook does not see: "
            "call torch.nn.utils.clip_grad_norm_ after backward, or use hpctk.ddp.DistributedOptimizer"
        )
    handshake.check_dtypes(dict(module.named_parameters()))


def _initialised(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if not dist.is_available() or not dist.is_initialized():
        raise SettingError(
            "torch.distributed is not initialised: call torch.distributed.init_process_group('gloo') first, in a job "
            "that torchrun has started"
        )
    found = dist.group.WORLD if group is None else group
    assert found is not None
    return found


def _laid_out_like(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient as DDP lays it into its bucket: with the parameter's strides, a view."""
    # DDP hands it over as if it were contiguous, which for channels-last is another order of the elements.
    return gradient.as_strided(parameter.shape, parameter.stride()) if parameter.numel() else gradient
