"""All-reduce of any tensor: the sum, mean or maximum over all ranks, on all ranks.

What happens to one tensor: the ranks make sure that they all gave the same shape and dtype; a copy
of it, flat and on the host unless MPI takes device memory, is reduced in place by the engine (any
plan) or by MPI or torch.distributed itself; the copy, in the tensor's shape, is the result. On a device
that the process group's own backend serves (NCCL), "auto" and "torch" are that group's all-reduce, where
the tensor lies.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from hpctk.collectives.engine.elements import elements
from hpctk.collectives.engine.engine import Engine, engine_of
from hpctk.collectives.engine.handle import Handle
from hpctk.collectives.engine.plan_run import Run
from hpctk.collectives.engine.shared_memory_run import SharedMemoryRun, summing
from hpctk.collectives.tuning import auto
from hpctk.collectives.tuning.calibration import OUT_OF_PLACE
from hpctk.collectives.tuning.learning import Trial
from hpctk.comm import buffers
from hpctk.comm.buffers import Dtype
from hpctk.comm.collective import collective
from hpctk.comm.shared_window import SharedWindow
from hpctk.comm.world import World, world
from hpctk.errors import SettingError
from hpctk.schedules.core.registry import HIERARCHICAL, SHARED_MEMORY
from hpctk.telemetry.recorder import Call

if TYPE_CHECKING:
    from hpctk.comm.torch.device_group import DeviceGroup
    from hpctk.comm.world import Comm

OPERATIONS = ("mean", "sum", "max")
#: Up to this many bytes the library's own all-reduce is called the short way.
FEW_BYTES = 65536


@collective
def allreduce(tensor: Any, *, op: str = "mean", schedule: str = "auto", comm: Comm | None = None) -> Any:
    """Return the mean, sum or maximum of `tensor` over all ranks, as a new tensor like it.

    Not in place.

    Parameters
    ----------
    tensor : torch.Tensor or numpy.ndarray
        The same shape and dtype on every rank; a device tensor's result is on that device.
    op : {"mean", "sum", "max"}
    schedule : str
        A name that `hpctk schedule list` shows, "mpi" for MPI's own (whose maximum may lose a NaN), "torch" for
        torch.distributed's own on a process group, or "auto".
    comm : MPI.Intracomm or torch.distributed.ProcessGroup, optional
        COMM_WORLD where not given.
    """
    here = world(comm)
    with here.one_thread:
        result, dtype = prepared(here, "allreduce", tensor, op, schedule)
        return reduce_in_place(here, result, dtype, op, schedule)


@collective
def iallreduce(tensor: Any, *, op: str = "mean", schedule: str = "auto", comm: Comm | None = None) -> Handle:
    """Start an all-reduce and return its Handle; `handle.wait()` returns what `allreduce` does.

    Collective over the communicator: all ranks start their collectives in the same order. They may
    wait for them in any order. The tensor may be changed at once.
    """
    here = world(comm)
    with here.one_thread:
        result, dtype = prepared(here, "allreduce", tensor, op, schedule)
        engine_of(here).overlaps = True
        return start_in_place(here, result, dtype, op, schedule)


def prepared(here: World, what: str, tensor: Any, op: str, schedule: str) -> tuple[Any, Dtype]:
    """Make sure that all ranks mean the same reduction, and return a copy to be reduced in place.

    Collective over the communicator.
    """
    here.agree(what, [*buffers.describe(tensor), ("op", op), ("schedule", schedule)])
    tensor = buffers.native(tensor)
    if op not in OPERATIONS:
        raise SettingError(f"op={op!r}: known are {', '.join(OPERATIONS)}")
    dtype = buffers.summable(buffers.dtype_of(tensor), op)
    return tensor.detach().clone() if buffers.is_torch(tensor) else tensor.copy(), dtype


@collective
def reduce_in_place(here: World, tensor: Any, dtype: Dtype, op: str, schedule: str, source: Any = None) -> Any:
    """Replace `tensor`, which all ranks know to be alike, by its reduction, and return it.

    In place; or that of a `source` just like it, which is left as it is.
    """
    # The short way: for a few bytes every call of Python counts.
    if isinstance(tensor, np.ndarray):
        n = tensor.size
    else:
        n = tensor.numel()
        if not tensor.is_cpu and _device_group(here, tensor, dtype, op, schedule) is not None:
            return start_in_place(here, tensor, dtype, op, schedule, source=source).wait()
    nbytes = n * dtype.itemsize
    attached = here.attached
    native, engine = here.native, attached.get(Engine) or engine_of(here)
    at_once = not engine.overlaps
    if schedule == "auto":
        choice = attached.get(auto.Choice)
        known = choice is not None and op != "max" and at_once and source is None
        chosen = choice.summing.get(nbytes) if choice is not None and known else None
        if chosen is None:
            tried = auto.trial(here, nbytes) if at_once and op != "max" else None
            if tried is not None:
                return _try(here, tensor, dtype, op, tried, source)
            kind = "iallreduce" if not at_once else OUT_OF_PLACE if source is not None else "allreduce"
            chosen = _choose(here, nbytes, dtype, op, kind)
        schedule = chosen
    if source is not None and (schedule != SHARED_MEMORY or buffers.on_device(tensor)):
        tensor.copy_(source)
        source = None
    if at_once and schedule == native.name:
        began = time.perf_counter()
        if native.allreduce_at_once(tensor, dtype, op):
            engine.report_allreduce(schedule, n, dtype.itemsize, began)
            return tensor
    # One span, so that bringing the result home belongs to the call, too.
    with engine.span():
        return start_in_place(here, tensor, dtype, op, schedule, at_once=at_once, source=source).wait()


def _try(here: World, tensor: Any, dtype: Dtype, op: str, tried: Trial, source: Any) -> Any:
    """Reduce by a schedule that is being tried, and let all ranks know how long that took."""
    began = time.perf_counter()
    result = reduce_in_place(here, tensor, dtype, op, auto.name_of(here, tried.schedule), source)
    auto.took(here, tried, time.perf_counter() - began)
    return result


def start_in_place(
    here: World,
    tensor: Any,
    dtype: Dtype,
    op: str,
    schedule: str,
    lane: int | None = None,
    *,
    at_once: bool = False,
    source: Any = None,
) -> Handle:
    """Start replacing `tensor`, which all ranks know to be alike, by its reduction.

    Collective over the communicator. In place; waiting returns `tensor`. With a reserved `lane` of the engine ranks
    may start it in different orders with other collectives; the library's own all-reduce cannot do that, a plan is
    taken instead. (On a device's own group there is nothing to change places with but another model.) `at_once`
    says that nothing else can be under way, on any rank, and that the caller waits next. What is reduced is `source`,
    where it is given: it must stay as it is until then.
    """
    group = _device_group(here, tensor, dtype, op, schedule)
    if group is not None:
        if source is not None:
            tensor.copy_(source)
        return _start_on_device(here, group, tensor, dtype, op)
    nbytes = _nbytes(tensor, dtype)
    chosen = _choose(here, nbytes, dtype, op, "iallreduce") if schedule == "auto" else schedule
    if chosen == here.native.name and lane is None and here.native.sums(dtype, at_once=at_once):
        return _start_own(here, tensor, dtype, op, at_once)
    if lane is None and (chosen == SHARED_MEMORY or (chosen == HIERARCHICAL and here.nodes_share_memory)):
        auto.check(here, "allreduce", chosen)
        window = here.shared_window()
        if window is not None:
            return _start_shared(here, window, tensor, dtype, op, chosen, source)
    if source is not None:
        tensor.copy_(source)
    if chosen in (here.native.name, SHARED_MEMORY):
        chosen = "recursive_doubling" if nbytes <= FEW_BYTES else "ring"
    plan = auto.plan_for(here, "allreduce", nbytes, chosen)
    engine = engine_of(here)
    with engine.span() as span:
        with span.staging():
            flat = here.stager.to_comm(tensor)

        def finish() -> Any:
            with engine.staging():
                here.stager.from_comm(tensor, flat)
            return tensor

        return engine.handle(plan, elements(flat, dtype, op, here.size), finish, lane=lane)


def _device_group(here: World, tensor: Any, dtype: Dtype, op: str, schedule: str) -> DeviceGroup | None:
    """Return the group whose own all-reduce takes this tensor where it lies, None where there is none."""
    if isinstance(tensor, np.ndarray) or tensor.is_cpu or schedule not in ("auto", here.native.name) or here.size == 1:
        return None
    group = here.device_group(tensor)
    return group if group is not None and group.sums(dtype, op) else None


def _start_on_device(here: World, group: DeviceGroup, tensor: Any, dtype: Dtype, op: str) -> Handle:
    flat = buffers.flatten(tensor)
    wide = flat.float() if dtype.widened else flat
    began = time.perf_counter()
    call = _opened(here, len(flat), dtype)
    work = group.start_allreduce(wide, op)
    started_s = time.perf_counter() - began
    name = f"{here.native.title} of {len(flat)} elements on {tensor.device.type}"

    seen = _Seen(work.done)

    def wait() -> Any:
        began = time.perf_counter()
        work.wait(name)
        _report(here, call, time.perf_counter() - began + started_s, seen.over_s)
        if op == "mean":
            wide.div_(here.size)
        buffers.write_back(tensor, wide)
        return tensor

    return Handle(name, seen, wait)


def _start_shared(
    here: World, window: SharedWindow, tensor: Any, dtype: Dtype, op: str, schedule: str, source: Any
) -> Handle:
    if source is not None and schedule == HIERARCHICAL:
        tensor.copy_(source)
    engine = engine_of(here)
    with engine.span() as span:
        with span.staging():
            flat = here.stager.to_comm(tensor, stage=True)
        run: Run
        if schedule == HIERARCHICAL:
            run = engine.start_hierarchical(window, here.nodes, flat, dtype, op)
        else:
            sums = summing(window, flat, dtype, op, None if source is None else buffers.flatten(source))
            # A run that was made has its turn at the window: another thread must be refused before.
            with here.one_thread:
                run = SharedMemoryRun(window, sums, engine.traffic())
                engine.start_shared(run, len(flat), dtype.itemsize)
        name = f"{schedule} allreduce of {len(flat)} elements"

        def is_done() -> bool:
            engine.progress()
            return run.done

        def wait() -> Any:
            engine.complete(run, name)
            with engine.staging():
                here.stager.from_comm(tensor, flat)
            return tensor

        return Handle(name, is_done, wait)


def _start_own(here: World, tensor: Any, dtype: Dtype, op: str, at_once: bool) -> Handle:
    flat = here.stager.to_comm(tensor, stage=True)
    wide = flat
    if dtype.widened:
        wide = flat.float() if buffers.is_torch(flat) else flat.astype("float32")
    began = time.perf_counter()
    call = _opened(here, len(flat), dtype)
    reduction = here.native.start(wide, dtype, op, at_once=at_once)
    started_s = time.perf_counter() - began
    n = len(flat)
    name = f"{here.native.title} of {n} elements"
    seen = _Seen(reduction.done)

    def wait() -> Any:
        began = time.perf_counter()
        reduction.wait(name)
        # A call that blocks is over before it is waited for.
        _report(here, call, time.perf_counter() - began + (started_s if at_once else 0.0), seen.over_s)
        result = wide / here.size if op == "mean" else wide
        if result is not flat:
            flat[...] = result.to(flat.dtype) if buffers.is_torch(result) else result
        here.stager.from_comm(tensor, flat)
        return tensor

    return Handle(name, seen, wait)


class _Seen:
    """Asks whether a call of the library's is over, and takes note of when it first was."""

    def __init__(self, done: Callable[[], bool]) -> None:
        self._done = done
        #: When it was found to be over, by time.perf_counter(); None where nobody has asked since.
        self.over_s: float | None = None

    def __call__(self) -> bool:
        if self.over_s is None and self._done():
            self.over_s = time.perf_counter()
        return self.over_s is not None


def _opened(here: World, n: int, dtype: Dtype) -> Call:
    return engine_of(here).opened_array("allreduce", here.native.name, n, dtype.itemsize, own=n)


def _report(here: World, call: Call, waiting_s: float, over_s: float | None) -> None:
    """Record a call of the library's own, of which only its duration is known."""
    engine = engine_of(here)
    call.waiting_s = waiting_s
    engine.recorders.exposed_s += waiting_s
    engine.report(call, over_s)


def _choose(here: World, nbytes: int, dtype: Dtype, op: str, kind: str = "allreduce") -> str:
    chosen = auto.choose(here, kind, nbytes)
    # The library's maximum of a number and NaN is the one or the other; ours is NaN.
    loses_nan = chosen == here.native.name and op == "max" and "float" in dtype.unit
    return "recursive_doubling" if loses_nan else chosen


def _nbytes(tensor: Any, dtype: Dtype) -> int:
    return dtype.itemsize * int(tensor.numel() if buffers.is_torch(tensor) else tensor.size)
