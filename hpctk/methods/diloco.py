"""DiLoCo: an outer optimizer steps on what `period` local steps have come to.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv 2311.08105; in fragments:
Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv 2501.18512; periods that follow the learning
rate: Gu et al., arXiv 2310.14423 (methods/core/period_rule.py). x is the same on all ranks, buf (0 at first), too:

    every step                x_i <- the base optimizer's step on the local gradient
    after `period` of them    delta_i = x - x_i;  delta = mean_i delta_i, or with a compressor and its residuals as
                              in methods/core/common_model.py
                              buf = outer_momentum*buf + delta
                              x <- x - outer_lr*(delta + outer_momentum*buf), or without Nesterov x - outer_lr*buf
                              x_i <- (1 - mixing)*x + mixing*x_i

`fragments` cut the list of tensors into runs, which take turns: a slot is period/fragments steps long, and its fragment
leaves `delay` steps before its end. Local steps go on meanwhile; what they do to it is lost, but for `mixing`. Where a
rank is lost meanwhile, those that are left send once more what they had sent.

What travels: the model, or packets of it, once in `period` steps; with fragments in as many parts, one at a time. The
base optimizer's state and the buffers stay where they are. The model to evaluate is x. Steps after the last round are
not in it: let `period` divide their number, or use QSR(steps=...). One rank alone is no special case.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar
from weakref import finalize, ref

import torch

from hpctk import torch_private
from hpctk.collectives.engine.engine import engine_of
from hpctk.compressors import Compressor
from hpctk.errors import SettingError
from hpctk.methods.core.common_model import CommonModel, Fragment, FragmentState
from hpctk.methods.core.method import LocalStepMethod
from hpctk.methods.core.model_step import DIFFERENCES, ModelRun
from hpctk.methods.core.period_rule import A_RULE, QSR, rule_by_name
from hpctk.methods.core.replica import Replica, restore
from hpctk.methods.core.survival import Undo
from hpctk.settings import documented, setting

#: The setting that says how what the ranks have sent is put together.
REDUCE: dict[str, Any] = {
    "meaning": "what an element's sum is divided by: the number of ranks, or of those that have sent it",
    "choices": ("mean", "contributors"),
}


@documented
@dataclass(frozen=True)
class DiLoCo(LocalStepMethod):
    """Let an outer SGD step on the mean of what the workers' local steps have come to."""

    kind: ClassVar[str] = "model"
    summary: ClassVar[str] = "an outer optimizer on what period local steps came to; in fragments, while steps go on"

    period: int = setting(32, "local steps between rounds of the same tensors; the paper has 500", at_least=1)
    outer_lr: float = setting(0.7, "rate of the outer SGD; 1 without momentum is LocalSGD", above=0)
    outer_momentum: float = setting(0.9, "of the outer SGD", at_least=0, below=1)
    nesterov: bool = setting(True, "whether the outer momentum is Nesterov's")
    compressor: Compressor | None = setting(None, **DIFFERENCES)
    feedback: float = setting(1.0, "what is kept of a residual from round to round", at_least=0, at_most=1)
    reduce: str = setting("mean", **REDUCE)
    fragments: int = setting(1, "runs of tensors that take turns", at_least=1)
    delay: int = setting(0, "local steps during which a fragment travels; below period / fragments", at_least=0)
    mixing: float = setting(
        0.0, "share of itself that a worker keeps in a round; streaming: 0.5", at_least=0, at_most=1
    )
    period_rule: QSR | None = setting(None, "says the period anew for each round", parser=rule_by_name, allowed=A_RULE)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.period % self.fragments:
            raise SettingError(f"period={self.period}: need a multiple of the {self.fragments} fragments")
        if self.delay >= self.period // self.fragments:
            raise SettingError(
                f"delay={self.delay}: need less than period / fragments, which is {self.period // self.fragments}"
            )
        if self.delay and self.compressor is not None and self.compressor.combines == "own":
            raise SettingError(f"delay={self.delay}: {self.compressor!r} cannot travel while local steps go on")
        if self.delay and self.reduce != "mean":
            raise SettingError(f"reduce={self.reduce!r}: cannot be found out while local steps go on; leave out delay")

    def begin(self, replica: Replica, base: torch.optim.Optimizer) -> DilocoRun:
        """Return DiLoCo at work on a replica. Collective over the communicator."""
        return DilocoRun(self, replica, base)


