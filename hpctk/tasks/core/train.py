"""Data-parallel training of a bundled job by any method: the frame in which methods are compared."""

from __future__ import annotations

import hashlib
import math
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpctk.checkpoint import Checkpoints
from hpctk.comm.world import World
from hpctk.methods.core.method import Method
from hpctk.optimizer import DistributedOptimizer
from hpctk.tasks.core.recipes import Recipe, readable
from hpctk.tasks.core.result import POINTS, Curve
from hpctk.tasks.core.task import Task

#: Steps between two questions to rank 0 whether the time budget is used up: each is a tiny all-reduce.
CLOCK_STEPS = 8


@dataclass(frozen=True)
class Report:
    """How a job stands after a step, for whoever shows it."""

    done: int
    total: int
    loss: float
    samples_per_s: float
    bytes_per_step: float | None


@dataclass(frozen=True)
class Result:
    """How a training job went, on this rank.

    `sent_bytes` is None where MPI's own collectives moved tensors: they do not tell. `rounds` are this rank's
    exchanges; for SASG its uploads. `complete` is false where the time budget ended the job. `params` is how many
    parameters the model has, `parameters_sha256` is of the model that was evaluated.
    """

    metrics: dict[str, float]
    loss: float | None
    seconds: float
    steps: int
    rounds: int
    sent_bytes: int | None
    complete: bool
    params: int
    parameters_sha256: str
    counts: dict[str, int]
    curve: dict[str, Any]


class Clock:
    """The seconds that a job has used, those before it was stopped and resumed included."""

    def __init__(self, optimizer: DistributedOptimizer, budget_s: float | None, used_s: float) -> None:
        self._optimizer, self._budget_s = optimizer, budget_s
        self._began = time.perf_counter() - used_s
        self._asked: int | None = None

    @property
    def seconds(self) -> float:
        """Seconds used so far, on this rank."""
        return time.perf_counter() - self._began

    def is_up(self, block: int) -> bool:
        """Return whether the budget is used up on rank 0's clock: the same answer on all ranks.

        Collective over the communicator where `block`, a number that all ranks come to, is a new one; else False.
        """
        if self._budget_s is None or block == self._asked:
            return False
        self._asked, world, budget_s = block, self._optimizer.world, self._budget_s

        def ask() -> list[int]:
            over = world.rank == 0 and self.seconds >= budget_s
            return world.minimum([0 if over else 1], "asking rank 0 for the time")

        return self._optimizer.together(ask) == [0]


@dataclass
class Position:
    """Where a job is: the epoch, the samples of it that are done over all ranks, and the seconds used."""

    epoch: int = 0
    samples: int = 0
    seconds: float = 0.0


