"""Communication during backward: gradients leave in buckets as soon as they are there.

Backward reaches the last layers first, so buckets are filled from the end of the model. A bucket starts when all
its gradients are there, and buckets start in the same order on every rank; what is still missing at the end, such
as parameters without a gradient on this rank, starts in step(). Every hook also lets the exchanges that are under
way make progress.

A gradient must not change between its exchange and step(): accumulate under no_sync(), and clip after
synchronize(). Both mistakes are noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from hpctk.collectives.engine.engine import engine_of
from hpctk.compressors.core import finite
from hpctk.errors import HpctkError, SettingError
from hpctk.methods.core.gradient_step import BucketRun
from hpctk.methods.core.method import Method, Run
from hpctk.methods.core.step_status import StepStatus

#: A bucket is full from this many bytes on: enough to use the network well, few enough to start early.
BUCKET_BYTES = 4 * 2**20

#: The hook on each parameter, of the optimizer that was made last.
_hooks: MutableMapping[torch.Tensor, RemovableHandle] = WeakTensorKeyDictionary()


class Overlap:
    """The buckets of one model.

    Parameters
    ----------
    run : BucketRun
        Of a method that can exchange a bucket by itself.
    counting : callable
        Returns a context in which collectives are counted for the optimizer.
    """

    def __init__(self, run: BucketRun, counting: Callable[[], AbstractContextManager[None]]) -> None:
        self._run, self._replica, self._counting = run, run.replica, counting
        self._buckets = _buckets(self._replica.parameters)
        self._home = {i: b for b, bucket in enumerate(self._buckets) for i in bucket}
        self._paused = False
        # A bucket starts in backward on one rank and in step() on another; meanwhile other collectives may start.
        self._lanes = engine_of(self._replica.world).reserve(len(self._buckets))
        self._reset()
        run.finish_overlap = self.finish
        for i, parameter in enumerate(self._replica.parameters):
            hook = partial(_on_arrival, ref(self), i)
            _hooks[parameter] = parameter.register_post_accumulate_grad_hook(hook)

    @staticmethod
    def check(method: Method, overlap: bool) -> None:
        """Raise SettingError where overlapping makes no sense."""
        if overlap and method.kind != "gradient":
            raise SettingError(
                f"overlap=True: {type(method).__name__} does not exchange gradients; leave it out"
            )

    def check_between_steps(self, what: str) -> None:
        """Raise HpctkError where gradients are under way: dropping them now would leave the ranks apart."""
        if self._arrived:
            raise HpctkError(
                f"{what} between backward and step(), while gradients are under way. With overlap=True call "
                "opt.synchronize() first where a step is to be dropped."
            )

    def _reset(self) -> None:
        self._waiting = [len(bucket) for bucket in self._buckets]
        #: The gradients that have arrived, as they were.
        self._arrived: dict[int, tuple[torch.Tensor, int]] = {}
        self._started: list[Any] = []

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let backward start nothing."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def arrived(self, i: int, gradient: torch.Tensor) -> None:
        """Take note of a parameter's gradient; start the buckets that are full. Collective then."""
        if self._paused:
            return
        if i in self._arrived:
            raise HpctkError(
                f"the gradient of {self._replica.names[i]!r} was accumulated after its exchange had begun. With "
                "overlap=True run all but the last backward of a step under opt.no_sync()."
            )
        self._arrived[i] = gradient, gradient._version
        self._waiting[self._home[i]] -= 1
        with self._counting():
            while len(self._started) < len(self._buckets) and not self._waiting[len(self._started)]:
                self._start()
            engine_of(self._replica.world).progress()

    def _start(self) -> None:
        """Start the next bucket. Collective over the communicator."""
        number = len(self._started)
        gradients = {self._replica.names[i]: self._sent(i) for i in self._buckets[number]}
        with engine_of(self._replica.world).span(f"bucket {number}"):
            self._started.append(self._run.start_bucket(self._lanes[number], gradients))

    def _sent(self, i: int) -> torch.Tensor:
        """Return the gradient to send: nothing for one that is bad; that it is, all ranks hear in step()."""
        gradient = self._replica.gradient(i)
        if gradient is not None and finite.all_finite(gradient):
            return gradient
        return torch.zeros_like(self._replica.parameters[i]).detach()

    def finish(self, *, active: bool = True) -> bool:
        """Bring all buckets home; return whether any rank has data. Collective over the communicator."""
        for i, (gradient, version) in self._arrived.items():
            if self._replica.parameters[i].grad is not gradient or gradient._version != version:
                raise HpctkError(
                    f"the gradient of {self._replica.names[i]!r} was changed after its exchange had begun. With "
                    "overlap=True call opt.synchronize() before you clip or look at gradients."
                )
        status = self._run.exchange_status(active=active)
        if not status.active:
            return False
        while len(self._started) < len(self._buckets):
            self._start()
        results = self._results(status)
        self._reset()
        self._run.skipping = self._run.skip_or_raise(status)
        self._run.synchronized = True
        if not self._run.skipping:
            self._run.counts["rounds"] += any(status.has)
            for bucket, flat in zip(self._buckets, results, strict=True):
                self._take_over(bucket, flat, status)
        return True

    def _results(self, status: StepStatus) -> list[torch.Tensor]:
        """Return what all buckets come to. Collective over the communicator."""
        run = self._run
        has = {name for name, somewhere in zip(self._replica.names, status.has, strict=True) if somewhere}
        if has and status.bad is None:
            return run.finish_buckets(self._started, has)
        # The buckets must come home all the same; a step that is not made leaves nothing behind.
        state, counts = deepcopy(run.local_state()), run.counts.copy()
        results = run.finish_buckets(self._started, has)
        run.load_local_state(state)
        run.counts = counts
        return results

    def _take_over(self, bucket: list[int], flat: torch.Tensor, status: StepStatus) -> None:
        parts = flat.split([self._replica.parameters[i].numel() for i in bucket])
        for i, part in zip(bucket, parts, strict=True):
            if status.has[i]:
                gradient = self._replica.writable_gradient(i)
                gradient.copy_(part.view(gradient.shape))

    def idle(self) -> bool:
        """Take part in a step without gradients of one's own. Collective over the communicator."""
        for parameter in self._replica.parameters:
            parameter.grad = None
        if not self.finish(active=False):
            return False
        self._run.finish_step()
        return True


def _on_arrival(overlap: ref[Overlap], i: int, parameter: torch.Tensor) -> None:
    # A hook that held the buckets would keep the model in memory for good.
    alive = overlap()
    if alive is not None and parameter.grad is not None:
        alive.arrived(i, parameter.grad)


def release(parameters: Iterable[torch.Tensor]) -> None:
    """Take the hooks of earlier optimizers off parameters: another one trains them now."""
    for parameter in parameters:
        hook = _hooks.pop(parameter, None)
        if hook is not None:
            hook.remove()


def overlapping(run: Run, counting: Callable[[], AbstractContextManager[None]]) -> Overlap | None:
    """Return the buckets of a run, None where its method cannot exchange a part of the gradients by itself."""
    return Overlap(run, counting) if isinstance(run, BucketRun) and run.by_buckets else None


def _buckets(parameters: list[torch.nn.Parameter]) -> list[list[int]]:
    """Return the numbers of the parameters in each bucket, from the end of the model."""
    buckets: list[list[int]] = [[]]
    nbytes = 0
    for i in reversed(range(len(parameters))):
        if nbytes >= BUCKET_BYTES:
            buckets.append([])
            nbytes = 0
        buckets[-1].append(i)
        nbytes += parameters[i].numel() * parameters[i].element_size()
    return buckets
