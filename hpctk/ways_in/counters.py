"""What an optimizer has done on this rank so far, whichever way training meets its method; in files, too, if asked for.

Opening files is collective, when the optimizer is made: the ranks agree on a folder and compare their clocks. After
that nothing is communicated for their sake.
"""

from __future__ import annotations

import json
import time
import uuid
import weakref
from collections import Counter as Counts
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hpctk.collectives.engine.engine import counted, engine_of
from hpctk.collectives.tuning.clocks import clock_offset
from hpctk.comm import environment
from hpctk.errors import SettingError
from hpctk.log import log
from hpctk.methods.core.method import Method
from hpctk.methods.core.replica import Replica
from hpctk.metrics import OnStep, StepMetrics
from hpctk.telemetry.names import FOLDER, file_name, run_id
from hpctk.telemetry.recorder import Counter, dense_sent
from hpctk.telemetry.settings import StatsSettings
from hpctk.ways_in import metadata

if TYPE_CHECKING:
    from hpctk.telemetry.recording import Recording

#: What users may give as `stats`.
StatsLike = str | Path | StatsSettings | None


@dataclass(frozen=True)
class Stats:
    """What an optimizer has done on this rank so far.

    Attributes
    ----------
    steps : int
    sent_bytes, received_bytes, messages, seconds
        Of its collectives. What MPI's own all-reduce moves cannot be counted: see `uncounted_calls`.
    uncounted_calls : int
        Collectives whose bytes only MPI knows.
    counts : mapping
        What the method counts: rounds, uploads, skips, skipped_steps, fallbacks and the like; 0 where nothing was.
    """

    steps: int
    sent_bytes: int
    received_bytes: int
    messages: int
    seconds: float
    uncounted_calls: int
    counts: Mapping[str, int]


class Counters:
    """Steps, a counter of the collectives that belong to them, and their recording.

    Collective over the communicator to make, where statistics are asked for.

    Parameters
    ----------
    replica : Replica
    method : Method
    settings : StatsSettings, optional
        Where files go; the same on all ranks.
    """

    def __init__(self, replica: Replica, method: Method, settings: StatsSettings | None = None) -> None:
        self._world = replica.world
        self.steps, self.counter = 0, Counter()
        self.recording = None if settings is None else opened(replica, method, settings)
        if self.recording is not None:
            # When the optimizer is gone, at exit at the latest.
            weakref.finalize(self, self.recording.close)
        self._exposed_s = 0.0
        self._depth = 0
        self._counts: Counts[str] = Counts()
        #: Who is told of every step, and what there was to tell when the last one was over.
        self._told: list[OnStep] = []
        self._before: tuple[float, int, int, int, float] = (0.0, 0, 0, 0, 0.0)

    def add_metrics(self, on_step: OnStep, counts: Mapping[str, int]) -> None:
        """Call a function with the StepMetrics of every step from now on; `counts` are the method's so far. Local."""
        if not callable(on_step):
            raise SettingError(f"add_metrics({on_step!r}): need a function of one hpctk.metrics.StepMetrics")
        if not self._told and self.recording is None:
            # Nobody has kept up with them.
            self._counts = Counts(counts)
        self._told.append(on_step)
        self._before = self._now()

    def _now(self) -> tuple[float, int, int, int, float]:
        c = self.counter
        return time.perf_counter(), c.sent_bytes, c.received_bytes, c.messages, c.waiting_s

    def _tell(self, new: Mapping[str, int], loss: Any) -> None:
        now = self._now()
        seconds, sent, received, messages, waiting_s = (b - a for a, b in zip(self._before, now, strict=True))
        self._before = now
        told = StepMetrics(
            self.steps - 1, self._world.rank, seconds, int(sent), int(received), int(messages), waiting_s,
            self._exposed_s, kept_loss(loss), {name: count for name, count in new.items() if count},
        )  # fmt: skip
        for on_step in tuple(self._told):
            try:
                on_step(told)
            # Whatever it is: a board that cannot be written to must not end a training, let alone on one rank.
            except Exception:
                log.warning("metrics: %r failed and is called no more. Training goes on.", on_step, exc_info=True)
                self._told.remove(on_step)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the collectives inside. Local; may be nested."""
        engine, before = engine_of(self._world), engine_of(self._world).recorders.exposed_s
        listening = (self.counter,) if self.recording is None else (self.counter, self.recording)
        self._depth += 1
        try:
            with counted(self._world, *listening):
                yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._exposed_s += engine.recorders.exposed_s - before

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Record the collectives inside, but do not count them: they are not those of steps. Local."""
        with counted(self._world, *(() if self.recording is None else (self.recording,))):
            yield

    def begin(self) -> None:
        """Say that preparations are over, and steps begin."""
        self._exposed_s = 0.0
        if self.recording is not None:
            self.recording.begin_steps(self.steps)

    def forget(self, kept: Sequence[int]) -> None:
        """Go on without ranks that are lost; `kept` are the numbers that the others had, in their new order. Local."""
        if self.recording is not None:
            self.recording.forget(kept)

    def end_step(self, counts: Mapping[str, int], loss: Any = None, norms: Mapping[str, float] | None = None) -> None:
        """Count a step; `counts` are the method's so far, `norms` what became of lost ranks' residuals in it."""
        self.steps += 1
        if self.recording is not None or self._told:
            new = {name: count - self._counts[name] for name, count in counts.items()}
            if self.recording is not None:
                told = {**new, **norms} if norms else new
                self.recording.end_step(self.steps - 1, told, kept_loss(loss), self._exposed_s)
            if self._told:
                self._tell(new, loss)
            self._counts = Counts(counts)
        self._exposed_s = 0.0

    def stats(self, counts: Mapping[str, int]) -> Stats:
        """Return what was done so far; `counts` are the method's."""
        c = self.counter
        return Stats(self.steps, c.sent_bytes, c.received_bytes, c.messages, c.seconds, c.uncounted_calls, counts)

    def load(self, stats: Stats) -> None:
        """Go on counting from what an earlier run had counted on this rank."""
        self.steps, c = stats.steps, self.counter
        c.sent_bytes, c.received_bytes = stats.sent_bytes, stats.received_bytes
        c.messages, c.seconds, c.uncounted_calls = stats.messages, stats.seconds, stats.uncounted_calls
        self._counts = Counts(stats.counts)
        self._before = self._now()
        self.begin()

    def close(self) -> None:
        """Close the files; counting in memory goes on."""
        if self.recording is not None:
            self.recording.close()


