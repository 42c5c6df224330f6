"""All-gather of flat tensors: where they lie if the process group serves their device, else as messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hpctk.collectives.engine.engine import engine_of
from hpctk.collectives.engine.gather_messages import gather_messages
from hpctk.collectives.engine.handle import Handle
from hpctk.comm.world import World
from hpctk.schedules import ring

if TYPE_CHECKING:
    from hpctk.comm.torch.device_group import DeviceGroup


def gather_tensors(here: World, flat: torch.Tensor, lengths: Any) -> list[torch.Tensor]:
    """Return the flat tensors of all ranks, of one dtype, in rank order and on the device of this rank's.

    Collective over the communicator. `lengths` are their elements, known on all ranks.
    """
    group = None if flat.is_cpu or here.size == 1 else here.device_group(flat)
    if group is not None:
        found: list[torch.Tensor] = start_on_device(here, group, flat, lengths).wait()
        return found
    if not flat.is_cpu:
        here.note_staging(flat)
    message = flat.cpu().view(torch.uint8).numpy()
    messages = gather_messages(here, ring.allgather(here.size), message)
    return [torch.from_numpy(data).view(flat.dtype).to(flat.device) for data in messages]


def start_on_device(here: World, group: DeviceGroup, flat: torch.Tensor, lengths: Any) -> Handle:
    """Start gathering flat tensors where they lie; waiting returns those of all ranks.

    Collective over the communicator.
    """
    longest = int(np.max(lengths))
    if flat.numel() < longest:
        # The device's all-gather takes one length of all ranks.
        flat = torch.nn.functional.pad(flat, (0, longest - flat.numel()))
    engine = engine_of(here)
    call = engine.opened("allgather", here.native.name, flat.nbytes)
    work, rows = group.start_allgather(flat)
    name = f"the all-gather of {longest} elements on {flat.device.type}"

    def wait() -> list[torch.Tensor]:
        work.wait(name)
        engine.report(call)
        return [row[:n] for row, n in zip(rows, np.asarray(lengths).tolist(), strict=True)]

    return Handle(name, work.done, wait)
