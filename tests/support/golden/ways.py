"""The five ways in, and one training loop for all of them.

See golden/__init__.py for when digests may change.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel

import hpctk
from golden.cases import UNEVEN, Case
from golden.digests import Seen
from golden.problem import BASES, LR, MODELS, PROBE, Model


def bad_steps(size: int) -> tuple[int, ...]:
    """Return the steps with bad gradients: one right before a round, where another rank can go on without."""
    return (1, 2, 4) if size > 1 else (2, 4)


@dataclass(frozen=True)
class Place:
    """Where a training runs: communicators of all ranks and of this one, and a folder that all ranks see."""

    comm: Any
    alone: Any
    folder: Path

    @property
    def rank(self) -> int:
        """Of this process."""
        return int(self.comm.rank)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return int(self.comm.size)


@cache
def communicators() -> tuple[Any, Any]:
    """Return communicators of all ranks, and of this one, that know nothing of other tests. Collective at first."""
    from mpi4py import MPI

    return MPI.COMM_WORLD.Dup(), MPI.COMM_SELF.Dup()


@dataclass
class Job:
    """A model, and how it is trained by one way in.

    Attributes
    ----------
    optimizer
        Whose zero_grad() and step() the loop calls; has the base optimizer's groups and state.
    participant
        What checkpoints are told to save: knows the local state and the counts.
    forward : callable
        Returns the loss of a step.
    own : bool
        Whether the optimizer is hpctk's: takes a closure or the loss, and its state is kept in checkpoints.
    """

    model: Model
    optimizer: Any
    participant: Any
    forward: Callable[[int], torch.Tensor]
    own: bool = True
    join: Callable[[], AbstractContextManager[Any]] = nullcontext
    no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext
    averaged_model: Callable[[], AbstractContextManager[Any]] = nullcontext


def _settings(case: Case, library: str) -> dict[str, Any]:
    return {
        "schedule": library if case.schedule == "library" else case.schedule,
        "on_bad_gradient": "skip" if case.skips else "raise",
    }


def _with_own_optimizer(kind: Any, library: str, case: Case, model: Model, **of_kind: Any) -> Job:
    settings = _settings(case, library) | {"overlap": case.overlap} | of_kind
    opt = kind(BASES[case.base](model), case.method, model=model, **settings)
    return Job(model, opt, opt, model, join=opt.join, no_sync=opt.no_sync, averaged_model=opt.averaged_model)


def over_mpi(case: Case, model: Model, place: Place) -> Job:
    """Return hpctk.DistributedOptimizer at work."""
    return _with_own_optimizer(hpctk.DistributedOptimizer, "mpi", case, model, comm=place.comm)


def alone(case: Case, model: Model, place: Place) -> Job:
    """Return hpctk.DistributedOptimizer at work on this rank by itself."""
    return _with_own_optimizer(hpctk.DistributedOptimizer, "mpi", case, model, comm=place.alone)


def over_torch(case: Case, model: Model, place: Place) -> Job:
    """Return hpctk.ddp.DistributedOptimizer at work, on the default process group."""
    return _with_own_optimizer(hpctk.ddp.DistributedOptimizer, "torch", case, model)


def under_ddp(case: Case, model: Model, place: Place) -> Job:
    """Return hpctk.ddp.attach at work, with the smallest buckets that there are."""
    wrapped = DistributedDataParallel(model, bucket_cap_mb=1e-3, find_unused_parameters=not case.uses_all)
    attached = hpctk.ddp.attach(wrapped, case.method, **_settings(case, "torch"))
    return Job(
        model, BASES[case.base](model), attached, wrapped, own=False, join=wrapped.join, no_sync=wrapped.no_sync
    )  # fmt: skip


def under_horovod(case: Case, model: Model, place: Place) -> Job:
    """Return hpctk.horovod.DistributedOptimizer at work."""
    return _with_own_optimizer(hpctk.horovod.DistributedOptimizer, "mpi", case, model, comm=place.comm)


def with_compression(case: Case, model: Model, place: Place) -> Job:
    """Return Horovod's own optimizer with a hpctk.horovod.Compression."""
    import horovod.torch as hvd

    compression = hpctk.horovod.Compression(case.method, model, comm=place.comm, **_settings(case, "mpi"))
    opt = hvd.DistributedOptimizer(
        BASES[case.base](model),
        named_parameters=model.named_parameters(),
        compression=compression,
        backward_passes_per_step=case.accumulate,
        op=hvd.Sum if case.stock == "sum" else hvd.Average,
    )
    if case.stock != "unattached":
        opt = compression.attach(opt)
    return Job(model, opt, compression, model, own=False, averaged_model=compression.averaged_model)


WAYS = {
    "mpi": over_mpi,
    "torch": over_torch,
    "ddp": under_ddp,
    "horovod": under_horovod,
    "compression": with_compression,
}