def wanted(stats: StatsLike) -> StatsSettings | None:
    """Return where statistics are to go: as given, else as HPCTK_STATS says. None for nowhere."""
    if isinstance(stats, StatsSettings):
        return stats
    if stats is not None and not isinstance(stats, str | Path):
        raise SettingError(f"stats={stats!r}: need a folder, or hpctk.StatsSettings")
    folder = environment.read("HPCTK_STATS") if stats is None else Path(stats)
    if folder is None:
        return None
    events, flush_s = environment.read("HPCTK_STATS_EVENTS"), environment.read("HPCTK_STATS_FLUSH_S")
    return StatsSettings(folder, events=events, flush_s=flush_s)


def opened(replica: Replica, method: Method, settings: StatsSettings) -> Recording | None:
    """Return this rank's recording in a new folder of the run; None, and one warning, where that cannot be.

    Collective over the communicator.
    """
    here = replica.world
    place = here.run_on_root("opening the statistics", lambda: _new_folder(settings.folder))
    offset_s, error_s = clock_offset(here)
    recording, why = None, place.get("error", "")
    if not why:
        try:
            recording = _open(replica, method, settings, place, offset_s, error_s)
        # Whatever it is: the others must not wait for a rank that fails here.
        except Exception as error:
            why = str(error) or type(error).__name__
    # Of several that fail the first one says so.
    first = here.minimum([here.rank if why else here.size], "opening the statistics")[0]
    if why and first == here.rank:
        log.warning(
            "no statistics, %s cannot be written (rank %d): %s. Training goes on.", settings.folder, here.rank, why
        )
    return recording


def _new_folder(run: Path) -> dict[str, Any]:
    """Make the next recording's folder; return its number and the run's id, or what went wrong."""
    try:
        run.mkdir(parents=True, exist_ok=True)
        earlier = sorted((x for x in run.iterdir() if FOLDER.fullmatch(x.name)), key=lambda x: int(x.name))
        number = int(earlier[-1].name) + 1 if earlier else 0
        while not _made(run / f"{number:03d}"):
            number += 1
        # JSON keeps every bit of a number.
        began_s = time.perf_counter()
    except OSError as error:
        return {"error": str(error)}
    same_run = uuid.uuid4().hex
    if earlier:
        with suppress(OSError, KeyError):
            same_run = run_id(earlier[-1] / file_name(0))
    return {"number": number, "run_id": same_run, "began_s": began_s}


def _made(folder: Path) -> bool:
    """Make a folder; return False where somebody else has just made it."""
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True


def _open(
    replica: Replica, method: Method, settings: StatsSettings, place: Mapping[str, Any], offset_s: float, error_s: float
) -> Recording:
    # With h5py, which nobody needs who writes nothing.
    from hpctk.telemetry.recording import Recording

    here = replica.world
    folder = settings.folder / f"{place['number']:03d}"
    # Where nodes do not share a file system it is there on rank 0's alone.
    folder.mkdir(parents=True, exist_ok=True)
    nbytes = sum(parameter.numel() * parameter.element_size() for parameter in replica.parameters)
    # Times count from here, on every rank's own clock.
    began_s = place["began_s"] if here.rank == 0 else time.perf_counter()
    attributes = {
        "run_id": place["run_id"], "recording": place["number"], **metadata.describe(here),
        "method": type(method).__name__, "settings": json.dumps(method.settings(), default=str),
        "schedule": replica.schedule,
        "parameters": sum(parameter.numel() for parameter in replica.parameters), "parameter_bytes": nbytes,
        "clock_offset_s": began_s + offset_s - place["began_s"], "clock_error_s": error_s,
    }  # fmt: skip
    return Recording(
        folder / file_name(here.rank), settings, here.size, here.name, attributes, metadata.environment(),
        dense_sent("allreduce", nbytes, here.size), began_s,
    )  # fmt: skip


def kept_loss(loss: Any) -> Any:
    """Return a loss as it is now, without its history: a number, or a copy where asking would wait for a device."""
    if not isinstance(loss, torch.Tensor):
        return loss
    if loss.numel() != 1:
        return None
    return loss.detach().clone() if loss.device.type != "cpu" else float(loss.detach())