class Job:
    """One task, loaded, trained by one method. Collective over the communicator: making, resuming and running it.

    Checkpoints go to `folder`, without it there are none; statistics go to `stats`, without it where HPCTK_STATS says.
    """

    def __init__(
        self, here: World, task: Task[Any], recipe: Recipe, folder: Path | None = None, stats: Path | None = None
    ) -> None:
        settings, method = task.settings, recipe.make()
        task.check(here.size, method)
        here.agree(f"train {settings.task}", [*asdict(settings).items(), *readable(method).items()])
        _seed(settings.seed, here.rank)
        self._here, self._task = here, task
        self.model = task.model()
        base = torch.optim.SGD(self.model.parameters(), lr=settings.lr, momentum=settings.momentum)
        self.optimizer = DistributedOptimizer(
            base,
            method,
            model=self.model,
            schedule=settings.schedule,
            stats=stats,
            on_lost_rank=settings.on_lost_rank,
            buddy=settings.buddy,
        )
        self._position = Position()
        total = task.epochs * (task.samples // task.step_samples(here.size))
        self._curve = Curve(max(1, total // POINTS))
        self._last_round = _last_round(method, total)
        self._checkpoints: Checkpoints | None = None
        if folder is not None:
            minutes = settings.checkpoint_minutes
            self._checkpoints = Checkpoints(
                folder, self.optimizer, self.model,
                every_steps=settings.checkpoint_steps, every_s=None if minutes is None else 60 * minutes,
            )  # fmt: skip

    def resume(self) -> bool:
        """Go on from the newest checkpoint; return whether there is one. Collective over the communicator."""
        extra = None if self._checkpoints is None else self._checkpoints.resume()
        if extra is None:
            return False
        self._position = Position(**extra["position"])
        self._curve = Curve(**extra["curve"])
        return True

    def run(self, on_step: Callable[[Report], None]) -> Result:
        """Train to the end, or until the time budget is used up; call `on_step` after each step of this rank.

        Collective over the communicator.
        """
        self.model.train()
        clock = Clock(self.optimizer, self._task.settings.time_budget_s, self._position.seconds)
        began, steps_before = clock.seconds, self.optimizer.stats.steps
        while not (self._is_over() or self.optimizer.finished or clock.is_up(self._block())):
            loss = self._step()
            stats, self._position.seconds = self.optimizer.stats, clock.seconds
            self._curve.add(stats.steps, clock.seconds, stats.sent_bytes, loss)
            rate = (stats.steps - steps_before) * self._task.step_samples(self._here.size)
            on_step(
                Report(
                    *self._done_and_total(), loss, rate / (clock.seconds - began),
                    None if stats.uncounted_calls else stats.sent_bytes / stats.steps,
                )
            )  # fmt: skip
            if self._checkpoints is not None and not self._is_over():
                self._checkpoints.after_step(**self._extra())
        return self._result()

    def close(self) -> int:
        """Listen for signals no longer; return the one that came too late to be acted on, 0 for none."""
        self.optimizer.close_stats()
        if self._checkpoints is None:
            return 0
        self._checkpoints.close()
        return self._checkpoints.heard

    def _step(self) -> float:
        """Do one step, and move on. Collective over the communicator, as the optimizer's step is."""
        task, here, now = self._task, self._here, self._position
        # With the ranks of now: should one be lost in this step, what was dealt to the others is trained on once.
        dealt = task.step_samples(here.size)
        if now.samples + dealt > task.samples:
            now.epoch, now.samples = now.epoch + 1, 0
        batch = task.batch(here.rank, here.size, now.epoch, now.samples)
        loss = task.step(self.optimizer, self.model, batch)
        now.samples += dealt
        return loss

    def _is_over(self) -> bool:
        if self._last_round is not None:
            return self.optimizer.stats.counts.get("rounds", 0) >= self._last_round
        now, step_samples = self._position, self._task.step_samples(self._here.size)
        return now.epoch >= self._task.epochs - 1 and now.samples + step_samples > self._task.samples

    def _block(self) -> int:
        """Return a number that all ranks come to: of blocks of steps, or of rounds where ranks differ in steps."""
        stats = self.optimizer.stats
        return stats.steps // CLOCK_STEPS if self._last_round is None else stats.counts.get("rounds", 0)

    def _done_and_total(self) -> tuple[int, int]:
        stats = self.optimizer.stats
        if self._last_round is not None:
            return stats.counts.get("rounds", 0), self._last_round
        now, step_samples = self._position, self._task.step_samples(self._here.size)
        left = (self._task.samples - now.samples) // step_samples
        later = (self._task.epochs - 1 - now.epoch) * (self._task.samples // step_samples)
        return stats.steps, stats.steps + left + later

    def _extra(self) -> dict[str, Any]:
        # Not copies: this is asked for in every step.
        return {"position": vars(self._position), "curve": vars(self._curve)}

    def _result(self) -> Result:
        # Before the evaluation, whose bytes are not those of training.
        stats = self.optimizer.stats
        if self._checkpoints is not None:
            self._checkpoints.save(**self._extra())
        with self.optimizer.averaged_model():
            self.model.eval()
            digest = parameters_sha256(self.model)
            metrics = self.optimizer.together(
                lambda: self._here.run_on_root("evaluating", lambda: self._task.evaluate(self.model))
            )
        return Result(
            metrics, self._curve.last_loss, self._position.seconds, stats.steps, stats.counts.get("rounds", 0),
            None if stats.uncounted_calls else stats.sent_bytes, self._is_over(),
            sum(p.numel() for p in self.model.parameters()), digest, dict(stats.counts),
            asdict(self._curve),
        )  # fmt: skip


def _last_round(method: Method, steps: int) -> int | None:
    """Return the round after which an asynchronous job is over: its ranks do different numbers of steps."""
    return None if method.lockstep else max(1, math.ceil(steps / getattr(method, "period", 1)))


def _seed(seed: int, rank: int) -> None:
    """Seed the global generators: ranks draw different numbers for dropout, but the same in every run."""
    words = np.random.SeedSequence([seed, rank]).generate_state(3)
    torch.manual_seed(int(words[0]))
    np.random.seed(int(words[1]))
    random.seed(int(words[2]))


def parameters_sha256(model: torch.nn.Module) -> str:
    """Return a digest of the parameters' bits."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(parameter.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()
