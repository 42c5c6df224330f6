"""What SASG's workers upload: chosen elements of all tensors, written as one message, and read again.

`pick` looks at all tensors and changes nothing that lasts, so that a bad one leaves all residuals as they are; nor does
`write`, so that a message can be sent again. `take_out` takes what was picked out of the residuals.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hpctk.collectives.compressed_mean import layout_of
from hpctk.comm import buffers
from hpctk.compressors import Compressor, Residuals
from hpctk.compressors.core import finite, sparse
from hpctk.compressors.core.compressor import refuse
from hpctk.compressors.core.packet import Packet
from hpctk.kernels import many, rows
from hpctk.kernels.packing import index_dtype
from hpctk.methods.core.flat_buffer import FlatBuffer

Tensors = dict[str, torch.Tensor]


class SparseUploads:
    """Uploads by a compressor that sends elements as they are (`combines = "pairs"`): one sparse vector.

    Parameters
    ----------
    compressor : Compressor
    room : FlatBuffer
        Of the parameters that messages are about.
    residuals : Residuals
    """

    def __init__(self, compressor: Any, room: FlatBuffer, residuals: Residuals) -> None:
        self._compressor, self._room, self._residuals = compressor, room, residuals
        self._n, self._dtype = room.flat.numel(), buffers.dtype_of(room.flat).name
        self._picked: list[tuple[Any, Any]] = []
        #: The sums of updates and residuals, one after the other, where elements were picked from all of them together.
        self._sums: Any = None
        #: What the last upload counts: values and indices of 32 bits, as the authors count.
        self.bits = 0

    def pick(self, updates: Tensors) -> None:
        """Choose what is sent of each tensor and its residual; raise TensorError for one that is not finite."""
        pick, of = self._compressor.pick, self._residuals.of
        self._sums = None
        if self._pick_together(updates):
            return
        self._picked = [pick(of(name, part), part, name) for name, part in updates.items()]

    def _pick_together(self, updates: Tensors) -> bool:
        """Do the same for all tensors by one kernel, where they are small: calls take longer than arithmetic there."""
        if not self._compressor.takes_largest:
            return False
        layout = layout_of(self._compressor, updates)
        kept = [self._residuals.of(name, part) for name, part in updates.items()]
        if layout.excluded or len(layout.large) or not rows.are_rows([*kept, self._room.flat]):
            return False
        sums = torch.cat([each.view(-1) for each in kept]).add_(self._room.flat)
        bad = finite.first_bad(sums)
        if bad is not None:
            which = int(np.searchsorted(layout.edges, bad, side="right")) - 1
            refuse(bad - int(layout.edges[which]), int(layout.sizes[which]), layout.chosen[which])
        self._sums = sums.numpy()
        indices = np.empty(int(layout.places[-1]), index_dtype(self._n))
        values = np.empty(len(indices), self._sums.dtype)
        addresses = self._sums.ctypes.data + layout.edges[:-1] * self._sums.itemsize
        alone = np.zeros_like(addresses)
        many.take_largest(alone, addresses, layout.edges, layout.small, layout.counts, layout.places, indices, values)
        self._picked = [(indices, values)]
        return True

    def write(self) -> Any:
        """Return what was picked, as bytes."""
        indices, values = [], []
        dtype = index_dtype(self._n)
        for start, (found, taken) in zip(self._room.edges, self._picked, strict=False):
            indices.append(_host(found).astype(dtype, copy=False) + dtype.type(start))
            values.append(_host(taken))
        self.bits = sum(map(len, values)) * (8 * self._room.flat.element_size() + 32)
        return sparse.write(np.concatenate(indices), np.concatenate(values), self._n)

    def take_out(self, updates: Tensors) -> None:
        """Let the rest of update and residual become the residual, in place."""
        if self._sums is not None:
            kept = [self._residuals.of(name, part) for name, part in updates.items()]
            self._sums[self._picked[0][0]] = 0
            rows.scatter(self._sums, kept, layout_of(self._compressor, updates).edges)
            self._sums, self._picked = None, []
            return
        for (name, part), (found, _) in zip(updates.items(), self._picked, strict=True):
            self._compressor.take_out(part, self._residuals.of(name, part), found)
        self._picked = []

    def read(self, data: Any) -> tuple[Any, Any]:
        """Return indices, ascending, in the model as one vector, and values of a message."""
        return sparse.read(data, self._n, self._dtype)


class PacketUploads(SparseUploads):
    """Uploads by a compressor that lists elements in packets of its own (`combines = "lists"`): one after the other.

    `bits` are those of the packets.
    """

    _packets: list[Packet]

    def pick(self, updates: Tensors) -> None:
        """Compress each tensor with a copy of its residual; raise TensorError for one that is not finite."""
        feed = self._compressor.feed
        self._left = Residuals((name, self._residuals.of(name, part).clone()) for name, part in updates.items())
        self._packets = [feed(part, self._left.of(name, part), name) for name, part in updates.items()]

    def write(self) -> Any:
        """Return the packets as bytes."""
        message = torch.cat([packet.data for packet in self._packets]).cpu().numpy()
        self.bits = 8 * len(message)
        return message

    def take_out(self, updates: Tensors) -> None:
        """Let what the packets do not carry become the residual."""
        self._residuals.swap(self._left, list(updates))

    def read(self, data: Any) -> tuple[Any, Any]:
        """Return indices, ascending, in the model as one vector, and values of a message."""
        indices, values = [], []
        dtype, at = index_dtype(self._n), 0
        for start, part in zip(self._room.edges, self._room.parts, strict=False):
            length = self._compressor.wire_bytes(part.numel(), part.element_size())
            packet = Packet(torch.from_numpy(data[at : at + length].copy()), tuple(part.shape), part.dtype)
            found, taken = self._compressor.pairs(packet)
            indices.append(found.astype(dtype) + dtype.type(start))
            values.append(taken.numpy())
            at += length
        return np.concatenate(indices), np.concatenate(values)


def uploads_of(compressor: Compressor, room: FlatBuffer, residuals: Residuals) -> SparseUploads:
    """Return what writes and reads the uploads of a compressor."""
    kind = PacketUploads if compressor.combines == "lists" else SparseUploads
    return kind(compressor, room, residuals)


def _host(array: Any) -> Any:
    return array.cpu().numpy() if isinstance(array, torch.Tensor) else array
