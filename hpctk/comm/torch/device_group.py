"""Collectives of the user's own process group, on tensors that lie on a device which its backend serves.

NCCL and its like move device memory and nothing else, and in one order on all ranks. So they get what hpctk sums,
gathers or broadcasts as whole device tensors; the few numbers on which ranks agree, and messages that plans cut into
segments, stay with hpctk's gloo group.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hpctk.comm.buffers import Dtype
from hpctk.errors import HpctkError

if TYPE_CHECKING:
    from hpctk.comm.torch.world import TorchWorld

OPERATIONS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
#: Backends that move host memory: what lies on a device comes to the host all the same.
OF_HOSTS = ("gloo", "mpi", "fake", "undefined")


def served_devices(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the backend for each type of device whose memory a group moves itself, such as {"cuda": "nccl"}."""
    # As torch writes it: "cpu:gloo,cuda:nccl".
    words = (word.partition(":") for word in dist.get_backend_config(group).split(","))
    return {device: backend for device, _, backend in words if device != "cpu" and backend.lower() not in OF_HOSTS}


class DeviceGroup:
    """The user's group, where it serves devices.

    Attributes
    ----------
    served : dict of str to str
        Backends by type of device.
    """

    def __init__(self, world: TorchWorld, group: dist.ProcessGroup) -> None:
        # Worlds are kept by their group, and go with it: this one must not keep it.
        self._world, self._theirs = world, weakref.ref(group)
        self._ranks = dist.get_process_group_ranks(group)
        self.served = served_devices(group)

    @property
    def _group(self) -> dist.ProcessGroup:
        group = self._theirs()
        if group is None:
            raise HpctkError(f"{self._world.name}: its process group was destroyed. Train before that.")
        return group

    def sums(self, dtype: Dtype, op: str) -> bool:
        """Return whether a reduction means the same as hpctk's own."""
        # Of a number and NaN the larger is the one or the other, as the backend has it; ours is NaN.
        return bool(dtype.unit) and not (op == "max" and "float" in dtype.unit)

    def start_allreduce(self, flat: torch.Tensor, op: str) -> DeviceWork:
        """Start replacing a flat device tensor by its sum or maximum over all ranks. Collective. In place."""
        units = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
        with self._world.one_thread:
            return DeviceWork(self._world, dist.all_reduce(units, OPERATIONS[op], group=self._group, async_op=True))

    def start_allgather(self, flat: torch.Tensor) -> tuple[DeviceWork, torch.Tensor]:
        """Start gathering flat device tensors of one length; also return where they will be, a row of each rank.

        Collective.
        """
        rows = flat.new_empty(self._world.size, flat.numel())
        with self._world.one_thread:
            work = dist.all_gather_into_tensor(rows.view(-1), flat, group=self._group, async_op=True)
        return DeviceWork(self._world, work), rows

    def broadcast(self, flat: torch.Tensor, root: int, operation: str) -> None:
        """Overwrite a flat device tensor by root's. Collective. In place."""
        with self._world.one_thread:
            work = dist.broadcast(flat, self._ranks[root], group=self._group, async_op=True)
        DeviceWork(self._world, work).wait(operation)


class DeviceWork:
    """A collective of the user's group under way."""

    def __init__(self, world: TorchWorld, work: Any) -> None:
        self._world, self._work = world, work

    def done(self) -> bool:
        """Return whether it is complete."""
        return bool(self._work.is_completed())

    def wait(self, operation: str) -> None:
        """Let what follows on this device come after it; PeerError where it has failed.

        As in torch, the host need not wait for the device. How long may be waited is the group's own timeout.
        """
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._world.lost(operation, (), error) from error
