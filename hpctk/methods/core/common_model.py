"""The model that ranks had in common last, and the way of what their local steps have done to it since.

    delta_i = x - x_i
    without a compressor   delta = mean_i delta_i
    with one               p = feedback*e_i + delta_i;  c_i = C(p);  e_i = p - c_i;  delta = mean_i c_i

x is the same on all ranks, e_i is rank i's own. It may be cut into fragments, which travel each by itself: at once, or
under way while the caller does something else. `Sign` sees a fragment as one vector, other compressors see tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from hpctk import torch_private
from hpctk.collectives.allreduce import start_in_place
from hpctk.collectives.bucketed_mean import Bucket, BucketedMean
from hpctk.collectives.compressed_mean import compressed_mean, refuse_bad_sums
from hpctk.collectives.dense_mean import dense_mean
from hpctk.collectives.engine.engine import engine_of
from hpctk.collectives.engine.handle import Handle
from hpctk.comm import buffers
from hpctk.compressors import Compressor, Residuals
from hpctk.errors import SettingError
from hpctk.methods.core.flat_buffer import FlatBuffer, difference
from hpctk.methods.core.replica import Replica, restore
from hpctk.methods.core.resharding import SavedRanks, reshard
from hpctk.methods.core.update_exchange import sends_signs

Tensors = dict[str, torch.Tensor]


class CommonModel:
    """x, what was not sent yet of the ways from it, and the compressor.

    Parameters
    ----------
    replica : Replica
    compressor : Compressor or None
        Used by a copy of it.
    feedback : float
        What is kept of a residual from round to round.
    reduce : str
        As in `compressed_mean`.
    fragments : int
        Runs of tensors that travel each by itself, of about as many elements.
    """

    def __init__(
        self,
        replica: Replica,
        compressor: Compressor | None,
        *,
        feedback: float = 1.0,
        reduce: str = "mean",
        fragments: int = 1,
    ) -> None:
        self._replica, self.feedback, self.reduce = replica, feedback, reduce
        self.compressor = deepcopy(compressor)
        if self.compressor is not None:
            self.compressor.set_rank(replica.world.rank)
        self.residuals = Residuals()
        self.fragments = [Fragment(self, replica, members) for members in _cut(replica.parameters, fragments)]
        self._begun = False

    def begin(self) -> None:
        """Let x be what the model holds, unless that was done: a user may load weights before the first step."""
        if not self._begun:
            self._copy()
            self._begun = True

    def _copy(self) -> None:
        for fragment in self.fragments:
            if fragment.names:
                torch_private.foreach_copy_(fragment.x.parts, fragment.values)

    @property
    def x(self) -> list[torch.Tensor]:
        """x, a tensor for each parameter; what the model holds before the first step."""
        if not self._begun:
            self._copy()
        named = {name: part for one in self.fragments for name, part in zip(one.names, one.x.parts, strict=True)}
        return [named[name] for name in self._replica.names]

    def state_dict(self) -> dict[str, Any]:
        """Return x, the residuals and what the compressor remembers; not copies."""
        return {
            "x": self._replica.named(self.x),
            "residuals": self.residuals.state_dict(),
            "compressor": {} if self.compressor is None else self.compressor.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from copies of what `state_dict` returned."""
        restore(self._replica.named(self.x), state["x"], "x")
        self._begun = True
        self.residuals.load_state_dict(state["residuals"])
        if self.compressor is not None:
            self.compressor.load_state_dict(state["compressor"])

    @staticmethod
    def resized_state(earlier: SavedRanks, key: str) -> dict[str, Any]:
        """Return a state, saved under `key`, in which the mean of the residuals is what it was."""
        return {**earlier.first(key), "residuals": reshard(earlier.each(key, "residuals"), earlier.size)}


class FragmentState(NamedTuple):
    """What a fragment was before it left: where it stood, and the residuals and draws of the rank."""

    delta: torch.Tensor
    residuals: Tensors
    compressor: dict[str, Any]


