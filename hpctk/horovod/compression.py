"""Compression: any method for Horovod's stock optimizer, by handing Horovod a token for each gradient.

    compress(gradient)     keeps the gradient; Horovod all-reduces two numbers in its place (tokens.py)
    decompress(token)      the first one of a step: every gradient has gone through compress, so all ranks enter one
                           exchange of all of them, over MPI, in the model's order; each call returns its part

Methods that do more than exchange gradients act in step hooks: `attach`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch

from hpctk import torch_private
from hpctk.comm.world import world
from hpctk.compressors import Compressor
from hpctk.errors import HpctkError, SettingError
from hpctk.horovod import tokens
from hpctk.horovod.arrivals import Arrivals
from hpctk.horovod.attachment import Attachment
from hpctk.horovod.check import check_attached, check_method, check_same_parameters, needs_attach
from hpctk.horovod.install import horovod
from hpctk.horovod.process_sets import communicator
from hpctk.horovod.ready_made import ReadyMade
from hpctk.horovod.sum_run import sum_run
from hpctk.methods.core import drift
from hpctk.methods.core.method import GradientMethod, LocalStepMethod, Method
from hpctk.methods.core.replica import Replica
from hpctk.methods.core.resharding import SavedRanks
from hpctk.methods.core.run import GradientRun, LocalStepRun, Run
from hpctk.methods.mean import Mean
from hpctk.torch_private import is_unscaled
from hpctk.ways_in import handshake
from hpctk.ways_in.counters import Counters, Stats, StatsLike, kept_loss, wanted
from hpctk.ways_in.grad_scaler import LossScale, let_step_take_scaler, tell, unscale
from hpctk.ways_in.gradient_exchange import exchange_gradients
from hpctk.ways_in.overlap import release
from hpctk.ways_in.participant import Participant, averaged_model

if TYPE_CHECKING:
    from mpi4py import MPI


class Compression(Participant, ReadyMade):
    """What hvd.DistributedOptimizer takes as `compression`.

    Collective over the process set: making one, `attach`, `averaged_model`, the optimizer's `synchronize` and `step`.
    A rank outside the process set may make and attach one, too: nothing happens there.

    Parameters
    ----------
    method : Method or Compressor
        Such as hpctk.AdaCons(); a compressor stands for its mean with error feedback. SAEF, MGRAWA, LGRAWA, CELGC,
        LocalSGD, EASGD and Mean(clip=...) need `attach`; SASG, LSGD and asynchronous GRAWA need
        hpctk.horovod.DistributedOptimizer.
    model : torch.nn.Module
        Whose parameters are optimized.
    process_set : hvd.ProcessSet, optional
        The one that hvd.DistributedOptimizer is given.
    comm : MPI.Intracomm, optional
        What hvd.init() was given, where that was a list of ranks.
    schedule : str
        Of dense all-reduces.
    stats : path or StatsSettings, optional
        A folder in which every rank writes what it sends; HPCTK_STATS where not given.
    on_bad_gradient : {"raise", "skip"}
        What all ranks do when a gradient is NaN or infinite on one of them; "skip" needs `attach`, and so does a
        torch.amp.GradScaler, under which such steps are skipped on all ranks in any case.
    check_every : int
        Steps between two looks whether the replicas have drifted apart; 0 for never.
    grad_scaler : torch.amp.GradScaler, optional
        The one that scales the loss, with `attach`: what travels, and what residuals hold, is then unscaled from the
        first step on; where not given, once a step() has told which one it is.
    """

    def __init__(
        self,
        method: Method | Compressor,
        model: torch.nn.Module,
        *,
        process_set: Any = None,
        comm: MPI.Intracomm | None = None,
        schedule: str = "auto",
        stats: StatsLike = None,
        on_bad_gradient: str = "raise",
        check_every: int = 100,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self._hvd = horovod()
        self.method = Mean(method) if isinstance(method, Compressor) else method
        self._process_set = self._hvd.global_process_set if process_set is None else process_set
        self._begun_run: Run | None = None
        self._loss: Any = None
        self._attachment: Attachment | None = None
        members = communicator(self._hvd, process_set, comm)
        self._member = members is not None
        if members is None:
            return
        here = world(members)
        with here.shared_errors("making a Compression"):
            check_method(self.method, model, schedule, on_bad_gradient, here)
            trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
            handshake.check_dtypes(trained)
            drift.check_every(check_every)
            recorded = wanted(stats)
        items = [
            ("stats", recorded),
            ("check_every", check_every),
            ("schedule", schedule),
            ("on_bad_gradient", on_bad_gradient),
            ("grad_scaler", grad_scaler is not None),
            *self.method.settings().items(),
        ]
        items += [(name, f"{p.dtype} {tuple(p.shape)}") for name, p in trained.items()]
        here.agree("Compression", items)
        release(trained.values())
        self._arrivals = Arrivals(trained)
        self._replica = Replica(
            here, list(trained), list(trained.values()), model, schedule=schedule, dense=True,
            on_bad_gradient=on_bad_gradient, check_every=check_every,
        )  # fmt: skip
        #: The gradients that went through `compress` in this step, by name; then what the exchange made of them.
        self._kept: dict[str, torch.Tensor] = {}
        self._counters = Counters(self._replica, self.method, recorded)
        self._counters.begin()
        #: The gradients that Horovod has taken back, once they were exchanged.
        self._returned: set[str] = set()
        self._exchanged = False
        #: What the last exchange left for the step to do.
        self._skipping = False
        self._error: HpctkError | None = None
        #: Whether the last step was not applied because a gradient was bad.
        self._skipped = False
        self._grad_scaler = grad_scaler
        self._loss_scale: LossScale | None = None

    def _end_round(self) -> None:
        """Let go of the gradients: Horovod has them all back."""
        self._kept.clear()
        self._returned.clear()
        self._arrivals.reset()
        self._exchanged = False

    def attach(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Let the method act in the steps of the optimizer that Horovod made with this; return that optimizer.

        Collective over the process set. Optional for methods that only exchange gradients: with it they also work at
        one rank, where Horovod compresses nothing, may skip bad gradients, and raise only after `synchronize`, so that
        Horovod's optimizer can go on after an error.
        """
        if not self._member:
            return optimizer
        here, replica = self._replica.world, self._replica
        with here.shared_errors("Compression.attach"):
            check_attached(self._hvd, optimizer, self, self._process_set)
            if self._attachment is not None:
                raise SettingError("attach: this Compression serves an optimizer already; make another one")
            handshake.check(optimizer, self.method, replica.on_bad_gradient)
            names = handshake.names(optimizer, replica.model, None)
        here.agree("Compression.attach", handshake.digest(optimizer, self.method, names, names, {}))
        trained = {name: parameter for name, parameter in names.items() if parameter.requires_grad}
        replica.agreed_on(list(trained), list(trained.values()))
        if isinstance(self.method, LocalStepMethod):
            replica.hold_masters(optimizer)
        self._attachment = Attachment(optimizer, self._act, lambda: self._arrivals.count)
        self._loss_scale = LossScale(optimizer, self._grad_scaler)
        step = optimizer.step

        def scaled_step(closure: Any, scaler: Any) -> Any:
            return step(closure) if scaler is None else self._scaled_step(optimizer, step, scaler)

        let_step_take_scaler(optimizer, scaled_step)
        return optimizer

    def _scaled_step(self, optimizer: Any, step: Any, scaler: Any) -> Any:
        """Do one step under a GradScaler, which hears what all ranks have decided. Collective.

        What Horovod has exchanged before the scaler looks at it is the same on all ranks, and so is what the scaler
        finds; what it has found before is this rank's own affair, and the exchange tells the others.
        """
        replica = self._replica
        if self._loss_scale is not None:
            self._loss_scale.learn(scaler, exchanged_scaled=optimizer._synchronized)
        with replica.under_scaler():
            if not is_unscaled(scaler, optimizer):
                optimizer.synchronize()
            synchronized = optimizer._synchronized
            if not synchronized and any(p.grad is not None and p.grad.is_sparse for p in replica.own):
                raise SettingError(
                    "scaler.unscale_(opt) before opt.synchronize(): Horovod has copied sparse gradients as they were. "
                    "Call opt.synchronize() first, and step inside opt.skip_synchronize()."
                )
            overflown = unscale(scaler, optimizer)
            self._skipping |= overflown and synchronized and self.method.kind == "gradient"
            with optimizer.skip_synchronize() if synchronized else nullcontext():
                value = step()
        tell(scaler, optimizer, self._skipped)
        return value

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, str]:
        """Keep a gradient; return the token that Horovod is to move, and the parameter's name. Local."""
        if isinstance(tensor, torch.nn.Parameter):
            raise SettingError(
                "op=Adasum: Horovod combines updates by a rule of its own there, and hpctk's methods by theirs. Use "
                "op=hvd.Average or hvd.Sum."
            )
        self._check_use()
        name = self._arrivals.name_of(tensor, self._kept)
        self._kept[name] = tensor.detach()
        return tokens.token(self._replica.world.rank), name

    def decompress(self, token: torch.Tensor, name: str | None) -> torch.Tensor:
        """Return what the base optimizer is to see of a gradient. Collective over the process set."""
        if name is None:
            # Sparse, and not to be made dense: Horovod has gathered it by itself.
            return token
        if not self._exchanged:
            self._first(token)
        gradient = self._kept[name]
        self._returned.add(name)
        if len(self._returned) == len(self._kept):
            self._end_round()
            if self._error is not None and self._attachment is None:
                raise self._error
        return gradient

    def _first(self, token: torch.Tensor) -> None:
        """Exchange all gradients of the step."""
        self._exchanged, self._skipping, self._error = True, False, None
        self._record_tokens()
        try:
            factor = tokens.factor(token, self._replica.world.size)
            if self.method.kind == "gradient":
                self._exchange(factor)
            elif factor > 1:
                raise SettingError(f"op=Sum: {type(self.method).__name__} averages; use op=hvd.Average")
        except HpctkError as error:
            # Raised later: Horovod must have all its tokens back before it can go on.
            self._error = error
        if self._attachment is None:
            self._end_step()

    def _record_tokens(self) -> None:
        """Record what Horovod has moved for us; how, it keeps to itself."""
        with self._counters.counting():
            self.world.recorders.record_control(
                "tokens", "horovod", tokens.TOKEN_BYTES * len(self._kept), time.perf_counter()
            )

    def note_loss(self, loss: Any) -> None:
        """Say, before the step, what the loss is; for the statistics."""
        self._loss = kept_loss(loss)

    def _end_step(self) -> None:
        self._counters.end_step({} if self._begun_run is None else self._begun_run.counts, self._loss)
        self._loss = None

    def _exchange(self, factor: int = 1) -> None:
        run = cast(GradientRun, self._begun())
        summing = sum_run(self.method, self._replica) if factor > 1 else None
        scale, known = 1.0, False
        if self._loss_scale is not None:
            scale, known = self._loss_scale.begin_exchange(run), self._loss_scale.scaler is not None
        with self._replica.under_scaler(known), self._counters.counting():
            status, made = exchange_gradients(summing or run, self._gradients, self._groups, scale=scale)
            wide = {**self._kept, **made}
            if summing is not None:
                run.counts.update(summing.counts)
            self._skipping = run.skip_or_raise(status)
        if factor > 1 and summing is None and not self._skipping:
            torch_private.foreach_mul_(list(wide.values()), factor)
        # Horovod lets it be the gradient of its parameter, which may be in half precision.
        own = self._replica.named(self._replica.own) if self._replica.has_half else wide
        self._kept = {name: x.to(own[name].dtype) for name, x in wide.items()}

    def _gradients(self) -> list[torch.Tensor | None]:
        """Return what Horovod wanted compressed, one of each parameter."""
        for i, name in enumerate(self._replica.names):
            if name in self._kept:
                self._replica.check(i, self._kept[name])
        return [self._kept.get(name) for name in self._replica.names]

    @property
    def _groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups; none before `attach`."""
        return [] if self._attachment is None else self._attachment.base.param_groups

    def _act(self) -> bool:
        """Do what the method does in a step; return whether the base optimizer is not to step any more."""
        try:
            if self._error is not None:
                raise self._error
            try:
                if self.method.kind == "gradient":
                    done = self._act_on_gradients()
                    self._skipped = self._skipping
                    return done
                steps = cast(LocalStepRun, self._begun())
                with self._counters.counting(), self._replica.float32():
                    steps.step(None, None)
                self._skipped = steps.skipped
                return True
            finally:
                self._end_step()
        finally:
            self._skipping, self._error = False, None

    def _act_on_gradients(self) -> bool:
        if self._hvd.size() == 1:
            # Horovod has compressed nothing.
            named = zip(self._replica.names, self._replica.own, strict=True)
            held = {name: p.grad for name, p in named if p.grad is not None and not p.grad.is_sparse}
            self._kept.update(held)
            self._exchange()
            self._end_round()
        if self._skipping or not needs_attach(self.method):
            return self._skipping
        with self._counters.counting():
            cast(GradientRun, self._begun()).apply(self._base)
        return True

    def _check_use(self) -> None:
        """Raise SettingError where only `attach` lets the method work."""
        if self._attachment is None:
            why = type(self.method).__name__ if needs_attach(self.method) else ""
            why = why or ("on_bad_gradient='skip'" if self._replica.on_bad_gradient == "skip" else "")
            if why:
                raise SettingError(
                    f"{why} acts in the optimizer's steps: call compression.attach(opt) with what "
                    "hvd.DistributedOptimizer returned, before the first backward"
                )

    def _begun(self, *, fresh: bool = True) -> Run:
        """Return the run; made at the first call, when Horovod's user has broadcast the parameters. Collective."""
        if self._begun_run is None:
            self._check_use()
            if fresh and self.method.kind != "gradient":
                with self._replica.float32():
                    check_same_parameters(self._replica)
            with self._counters.counting(), self._replica.float32():
                self._begun_run = self._begin()
        return self._begun_run

    def _begin(self) -> Run:
        if isinstance(self.method, LocalStepMethod):
            return self.method.begin(self._replica, self._base)
        run = cast(GradientMethod, self.method).begin(self._replica)
        if self._attachment is not None:
            run.meet(self._base)
        return run

    @property
    def _base(self) -> torch.optim.Optimizer:
        """The user's own optimizer inside Horovod's, as far as methods need one."""
        assert self._attachment is not None
        return cast(torch.optim.Optimizer, self._attachment.base)

    @contextmanager
    def averaged_model(self) -> Iterator[None]:
        """Let the model hold what the method wants evaluated, on every rank; afterwards what it held before.

        Collective over the process set at its beginning. Floating point buffers are averaged, too.
        """
        if not self._member:
            yield
            return
        with averaged_model(self._begun(), self._counters.counting):
            yield

    @property
    def stats(self) -> Stats:
        """What was done on this rank so far. Horovod's tokens are not counted: 16 bytes for each parameter."""
        if not self._member:
            return Stats(0, 0, 0, 0, 0.0, 0, {})
        return self._counters.stats(self._begun_run.counts.copy() if self._begun_run is not None else {})

    def load_stats(self, stats: Stats) -> None:
        """Go on counting from what an earlier run had counted on this rank. Collective before the first step."""
        self._counters.load(stats)
        self._begun(fresh=False).counts = Counter(stats.counts)

    def close_stats(self) -> None:
        """Close this rank's statistics file, if there is one. Local; done at exit otherwise."""
        if self._member:
            super().close_stats()

    def begin(self) -> None:
        """Begin the method where no step has: there must be a state to load into. Collective over the process set."""
        self._begun(fresh=False)

    def check_between_steps(self, what: str) -> None:
        """Raise HpctkError where gradients are under way, so that `what` would leave the ranks apart."""
        if self._kept:
            raise HpctkError(f"{what} between backward and step()")

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: Horovod's optimizer keeps its state, which is the user's to keep."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""

    @property
    def finished(self) -> bool:
        """Whether a time budget has run out; the same on all ranks."""
        return self._begun_run is not None and self._begun_run.finished

    def local_state_dict(self) -> dict[str, Any]:
        """Return what this rank alone knows, such as residuals; not copies. Nothing before the first step."""
        if self._begun_run is None:
            return {}
        with self._replica.float32():
            return self._begun_run.local_state()

    def load_local_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `local_state_dict` returned on this rank, after `attach` where that is needed."""
        if state and self._member:
            run = self._begun(fresh=False)
            with self._replica.float32():
                run.load_local_state(state)

    def resized_local_state_dict(self, earlier: SavedRanks) -> dict[str, Any]:
        """Return what to give to `load_local_state_dict` where another number of ranks saved their states."""
        return self._begun(fresh=False).resized_state(earlier)

    def __repr__(self) -> str:
        return f"hpctk.horovod.Compression({self.method!r})"
