"""Communication during backward: gradients leave in buckets as soon as they are there.

Backward reaches the last layers first, so buckets are filled from the end of the model. A bucket starts when all
its gradients are there, and buckets start in the same order on every rank; what is still missing at the end, such
as parameters without a gradient on this rank, starts in step(). Every hook also lets the exchanges that are under
way make progress.

A gradient must not change between its exchange and step(): accumulate under no_sync(), and clip after
synchronize(). Both mistakes are noticed.

Where a rank is lost (methods/core/survival.py), all buckets under way are given up; the others do that step again
without any, and have buckets of their own from the next one on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from weakref import ref

import torch
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from hpctk import torch_private
from hpctk.collectives.bucket_result import BucketResult
from hpctk.collectives.engine.engine import engine_of
from hpctk.errors import HpctkError, SettingError
from hpctk.methods.core.method import Method
from hpctk.methods.core.replica import Look, Replica
from hpctk.ways_in.gradient_exchange import Buckets

#: A bucket is full from this many bytes on: enough to use the network well, few enough to start early.
BUCKET_BYTES = 4 * 2**20

#: The hook on each parameter, of the optimizer that was made last.
_hooks: MutableMapping[torch.Tensor, RemovableHandle] = WeakTensorKeyDictionary()


class Overlap:
    """The buckets of one model.

    Parameters
    ----------
    replica : Replica
    buckets : Buckets
    counting : callable
        Returns a context in which collectives are counted for the optimizer.
    before : callable
        Called before the first bucket of a step leaves; returns what the gradients of this step are multiplied by.
    """

    def __init__(
        self,
        replica: Replica,
        buckets: Buckets,
        counting: Callable[[], AbstractContextManager[None]],
        before: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self._replica, self._buckets, self._counting, self._before = replica, buckets, counting, before
        self._members = _members(self._replica.own)
        self._home = {i: b for b, bucket in enumerate(self._members) for i in bucket}
        self._paused = False
        #: Why buckets could not go on, where a rank was lost in backward; whether one was since they were made.
        self._failed: Exception | None = None
        self._given_up = False
        # A bucket starts in backward on one rank and in step() on another; meanwhile other collectives may start.
        self._buckets.reserve(len(self._members))
        self._reset()
        for i, parameter in enumerate(self._replica.own):
            hook = partial(_on_arrival, ref(self), i)
            _hooks[parameter] = parameter.register_post_accumulate_grad_hook(hook)

    @staticmethod
    def check(method: Method, overlap: bool) -> None:
        """Raise SettingError where overlapping makes no sense."""
        if overlap and method.kind != "gradient":
            raise SettingError(f"overlap=True: {type(method).__name__} does not exchange gradients; leave it out")

    def check_between_steps(self, what: str) -> None:
        """Raise HpctkError where gradients are under way: dropping them now would leave the ranks apart."""
        if self._arrived:
            raise HpctkError(
                f"{what} between backward and step(), while gradients are under way. With overlap=True call "
                "opt.synchronize() first where a step is to be dropped."
            )

    def check_unchanged(self) -> None:
        """Raise HpctkError where a gradient is not any more what was sent of it."""
        for i, (gradient, version) in self._arrived.items():
            if self._replica.own[i].grad is not gradient or torch_private.version(gradient) != version:
                raise HpctkError(
                    f"the gradient of {self._replica.names[i]!r} was changed after its exchange had begun. With "
                    "overlap=True call opt.synchronize() before you clip or look at gradients."
                )

    def _reset(self) -> None:
        self._waiting = [len(bucket) for bucket in self._members]
        #: The gradients that have arrived, as they were.
        self._arrived: dict[int, tuple[torch.Tensor, int]] = {}
        self._scale: float | None = None

    def scale(self) -> float:
        """Return what the gradients of this step are multiplied by; the same until they are exchanged. Local."""
        if self._scale is None:
            self._scale = self._before()
        return self._scale

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
        if self._paused or self._given_up:
            return
        if i in self._arrived:
            raise HpctkError(
                f"the gradient of {self._replica.names[i]!r} was accumulated after its exchange had begun. With "
                "overlap=True run all but the last backward of a step under opt.no_sync()."
            )
        self._arrived[i] = gradient, torch_private.version(gradient)
        self._waiting[self._home[i]] -= 1
        if self._failed is None:
            try:
                self._go_on()
            except self._replica.world.losses as error:
                if self._replica.survival is None or not self._replica.world.is_broken():
                    raise
                # Not in backward: the step finds it out with all ranks.
                self._failed = error

    def _go_on(self) -> None:
        with self._counting():
            while len(self._buckets) < len(self._members) and not self._waiting[len(self._buckets)]:
                self._start()
            engine, began = engine_of(self._replica.world), time.perf_counter()
            engine.progress()
            engine.recorders.exposed_s += time.perf_counter() - began

    def _start(self) -> None:
        """Start the next bucket, of gradients as backward has left them. Collective over the communicator."""
        replica = self._replica
        held = {i: replica.dense_gradient(i, replica.own[i].grad) for i in self._members[len(self._buckets)]}
        self._leave(held, self.scale())

    def _leave(self, held: dict[int, torch.Tensor | None], scale: float) -> None:
        names, own = self._replica.names, self._replica.own
        sent = ((names[i], torch.zeros_like(own[i]).detach() if x is None else x) for i, x in held.items())
        self._buckets.start(sent, scale=scale)

    @property
    def looks(self) -> Mapping[str, Look]:
        """What was found in each gradient that has left."""
        return self._buckets.looks

    def finish(self, has: set[str], gradients: Mapping[str, torch.Tensor | None]) -> dict[str, BucketResult]:
        """Start what has not left yet, and return what came of each parameter. Collective over the communicator.

        `gradients` are those of this step as they are to travel: divided by the loss's scale already.
        """
        if self._failed is not None:
            raise self._failed
        while len(self._buckets) < len(self._members):
            self._leave({i: gradients[self._replica.names[i]] for i in self._members[len(self._buckets)]}, 1.0)
        results = self._buckets.finish(has, gradients)
        self._reset()
        return results

    def give_up(self) -> None:
        """Take no notice of what is under way: a rank is lost. Local."""
        self._failed, self._given_up = None, True
        self._buckets.forget()
        self._reset()

    def meet(self) -> bool:
        """Return whether the gradients of this step have left in buckets.

        Where ranks were lost they have not; those that are left make new ones then. Collective over the communicator.
        """
        if not self._given_up:
            return True
        self._buckets.renew()
        self._buckets.reserve(len(self._members))
        self._given_up = False
        return False


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


def _members(parameters: list[torch.nn.Parameter]) -> list[list[int]]:
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
