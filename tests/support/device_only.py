"""A process group as NCCL's: it moves memory of the stand-in device, and refuses all else.

Registered as the backend "device_only", `init_process_group("device_only")` makes one. Its collectives are those of
hpctk that need one, and DDP's; the values go by a gloo group behind it. Calls are counted by name.
"""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any, ClassVar

import shielded
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo

NAME = "device_only"


class Done(dist.Work):
    """A collective that is over."""

    def __init__(self, result: list[torch.Tensor]) -> None:
        super().__init__()
        self._future: Any = torch.futures.Future(devices=[result[0].device])
        self._future.set_result(result)

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def get_future(self) -> Any:
        return self._future


class DeviceOnly(dist.ProcessGroup):
    """See above."""

    calls: ClassVar[Counter[str]] = Counter()

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._gloo = ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return NAME

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def _host(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.device.type == shielded.NAME, f"{name}: a tensor on {tensor.device} for a group of devices only"
        assert tensor.is_contiguous(), f"{name}: Tensors must be contiguous"
        DeviceOnly.calls[name] += 1
        return tensor.cpu()

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Done:
        host = self._host("allreduce", tensors[0])
        chosen = dist.AllreduceOptions()
        chosen.reduceOp = options.reduceOp
        self._gloo.allreduce([host], chosen).wait()
        tensors[0].copy_(host)
        return Done(tensors)

    def broadcast(self, tensors: list[torch.Tensor], options: Any = None) -> Done:
        host = self._host("broadcast", tensors[0])
        self._gloo.broadcast([host], options).wait()
        tensors[0].copy_(host)
        return Done(tensors)

    def allgather(self, outputs: list[list[torch.Tensor]], tensors: list[torch.Tensor], options: Any = None) -> Done:
        host = self._host("allgather", tensors[0])
        found = [torch.empty_like(host) for _ in range(self._size)]
        self._gloo.allgather([found], [host]).wait()
        for output, each in zip(outputs[0], found, strict=True):
            output.copy_(each)
        return Done(outputs[0])

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, options: Any = None) -> Done:
        return self.allgather([list(output.view(self._size, -1))], [tensor])

    # As torch before 2.13 calls it.
    _allgather_base = all_gather_single


def register() -> None:
    """Let torch.distributed know the backend."""
    dist.Backend.register_backend(NAME, DeviceOnly, devices=[shielded.NAME])
