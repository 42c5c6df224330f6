"""The last message of every rank: sparse vectors that are applied until their sender sends another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from hpctk import torch_private
from hpctk.comm import buffers
from hpctk.errors import TensorError
from hpctk.kernels import device, merge
from hpctk.methods.core.flat_buffer import FlatBuffer, squared_distance

Pairs = tuple[Any, Any]


class LastMessages:
    """What every rank last said, by rank; the same on all ranks.

    Parameters
    ----------
    ranks : int
    room : FlatBuffer
        Of the parameters that messages are about: memory for their sum.
    read : callable
        Returns indices and values of a message's bytes.
    """

    def __init__(self, ranks: int, room: FlatBuffer, read: Callable[[Any], Pairs]) -> None:
        self._read = read
        self._room, self._n, self._dtype = room, room.flat.numel(), buffers.dtype_of(room.flat).name
        self._edges = np.cumsum([0, *(part.numel() for part in room.parts)])
        #: Indices in the model as one vector, ascending, and values; None of a rank that has said nothing.
        self._pairs: list[Pairs | None] = [None] * ranks

    def known(self, rank: int) -> bool:
        """Return whether there is a message of a rank."""
        return self._pairs[rank] is not None

    def replace(self, news: Mapping[int, Any]) -> None:
        """Replace the messages of some ranks by what they sent now, as bytes; by nothing where those are none."""
        for rank, data in news.items():
            self._pairs[rank] = self._read(data) if len(data) else None

    def subtract_from(self, targets: Sequence[torch.Tensor], divisor: int) -> float:
        """Subtract the sum of all messages, over `divisor`, from the parameters; return its squared 2-norm.

        In place. The messages are added up in rank order, elementwise: the same bits on all ranks.
        """
        lists = [pairs for pairs in self._pairs if pairs is not None]
        elements = sum(len(indices) for indices, _ in lists)
        flat = all(target.is_contiguous() and not buffers.on_device(target) for target in targets)
        # Lists that grow with every rank must be cheaper to merge than the whole model is to go through.
        if flat and lists and len(lists) * elements <= self._n:
            return self._subtract_list(targets, *reduce(lambda a, b: merge.merge(*a, *b), lists), divisor)
        total = self._room.flat.zero_()
        for indices, values in lists:
            if buffers.on_device(total):
                device.scatter_add(total, _tensor(indices).to(total.device), _tensor(values).to(total.device))
            else:
                merge.scatter_add(total.numpy(), indices, values)
        total.div_(divisor)
        torch_private.foreach_sub_(list(targets), self._room.parts)
        return squared_distance(total, None)

    def _subtract_list(self, targets: Sequence[torch.Tensor], indices: Any, values: Any, divisor: int) -> float:
        values = values / values.dtype.type(-divisor)
        cuts = np.searchsorted(indices, self._edges)
        for target, start, (lo, hi) in zip(targets, self._edges, pairwise(cuts), strict=False):
            if lo < hi:
                inside = indices[lo:hi] - indices.dtype.type(start)
                merge.scatter_add(target.view(-1).numpy(), inside, values[lo:hi])
        return float(np.square(values, dtype=np.float64).sum())

    def of_ranks(self, kept: Sequence[int]) -> LastMessages:
        """Return the messages of some ranks alone, numbered anew."""
        left = LastMessages(len(kept), self._room, self._read)
        left._pairs = [self._pairs[rank] for rank in kept]
        return left

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return indices and values by rank, for those that have said something."""
        return {
            str(rank): {"indices": _tensor(pairs[0]), "values": _tensor(pairs[1])}
            for rank, pairs in enumerate(self._pairs)
            if pairs is not None
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Replace all messages by copies of what `state_dict` returned."""
        loaded: list[tuple[Any, Any] | None] = [None] * len(self._pairs)
        for rank, message in state.items():
            indices, values = (message[key].detach().cpu().numpy().copy() for key in ("indices", "values"))
            if not 0 <= int(rank) < len(loaded) or values.dtype.name != self._dtype:
                raise TensorError(
                    f"a message of rank {rank} in {values.dtype.name}: need ranks below {len(loaded)} and "
                    f"values in {self._dtype}"
                )
            loaded[int(rank)] = indices, values
        self._pairs = loaded


def _tensor(array: Any) -> torch.Tensor:
    # A copy where it is read-only, as what was read from bytes may be: torch knows no such thing.
    return torch.from_numpy(array if array.flags.writeable else array.copy())
