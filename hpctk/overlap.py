"""Communication during backward: gradients leave in buckets as soon as they are there.

Backward reaches the last layers first, so buckets are filled from the end of the model. A bucket starts when all
its gradients are there, and buckets start in the same order on every rank; what is still missing at the end, such
as parameters without a gradient on this rank, starts in step(). Every hook also lets the exchanges that are under
way make progress.

A gradient must not change between its exchange and step(): accumulate under no_sync(), and clip after
synchronize(). Both mistakes are noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch

from hpctk.collectives.engine import engine_of
from hpctk.compressors import finite
from hpctk.errors import HpctkError, SettingError
from hpctk.methods.gradient_run import GradientRun
from hpctk.methods.method import Method, Run

#: A bucket is full from this many bytes on: enough to use the network well, few enough to start early.
BUCKET_BYTES = 4 * 2**20


class Overlap:
    """The buckets of one model.

    Parameters
    ----------
    run : GradientRun
        Of a method that can exchange a bucket by itself.
    counting : callable
        Returns a context in which collectives are counted for the optimizer.
    """

    def __init__(self, run: GradientRun, counting: Callable[[], AbstractContextManager[None]]) -> None:
        self._run, self._replica, self._counting = run, run.replica, counting
        self._buckets = _buckets(self._replica.parameters)
        self._home = {i: b for b, bucket in enumerate(self._buckets) for i in bucket}
        self._paused = False
        self._reset()
        run.bring_home = self.finish
        for i, parameter in enumerate(self._replica.parameters):
            parameter.register_post_accumulate_grad_hook(partial(self._arrived, i))

    @staticmethod
    def check(method: Method, overlap: bool) -> None:
        """Raise SettingError where overlapping makes no sense."""
        if overlap and method.kind != "gradient":
            raise SettingError(
                f"overlap=True: {type(method).__name__} does not exchange gradients; leave it out"
            )

    def _reset(self) -> None:
        self._waiting = [len(bucket) for bucket in self._buckets]
        self._versions: dict[int, int] = {}
        self._started: list[Any] = []

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let backward start nothing."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def _arrived(self, i: int, parameter: torch.Tensor) -> None:
        if self._paused or parameter.grad is None:
            return
        if i in self._versions:
            raise HpctkError(
                f"the gradient of {self._replica.names[i]!r} was accumulated after its exchange had begun. With "
                "overlap=True run all but the last backward of a step under opt.no_sync()."
            )
        self._versions[i] = parameter.grad._version
        self._waiting[self._home[i]] -= 1
        with self._counting():
            while len(self._started) < len(self._buckets) and not self._waiting[len(self._started)]:
                self._start()
            engine_of(self._replica.world).progress()

    def _start(self) -> None:
        """Start the next bucket. Collective over the communicator."""
        number = len(self._started)
        gradients = {self._replica.names[i]: self._sent(i) for i in self._buckets[number]}
        self._started.append(self._run.start_bucket(number, gradients))

    def _sent(self, i: int) -> torch.Tensor:
        """Return the gradient to send: nothing for one that is bad; that it is, all ranks hear in step()."""
        gradient = self._replica.gradients()[i]
        if gradient is not None and finite.all_finite(gradient):
            return gradient
        return torch.zeros_like(self._replica.parameters[i]).detach()

    def finish(self, *, active: bool = True) -> bool:
        """Bring all buckets home; return whether any rank has data. Collective over the communicator."""
        for i, version in self._versions.items():
            gradient = self._replica.parameters[i].grad
            if gradient is None or gradient._version != version:
                raise HpctkError(
                    f"the gradient of {self._replica.names[i]!r} was changed after its exchange had begun. With "
                    "overlap=True call opt.synchronize() before you clip or look at gradients."
                )
        council = self._replica.confer(active=active)
        if not council.active:
            return False
        while len(self._started) < len(self._buckets):
            self._start()
        has = {
            name for name, on_some_rank in zip(self._replica.names, council.has, strict=True) if on_some_rank
        }
        results = self._run.finish_buckets(self._started, has)
        self._reset()
        self._run.skipping = self._run.skip_or_raise(council)
        self._run.synchronized = True
        if not self._run.skipping:
            self._run.counts["rounds"] += 1
            for bucket, flat in zip(self._buckets, results, strict=True):
                self._take_over([i for i in bucket if council.has[i]], bucket, flat)
        return True

    def _take_over(self, wanted: list[int], bucket: list[int], flat: torch.Tensor) -> None:
        parts = flat.split([self._replica.parameters[i].numel() for i in bucket])
        for i, part in zip(bucket, parts, strict=True):
            parameter = self._replica.parameters[i]
            if i not in wanted:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.detach().copy_(part.view_as(parameter))

    def idle(self) -> bool:
        """Take part in a step without gradients of one's own. Collective over the communicator."""
        for parameter in self._replica.parameters:
            parameter.grad = None
        if not self.finish(active=False):
            return False
        self._run.finish_step()
        return True


def overlapping(run: Run, counting: Callable[[], AbstractContextManager[None]]) -> Overlap | None:
    """Return the buckets of a run, None where its method cannot exchange a part of the gradients by itself."""
    return Overlap(run, counting) if isinstance(run, GradientRun) and run.by_buckets else None


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
