"""One step of a gradient method, by whichever way its gradients come: prepared, exchanged, committed.

    prepare    all that can fail on one rank alone: looking for bad gradients, sums that overflow. Nothing lasts of it
    open       one small message: whether a rank has failed, who has gradients, who has data
    exchange   the gradients themselves, all at once or in buckets that left during backward
    commit     what the method keeps for later, once the result is known to be used

DistributedOptimizer gives what is in `.grad`, DDP its buckets, Horovod's optimizer what it wanted compressed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol, cast

import torch

from hpctk import torch_private
from hpctk.collectives.bucket_result import BucketResult
from hpctk.collectives.engine.engine import engine_of
from hpctk.methods.core.replica import Gradients, Look, Replica, look
from hpctk.methods.core.run import BucketRun, GradientRun
from hpctk.methods.core.step_status import StepStatus


class UnderWay(Protocol):
    """Buckets of gradients that have left.

    Attributes
    ----------
    looks : mapping of str to Look
        What was found in each gradient that has left.
    """

    @property
    def looks(self) -> Mapping[str, Look]: ...

    def finish(self, has: set[str], gradients: Mapping[str, torch.Tensor | None]) -> Mapping[str, BucketResult]:
        """Let the others leave, too, and bring all home. Collective over the communicator.

        `has` names the parameters with a gradient on some rank; `gradients` are this rank's, as they are to travel.
        """


def exchange_gradients(
    run: GradientRun,
    gradients: Callable[[], Gradients],
    groups: Sequence[Mapping[str, Any]] = (),
    *,
    active: bool = True,
    buckets: UnderWay | None = None,
    spares: Spares | None = None,
    scale: float = 1.0,
) -> tuple[StepStatus, dict[str, torch.Tensor]]:
    """Prepare, exchange and commit the gradients of a step. Collective over the communicator. In place.

    Parameters
    ----------
    run : GradientRun
    gradients : callable
        Returns this rank's, one of each parameter; what it raises, all ranks raise.
    groups : sequence of mappings
        The base optimizer's, where it is known.
    active : bool
        Whether this rank has data.
    buckets : UnderWay, optional
        Where the gradients are under way already.
    spares : Spares, optional
        Where a rank may be lost meanwhile: the gradients stay as they are, but for those that the method does without,
        and nothing is committed. The caller does so, and puts the result in their place, once it is known to count.
    scale : float
        Of the loss, where a GradScaler has not unscaled the gradients: they are divided by it meanwhile.

    Returns
    -------
    StepStatus
        Where it tells of a bad gradient nothing was written, and the caller skips the step or raises.
    dict of str to torch.Tensor
        Gradients that could not be written where they were, for there was none on this rank, its elements shared
        memory, it is in half precision and this is float32, or they are to stay: the caller puts them in their place.
        Among them may be such as were written where they were.
    """
    found: list[torch.Tensor | None] = []
    wide: dict[str, torch.Tensor] = {}
    made: dict[str, torch.Tensor] = {}

    def find() -> Gradients:
        found.extend(_widened(gradients(), run.replica, wide))
        _unscale(found, run.replica, wide, scale)
        return found

    try:
        status, made = _exchange(run, find, found, wide, groups, active, buckets, spares, scale)
    finally:
        if scale != 1:
            held = {id(x): x for x in (*found, *made.values()) if x is not None}
            torch_private.foreach_mul_(list(held.values()), scale)
    return status, made


def _exchange(
    run: GradientRun,
    find: Callable[[], Gradients],
    found: list[torch.Tensor | None],
    wide: dict[str, torch.Tensor],
    groups: Sequence[Mapping[str, Any]],
    active: bool,
    buckets: UnderWay | None,
    spares: Spares | None,
    scale: float,
) -> tuple[StepStatus, dict[str, torch.Tensor]]:
    """Do what `exchange_gradients` does; `found` and `wide` are filled by `find`."""
    run.begin_anew()
    status = run.open_step(find, groups, active=active, looks={} if buckets is None else buckets.looks)
    if not status.active:
        return status, {}
    has = run.replica.names if all(status.has) else [n for n, x in zip(run.replica.names, status.has, strict=True) if x]
    # Buckets that are under way must come home in any case.
    results = None if buckets is None else buckets.finish(set(has), dict(zip(run.replica.names, found, strict=True)))
    if not status.travels:
        return status, {}
    held, made = _writable(run.replica, found, status.has)
    if spares is not None:
        named = {name: gradient.contiguous() for name, gradient in zip(has, held, strict=True)}
        if results is None:
            expendable = run.expendable(named, scaled=scale != 1)
            into = named if len(expendable) == len(named) else spares.like(named, set(expendable))
            run.exchange_into(named, into)
            if into is named and held is found and not wide:
                return status, {}
        else:
            into = spares.like(named)
            for name, target in into.items():
                results[name].write(target)
        return status, into
    if results is None:
        _exchange_in_place(run, dict(zip(has, held, strict=True)))
    else:
        for name, gradient in zip(has, held, strict=True):
            results[name].write(gradient)
    run.commit()
    return status, {**wide, **made}


def _widened(gradients: Gradients, replica: Replica, wide: dict[str, torch.Tensor]) -> Gradients:
    """Return gradients in the dtype in which they travel; put those that are not what was given into `wide`."""
    if not replica.has_half:
        return gradients
    held = [None if gradient is None else gradient.to(replica.dtype) for gradient in gradients]
    rows = zip(replica.names, gradients, held, strict=True)
    wide.update((name, now) for name, was, now in rows if now is not None and now is not was)
    return held


def _unscale(found: list[torch.Tensor | None], replica: Replica, wide: dict[str, torch.Tensor], scale: float) -> None:
    """Divide gradients by the scale of the loss: in place, but for such with several elements in one place."""
    if scale == 1:
        return
    for i, gradient in enumerate(found):
        if gradient is not None and 0 in gradient.stride():
            found[i] = wide[replica.names[i]] = gradient.clone(memory_format=torch.contiguous_format)
    torch_private.foreach_div_([x for x in found if x is not None], scale)


class Spares:
    """Tensors for what comes of gradients, where those are to stay until it counts: those of the step before."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    def like(self, gradients: Mapping[str, torch.Tensor], expendable: Collection[str] = ()) -> dict[str, torch.Tensor]:
        """Return a tensor like each gradient, of any content; the `expendable` ones themselves."""
        kept, found = self._kept, {}
        for name, gradient in gradients.items():
            spare = kept.get(name, gradient)
            # Shapes are those that all ranks have agreed on, of this gradient and of the one before. Who sets `.grad`
            # to a part of one buffer in every step has given the same memory before.
            fits = spare.data_ptr() != gradient.data_ptr() and spare.dtype == gradient.dtype
            fits = fits and spare.device == gradient.device
            itself = bool(expendable) and name in expendable
            found[name] = gradient if itself else spare if fits else torch.empty_like(gradient)
        return found

    def keep(self, gradients: dict[str, torch.Tensor]) -> None:
        """Use these from now on: contiguous, and nobody else's."""
        self._kept = gradients