class DilocoRun(ModelRun):
    """DiLoCo at work on one rank. `period` is the length of a slot, `since_round` counts the steps of one.

    Attributes
    ----------
    slot : int
        Number of the slot: its fragment is the one of that number, modulo their number.
    momentum : list of torch.Tensor
        buf of each fragment, flat; empty without outer momentum.
    """

    common: CommonModel

    def __init__(self, settings: DiLoCo, replica: Replica, base: torch.optim.Optimizer) -> None:
        super().__init__(replica, base, settings.period, settings.period_rule)
        self._settings = settings
        self.common = CommonModel(
            replica,
            settings.compressor,
            feedback=settings.feedback,
            reduce=settings.reduce,
            fragments=settings.fragments,
        )
        self.momentum = [torch.zeros_like(x.x.flat) for x in self.common.fragments] if settings.outer_momentum else []
        self.slot = 0
        #: Whether this slot's fragment has left, and what has come of it where somebody has waited already.
        self._left = False
        self._combined: torch.Tensor | None = None
        #: What the fragment was when it left, where ranks may be lost; and why it could not go on.
        self._sent: FragmentState | None = None
        self._failed: Exception | None = None
        self._lanes: range | None = None
        #: Seconds of local steps that were spent on what is under way, and are not told yet.
        self._progress_s = 0.0
        if settings.delay:
            self._reserve()
            hook = partial(_progress, ref(self))
            hooks = [parameter.register_post_accumulate_grad_hook(hook) for parameter in replica.own]
            finalize(self, lambda: [one.remove() for one in hooks])

    def _reserve(self) -> range:
        """Return two lanes of the engine's; on all ranks in the same order with other collectives."""
        if self._lanes is None:
            engine = engine_of(self.replica.world)
            engine.overlaps = True
            self._lanes = engine.reserve(2)
        return self._lanes

    @property
    def fragment(self) -> Fragment:
        """The fragment whose turn it is."""
        return self.common.fragments[self.slot % len(self.common.fragments)]

    def next_period(self) -> int:
        """Return the length of the slot that begins: of all slots of a cycle the same."""
        count = len(self.common.fragments)
        # Rounded up: each fragment has its turn.
        return self.period if self.slot % count else -(-super().next_period() // count)

    def count_step(self) -> None:
        """Count a local step; let the fragment leave, or do the round, where that is due."""
        self.progress()
        # Told here, and not in backward, where nobody listens.
        engine_of(self.replica.world).recorders.exposed_s += self._progress_s
        self._progress_s = 0.0
        super().count_step()
        # The last round of a run may be shorter than the delay.
        delay = min(self._settings.delay, self.period - 1)
        if delay and self.since_round == self.period - delay and self.fragment.n:
            self.replica.together(lambda: self._leave(active=True), self.undo)

    def progress(self) -> None:
        """Let a fragment that is under way make progress. Local."""
        if self._left and self._combined is None and self._settings.delay and self._failed is None:
            began = time.perf_counter()
            try:
                self.fragment.progress()
            except self.replica.world.losses as error:
                if self.replica.survival is None or not self.replica.world.is_broken():
                    raise
                # Not during a local step: the round finds it out with all ranks.
                self._failed = error
            self._progress_s += time.perf_counter() - began

    def prepare_round(self) -> None:
        """Take note of how far this rank's fragment is from x; raise TensorError where that cannot be sent."""
        self.common.begin()
        self.fragment.look()
        self.fragment.check()

    def _leave(self, *, active: bool) -> bool:
        """Open a round, and let the fragment leave. Collective over the communicator."""
        status = self.open_round(active=active)
        self.skip_or_raise(status)
        if self._settings.delay:
            lanes = self._reserve()
            self._sent = None if self.replica.survival is None else self.fragment.kept()
            self.fragment.start(lanes)
        self._left = True
        return status.active

    def _round(self, *, active: bool) -> bool:
        """End the slot: do the outer step on its fragment. Collective over the communicator."""
        going = True
        while not active and not self.fragment.n:
            self.slot += 1
        try:
            if self.fragment.n and not self._left:
                going = self._leave(active=active)
            if self._left:
                self._step_outside(self._arrived())
        finally:
            # Also where it is refused: a round that all ranks refuse is over on all of them.
            self._left, self._combined = False, None
            self.slot += 1
            self.since_round = 0
        return going

    def _arrived(self) -> torch.Tensor:
        """Return the combined delta. Collective over the communicator."""
        if self._combined is not None:
            return self._combined
        if self._failed is not None:
            raise self._failed
        return self.fragment.finish() if self.fragment.is_under_way else self.fragment.combine()

    def round(self, *, active: bool = True) -> bool:
        """End the slot. Collective over the communicator."""
        going = super().round(active=active)
        self._sent = None
        return going

    def kept_state(self) -> dict[str, Any]:
        """Return the local state; does not wait for what is under way."""
        return self._state(None if self._sent is not None else self._combined)

    def undo(self) -> Undo:
        """Return what puts back model, method, and whether the fragment had left. Local."""
        undo_round, left, sent = super().undo(), self._left, self._sent

        def undo() -> None:
            undo_round()
            self._left, self._sent = left, sent

        return undo

    def forget(self, kept: list[int]) -> None:
        """Give up what is under way: the ranks that are left combine what they had sent. Local."""
        self._lanes = self._failed = None
        if self._left and self._sent is not None:
            self._combined = None
            self.fragment.give_up(self._sent)
        for fragment in self.common.fragments:
            fragment.forget()

    def _step_outside(self, delta: torch.Tensor) -> None:
        """Do the outer step on the fragment, and write it into the parameters. In place."""
        settings, fragment = self._settings, self.fragment
        if settings.outer_momentum:
            momentum = self.momentum[self.slot % len(self.momentum)]
            momentum.mul_(settings.outer_momentum).add_(delta)
            delta = delta.add_(momentum, alpha=settings.outer_momentum) if settings.nesterov else momentum
        fragment.x.flat.sub_(delta, alpha=settings.outer_lr)
        if settings.mixing:
            torch_private.foreach_lerp_(fragment.values, fragment.x.parts, 1 - settings.mixing)
        else:
            torch_private.foreach_copy_(fragment.values, fragment.x.parts)
        self.counts["rounds"] += 1

    def load_recovered(self, state: dict[str, Any]) -> None:
        """Go on from a state with shares of what lost ranks had; a fragment that had left is combined anew. Local."""
        left, sent = self._left, self._sent
        self.load_local_state(state)
        self._left = left
        if left and sent is not None:
            self._sent = self.fragment.kept()

    def evaluated_parameters(self) -> list[torch.Tensor]:
        """Return x; not a copy."""
        return self.common.x

    def _named_momentum(self) -> dict[str, torch.Tensor]:
        rows = zip(self.momentum, self.common.fragments, strict=False)
        return {name: part for row, one in rows for name, part in one.by_name(row).items()}

    def shared_state(self) -> Mapping[str, torch.Tensor]:
        """Return x and the outer momentum."""
        momentum = {f"the outer momentum of {name}": part for name, part in self._named_momentum().items()}
        return {**super().shared_state(), **momentum}

    def local_state(self) -> dict[str, Any]:
        """Return x, the outer momentum, residuals and the place in a period; waits for what is under way.

        Collective over the communicator where something is.
        """
        if self._left and self._combined is None:
            self._combined = self._arrived()
        return self._state(self._combined)

    def _state(self, combined: torch.Tensor | None) -> dict[str, Any]:
        return {
            **super().local_state(),
            "momentum": self._named_momentum(),
            "slot": self.slot,
            "period": self.period,
            "t": self.t,
            "combined": {} if combined is None else self.fragment.by_name(combined),
        }

    def load_local_state(self, state: dict[str, Any]) -> None:
        """Go on from copies of what `local_state` returned."""
        super().load_local_state(state)
        restore(self._named_momentum(), state["momentum"], "the outer momentum")
        self.slot, self.period, self.t = int(state["slot"]), int(state["period"]), int(state["t"])
        self._left, self._combined, self._sent = bool(state["combined"]), None, None
        if self._left:
            self._combined = torch.empty_like(self.fragment.x.flat)
            restore(self.fragment.by_name(self._combined), state["combined"], "what was under way")


def _progress(run: ref[DilocoRun], parameter: torch.Tensor) -> None:
    """Let a fragment make progress during backward. Local."""
    running = run()
    if running is not None:
        running.progress()