def train(way: str, case: Case, folder: Path) -> Seen:
    """Train a case by one way in, and return what was seen of it on this rank. Collective over all ranks."""
    place = Place(*communicators(), folder)
    with torch.random.fork_rng(devices=[]), _one_thread(), _no_calibration():
        # Not torch.manual_seed, which looks for every device there might be.
        torch.default_generator.manual_seed(7)
        return _train(way, case, place) if case.call is None else _called(way, case, place)


def _called(way: str, case: Case, place: Place) -> Seen:
    seen = Seen(case.dtype)
    comm = place.comm if way == "mpi" else torch.distributed.group.WORLD
    for t in range(case.steps):
        results = list(case.call(place.rank, t, comm))
        seen.take("parameters", results)
    seen.last([result for result in results if isinstance(result, torch.Tensor)])
    return seen


def _train(way: str, case: Case, place: Place) -> Seen:
    seen = Seen(case.dtype)
    job, scheduler = None, None
    if case.resumes != "by more" or place.rank == 0:
        job = _job(alone if case.resumes == "by more" else WAYS[way], case, place)
        scheduler = _scheduler(case, job)
    batches = UNEVEN[case.uneven](place.rank, place.size) if case.uneven else case.steps
    with ExitStack() as stack:
        if case.uneven:
            stack.enter_context(job.join())
        for t in range(batches):
            if case.resumes and t == case.steps // 2:
                job, scheduler = _resumed(way, case, place, job, scheduler)
            if job is not None:
                _step(case, job, t)
                seen.step(job.model)
            if scheduler is not None:
                scheduler.step()
    seen.step(job.model)
    with job.averaged_model():
        seen.evaluated(job.model)
    seen.end(job.model, [job.participant.local_state_dict(), _base_state(job)], job.participant.stats)
    return seen


def _job(
    make: Callable[[Case, Model, Place], Job], case: Case, place: Place, start: str = "start", rate: float = LR
) -> Job:
    model = PROBE.model = Model(
        place.rank,
        place.size,
        MODELS[case.model],
        getattr(torch, case.dtype),
        start=start,
        rate=rate,
        uses_all=case.uses_all,
        bad_steps=bad_steps(place.size) if case.skips else (),
    )
    return make(case, model, place)


def _scheduler(case: Case, job: Job) -> Any:
    return torch.optim.lr_scheduler.StepLR(job.optimizer, 2, 0.5) if case.falling else None


def _step(case: Case, job: Job, t: int) -> None:
    # Horovod counts the backward passes of a step by itself.
    passes = range(case.accumulate * t, case.accumulate * (t + 1))

    def closure() -> float:
        job.optimizer.zero_grad()
        for number in passes:
            with job.no_sync() if number < passes[-1] else nullcontext():
                job.forward(number).backward()
        return job.model.loss(t)

    if case.closure:
        job.optimizer.step(closure)
        return
    loss = closure()
    if case.synchronize:
        job.optimizer.synchronize()
        for parameter in job.model.parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-0.5, 0.5)
    if job.own:
        job.optimizer.step(loss=loss)
    else:
        job.optimizer.step()


def _resumed(way: str, case: Case, place: Place, job: Job | None, scheduler: Any) -> tuple[Job, Any]:
    """Save a training, where this rank has one, and return another one that has loaded it."""
    home = place.folder / "checkpoints"
    if job is not None:
        extra = {} if scheduler is None else {"scheduler": scheduler}
        if not job.own:
            extra["optimizer"] = job.optimizer
        hpctk.save_checkpoint(home, job.participant, job.model, **extra)
    # Under Horovod ranks must begin alike; elsewhere all that counts must come from the checkpoint.
    start = "start" if way == "compression" else "elsewhere"
    other = _job(alone if case.resumes == "by one" else WAYS[way], case, place, start, LR / 4)
    other_scheduler = _scheduler(case, other)
    kept = hpctk.load_checkpoint(home, other.participant, other.model)
    if not other.own:
        other.optimizer.load_state_dict(kept["optimizer"])
    if other_scheduler is not None:
        other_scheduler.load_state_dict(kept["scheduler"])
    return other, other_scheduler


def _base_state(job: Job) -> dict[str, Any]:
    names = {parameter: name for name, parameter in job.model.named_parameters()}
    kept = {names[parameter]: dict(state) for parameter, state in job.optimizer.state.items()}
    halves = any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in names)
    # The masters, too.
    return {**kept, "saved": job.optimizer.state_dict()["state"]} if halves else kept


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _no_calibration() -> Iterator[None]:
    """Let nobody find a calibration of the user's, which would choose other schedules."""
    before = os.environ.get("HPCTK_CALIBRATION")
    os.environ["HPCTK_CALIBRATION"] = os.devnull
    try:
        yield
    finally:
        del os.environ["HPCTK_CALIBRATION"]
        if before is not None:
            os.environ["HPCTK_CALIBRATION"] = before