def _writable(
    replica: Replica, found: list[torch.Tensor | None], has: Sequence[bool]
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return a tensor to write into for each parameter that has a gradient on some rank, and the new ones by name."""
    if all(gradient is not None and gradient.is_contiguous() for gradient in found):
        return cast(list[torch.Tensor], found), {}
    held: list[torch.Tensor] = []
    made: dict[str, torch.Tensor] = {}
    for i, (gradient, wanted) in enumerate(zip(found, has, strict=True)):
        if gradient is not None and gradient.is_contiguous():
            held.append(gradient)
        elif wanted:
            if gradient is None:
                zeros = torch.zeros_like(replica.parameters[i], dtype=replica.dtype)
                gradient = made[replica.names[i]] = zeros.detach()
            elif 0 in gradient.stride():
                # An expanded tensor has several elements in one place.
                gradient = made[replica.names[i]] = gradient.clone(memory_format=torch.contiguous_format)
            held.append(gradient)
    return held, made


def _exchange_in_place(run: GradientRun, held: dict[str, torch.Tensor]) -> None:
    # Channels-last gradients and the like are not one row of memory.
    copies = {name: tensor.contiguous() for name, tensor in held.items() if not tensor.is_contiguous()}
    run.exchange({**held, **copies} if copies else held)
    for name, copy in copies.items():
        held[name].copy_(copy)


class Buckets:
    """Gradients that leave in parts, during backward.

    Parameters
    ----------
    run : BucketRun

    Attributes
    ----------
    looks : dict of str to Look
        What was found in each gradient that has left.
    """

    def __init__(self, run: BucketRun) -> None:
        self._run, self._engine = run, engine_of(run.replica.world)
        self._lanes: list[int] = []
        #: Of each bucket under way: how many elements each parameter has, and what the method needs to finish it.
        self._started: list[tuple[dict[str, int], Any]] = []
        self.looks: dict[str, Look] = {}

    def __len__(self) -> int:
        return len(self._started)

    def reserve(self, count: int) -> None:
        """Make room for so many buckets. On all ranks in the same order with other collectives."""
        self._engine.overlaps = True
        if count > len(self._lanes):
            # Two for each: what is compressed, and what is not.
            self._lanes += self._engine.reserve(2 * (count - len(self._lanes)))[::2]

    def start(
        self, gradients: Iterable[tuple[str, torch.Tensor]], *, in_order: bool = False, scale: float = 1.0
    ) -> None:
        """Let the next bucket leave, divided by the loss's scale. Collective over the communicator. Not in place."""
        number = len(self._started)
        self.reserve(number + 1)
        wide = ((name, x.to(self._run.replica.dtype)) for name, x in gradients)
        if scale != 1:
            wide = ((name, x / scale) for name, x in wide)
        sent = dict(wide)
        found = look(list(sent.values()))
        self.looks |= dict.fromkeys(sent, found)
        if found.bad is not None:
            for name, gradient in sent.items():
                self.looks[name] = found = look((gradient,))
                if found.bad is not None:
                    # Nothing of it: that it is bad, all ranks hear when the step is opened.
                    sent[name] = torch.zeros_like(gradient)
        with self._engine.span(f"bucket {number}"):
            under_way = self._run.start_bucket(self._lanes[number], sent, in_order=in_order)
        self._started.append(({name: x.numel() for name, x in sent.items()}, under_way))

    def finish(self, has: set[str], gradients: Mapping[str, torch.Tensor | None]) -> dict[str, BucketResult]:
        """Return what came of each parameter; all gradients have left. Collective over the communicator."""
        started, self._started, self.looks = self._started, [], {}
        try:
            results = self._run.finish_buckets([under_way for _, under_way in started], has)
        except BaseException:
            self._run.forget_buckets()
            raise
        return {
            name: part
            for (sizes, _), result in zip(started, results, strict=True)
            for name, part in zip(sizes, result.parts(sizes.values()), strict=True)
        }

    def forget(self) -> None:
        """Take no notice of buckets that an error has left under way. Local."""
        # One that an error has kept from starting was looked at, too.
        if self.looks:
            self._started, self.looks = [], {}
            self._run.forget_buckets()

    def renew(self) -> None:
        """Get ready for buckets among the ranks that are left. Collective over the communicator."""
        self._engine, self._lanes = engine_of(self._run.replica.world), []
        self._run.meet_buckets()


def buckets_of(run: GradientRun) -> Buckets | None:
    """Return buckets for a run, None where its method cannot exchange a part of the gradients by itself.

    Collective over the communicator.
    """
    if not isinstance(run, BucketRun) or not run.by_buckets:
        return None
    run.meet_buckets()
    return Buckets(run)
