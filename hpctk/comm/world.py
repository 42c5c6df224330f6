"""Who is there: one World per group of ranks, whatever joins them.

    world(comm)
      ├── an MPI communicator, or nothing        mpi.world.MpiWorld      mpi4py
      └── a torch.distributed.ProcessGroup       torch.world.TorchWorld  gloo; no MPI needed

Everything above asks a World and never MPI or torch.distributed themselves; neither is imported before it is asked
for.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from hpctk.comm.agreement import Agreement, OneThread
from hpctk.comm.buffers import Stager
from hpctk.comm.gpu import GpuAware
from hpctk.comm.shared_window import SharedWindow
from hpctk.comm.transport import NativeAllreduce, Transport
from hpctk.errors import PeerError, SettingError
from hpctk.log import log

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch.distributed import ProcessGroup

    from hpctk.comm.torch.device_group import DeviceGroup

    #: What a group of ranks may be given as.
    Comm = MPI.Intracomm | ProcessGroup


class World(Agreement):
    """The ranks of a communicator or process group. Made by `world()`, which keeps it.

    Attributes
    ----------
    rank, size : int
    name, library : str
        Of the communicator or group, and of what joins its ranks, with its version.
    local_rank, local_size : int
        Among the ranks of the same node.
    nodes : tuple of tuple of int
        The ranks of each node, nodes in order of their lowest rank.
    gpu : GpuAware
        Whether messages may lie in device memory, the same on all ranks.
    stager : Stager
        Brings tensors to where messages may lie.
    native : NativeAllreduce
        The library's own all-reduce, as one more schedule.
    one_thread : OneThread
        Held by whoever communicates.
    background : list of callable
        Called while a rank waits for anything; each returns whether it got something done.
    attached : dict
        What the layers above keep for these ranks, by type: looked up in every call, so a plain dict.
    """

    name: str
    library: str
    local_rank: int
    local_size: int
    nodes: tuple[tuple[int, ...], ...]
    gpu: GpuAware
    stager: Stager
    native: NativeAllreduce
    one_thread: OneThread
    background: list[Callable[[], bool]]
    attached: dict[type, Any]
    #: Whether something that lies on a device has travelled through host memory.
    has_staged = False
    #: How many ranks were lost since the job began.
    lost_ranks = 0
    #: What a collective may raise where a rank is lost.
    losses: tuple[type[Exception], ...] = (PeerError,)

    @property
    @abstractmethod
    def timeout_s(self) -> float:
        """Seconds this rank waits for others (HPCTK_TIMEOUT_S)."""

    @abstractmethod
    def barrier(self, operation: str = "barrier") -> None:
        """Return once every rank is here. Collective over the communicator."""

    @abstractmethod
    def transport(self) -> Transport:
        """Return what moves bytes between these ranks."""

    def device_group(self, tensor: Any) -> DeviceGroup | None:
        """Return collectives that take this tensor where it lies, on a device; None where it comes to the host."""
        return None

    def why_staged(self, device: str) -> str:
        """Return why tensors of a type of device come to the host, and what to do, as a sentence."""
        return f"{self.gpu.because}. If your MPI does take it, set HPCTK_GPU_AWARE=1"

    def note_staging(self, tensor: Any) -> None:
        """Say once, on rank 0, that what lies on a device travels through host memory. Local."""
        if self.rank == 0 and self.size > 1 and not self.has_staged and not self.gpu.aware:
            device = tensor.device.type if hasattr(tensor, "device") else "a device"
            log.warning("tensors on %s travel through host memory: %s", device, self.why_staged(device))
        self.has_staged = True

    @property
    def shares_memory(self) -> bool:
        """Whether all ranks may share one `shared_window`: they lie on one node, and MPI joins them."""
        return False

    @property
    def nodes_share_memory(self) -> bool:
        """Whether there are several nodes, and the ranks of each may share a `shared_window`."""
        return False

    def shared_window(self) -> SharedWindow | None:
        """Return the memory that the ranks of this node share, made at the first call; None where it cannot be had.

        Collective over the communicator at the first call; all ranks get one, or none does.
        """
        return None

    def cannot_shrink(self) -> str:
        """Return why these ranks cannot go on without one that is lost, as a sentence; "" where they can."""
        return (
            "torch.distributed does not outlive a rank: nothing in it tells all that are left alike who is lost. "
            "torchrun restarts all ranks instead (--max-restarts)."
        )

    def is_broken(self) -> bool:
        """Return whether a rank is known to be lost, here or by a peer that said so. Local."""
        return False

    def expect_losses(self) -> None:
        """Let a lost rank be found out without asking the others what they do. Local."""

    def decide(self, *, done: bool) -> bool:
        """Return whether all ranks are `done`: the same answer on all that live, whoever dies meanwhile.

        Collective over the communicator, also where it is broken.
        """
        raise SettingError(self.cannot_shrink())

    def shrink(self) -> list[int]:
        """Let these be the ranks that live; return the numbers that they had, in the order of their new ones.

        Collective over the ranks that live. What is `attached` is dropped, as is all that is under way.
        """
        raise SettingError(self.cannot_shrink())


def world(comm: Comm | None = None) -> World:
    """Return the World of a communicator or process group, made at the first call. Collective over it then.

    Parameters
    ----------
    comm : MPI.Intracomm or torch.distributed.ProcessGroup, optional
        COMM_WORLD where not given.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available():
        if isinstance(comm, torch.distributed.ProcessGroup):
            from hpctk.comm.torch import world as torch_world

            return torch_world.world(comm)
        if comm is torch.distributed.GroupMember.NON_GROUP_MEMBER:
            raise SettingError("comm: this process is no member of the process group")
    try:
        from hpctk.comm.mpi import world as mpi_world
    except ImportError as error:
        raise SettingError(
            f"no communicator was given, and MPI cannot be loaded ({error}): pip install 'hpctk[mpi]' brings it. Or go "
            "without MPI: start with torchrun, call torch.distributed.init_process_group('gloo') and use "
            "hpctk.ddp.DistributedOptimizer, or give comm=torch.distributed.group.WORLD"
        ) from error
    # It refuses what is no communicator.
    return mpi_world.world(cast("MPI.Intracomm | None", comm))