class Fragment:
    """Some tensors of a common model, which travel together.

    Attributes
    ----------
    names, parameters
        What Sign sees as one vector comes first.
    x : FlatBuffer
    delta : FlatBuffer
        How far this rank is from x: since `look`, until it is sent.
    """

    delta: FlatBuffer

    def __init__(self, common: CommonModel, replica: Replica, members: list[int]) -> None:
        self._common, self._replica = common, replica
        named = [(replica.names[i], replica.parameters[i]) for i in members]
        compressor = common.compressor
        self._signed = 0
        if sends_signs(compressor):
            named.sort(key=lambda pair: compressor.is_excluded(*pair))
            self._signed = [compressor.is_excluded(*pair) for pair in named].count(False)
        self.names, self.parameters = [name for name, _ in named], [parameter for _, parameter in named]
        self.x = FlatBuffer(self.parameters)
        self.n = self.x.edges[-1]
        self._title = f"{len(named)} tensors from {self.names[0]}" if named else "nothing"
        if self._signed and compressor is not None and compressor.is_excluded(self._title, self.x.flat):
            raise SettingError(f"exclude={list(compressor.exclude)}: also leaves out {self._title!r}, which Sign sees")
        self._mean: BucketedMean | None = None
        self._under_way: Handle | Bucket | None = None

    @property
    def values(self) -> list[torch.Tensor]:
        """The parameters, without their history: to be read and changed in place."""
        return [parameter.detach() for parameter in self.parameters]

    def by_name(self, flat: torch.Tensor) -> Tensors:
        """Return the parts of a tensor that is laid out as x.flat, by parameter name; views."""
        bounds = zip(pairwise(self.x.edges), self.parameters, strict=True)
        return dict(zip(self.names, (flat[lo:hi].view(like.shape) for (lo, hi), like in bounds), strict=True))

    def look(self) -> None:
        """Take note of how far this rank is from x. Local."""
        self.delta = FlatBuffer(self.parameters)
        difference(self.x.parts, self.values, self.delta)

    def check(self) -> None:
        """Raise TensorError where that, or its sum with the residual, is not finite. Local; changes nothing."""
        by_name = dict(zip(self.names, self.delta.parts, strict=True))
        refuse_bad_sums(by_name if self._common.compressor is None else self._tensors(), self._common.residuals)

    def _tensors(self) -> Tensors:
        """Return what travels, by name."""
        row, compressor, signed = self.delta, self._common.compressor, self._signed
        if compressor is None:
            return {self._title: row.flat}
        rest = dict(zip(self.names[signed:], row.parts[signed:], strict=True))
        return {self._title: row.flat[: row.edges[signed]], **rest} if signed else rest

    def _decay(self) -> None:
        for name, tensor in self._tensors().items():
            if self._common.feedback != 1 and name in self._common.residuals:
                self._common.residuals.of(name, tensor).mul_(self._common.feedback)

    def combine(self, *, checked: bool = True) -> torch.Tensor:
        """Return delta, flat, the same bits on all ranks. Collective over the communicator.

        `checked` says that `check` has refused nothing on any rank; they ask each other where that is not known.
        """
        here, schedule = self._replica.world, self._replica.schedule
        compressor, residuals, tensors = self._common.compressor, self._common.residuals, self._tensors()
        if compressor is None:
            dense_mean(here, tensors, schedule)
        else:
            self._decay()
            reduce = self._common.reduce
            compressed_mean(here, tensors, compressor, residuals, schedule, checked=checked, reduce=reduce)
        return self._taken().flat

    def start(self, lanes: range) -> None:
        """Let what `look` found leave; `check` has refused nothing on any rank. Collective over the communicator.

        `lanes` are two of the engine's, reserved. `finish` returns what comes of it.
        """
        here, schedule, tensors = self._replica.world, self._replica.schedule, self._tensors()
        if self._common.compressor is None:
            with engine_of(here).span(self._title):
                flat = self.delta.flat
                self._under_way = start_in_place(here, flat, buffers.dtype_of(flat), "mean", schedule)
        else:
            self._decay()
            if self._mean is None:
                self._mean = BucketedMean(here, self._common.compressor, self._common.residuals, schedule, tensors)
            self._under_way = self._mean.start(lanes[0], tensors, in_order=True)

    def kept(self) -> FragmentState:
        """Return copies of what `start` is going to send and to change. Local."""
        residuals = self._common.residuals.state_dict()
        own = {name: residuals[name].clone() for name in self._tensors() if name in residuals}
        compressor = self._common.compressor
        return FragmentState(self.delta.flat.clone(), own, {} if compressor is None else compressor.state_dict())

    @property
    def is_under_way(self) -> bool:
        """Whether it has left, and nobody has waited for what comes of it."""
        return self._under_way is not None

    def forget(self) -> None:
        """Forget how packets travelled among more ranks. Local."""
        self._mean = None

    def give_up(self, kept: FragmentState) -> None:
        """Give up what is under way, and be ready to `combine` what was sent: `kept` is from before. Local."""
        # What is under way may still write into its own memory.
        self._under_way = None
        self.delta = FlatBuffer(self.parameters)
        self.delta.flat.copy_(kept.delta)
        residuals = {**self._common.residuals.state_dict(), **kept.residuals}
        fresh = set(self._tensors()) - set(kept.residuals)
        self._common.residuals.load_state_dict({name: x for name, x in residuals.items() if name not in fresh})
        if self._common.compressor is not None:
            self._common.compressor.load_state_dict(kept.compressor)

    def progress(self) -> None:
        """Let what is under way make progress. Local."""
        way = self._under_way
        for handle in (way.chosen, way.excluded) if isinstance(way, Bucket) else (way,):
            if handle is not None:
                handle.done()

    def finish(self) -> torch.Tensor:
        """Return what `combine` would have; waits for it. Collective over the communicator."""
        way, self._under_way = self._under_way, None
        if isinstance(way, Bucket):
            assert self._mean is not None
            (flat,) = self._mean.finish([way], set(self._tensors()))
            self._mean.commit()
            self._taken()
            return flat
        assert way is not None
        way.wait()
        return self._taken().flat

    def _taken(self) -> FlatBuffer:
        """Return delta and let go of its memory."""
        delta = self.delta
        del self.delta
        return delta


def _cut(tensors: list[torch.nn.Parameter], fragments: int) -> list[list[int]]:
    """Return the numbers of the tensors of each fragment: it has those whose middle lies in it."""
    total, lo = sum(tensor.numel() for tensor in tensors), 0
    members: list[list[int]] = [[] for _ in range(fragments)]
    for i, tensor in enumerate(tensors):
        hi = lo + tensor.numel()
        members[min(fragments - 1, fragments * (lo + hi) // (2 * max(1, total)))].append(i)
        lo = hi
    return members
