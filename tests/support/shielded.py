"""The device of shielded.cpp: `torch.device("shielded")`, for tests on machines without any.

It is torch's PrivateUse1, compiled once for a torch (ten seconds) and kept in the folder for temporary files. Values
come and go by `.to(...)` and `.cpu()` alone: `.numpy()` is refused, an address is no host memory's. A process that has
registered it keeps it, so these tests run in processes of their own.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import torch

SOURCE = Path(__file__).with_suffix(".cpp")
NAME = "shielded"


def library() -> Path:
    """Return the compiled device, made where it is not there yet."""
    key = hashlib.sha256(SOURCE.read_bytes() + f"{torch.__version__} {sys.version}".encode()).hexdigest()[:12]
    path = Path(tempfile.gettempdir(), f"hpctk-{NAME}-{os.getuid()}-{key}.so")
    if not path.exists():
        home = Path(torch.__file__).parent
        beside = path.with_suffix(f".{os.getpid()}")
        subprocess.run(
            [
                "g++", "-std=c++20", "-O0", "-fPIC", "-shared", str(SOURCE), "-o", str(beside), f"-I{home / 'include'}",
                f"-I{home / 'include/torch/csrc/api/include'}", f"-L{home / 'lib'}", "-lc10", "-ltorch_cpu",
            ],
            check=True,
        )  # fmt: skip
        beside.rename(path)
    return path


class Stream:
    """The one stream of the device; counts who waits for it."""

    waits = 0

    def synchronize(self) -> None:
        """Return at once: nothing is ever under way."""
        Stream.waits += 1


def register() -> torch.device:
    """Let torch know the device, and return it."""
    torch.ops.load_library(str(library()))
    torch.utils.rename_privateuse1_backend(NAME)
    module = types.ModuleType(NAME)
    module.is_available = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda device: None
    module.current_stream = lambda device=None: Stream()
    module.synchronize = lambda device=None: Stream().synchronize()
    # Random numbers on the device are drawn from the generator of the host.
    module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: None
    module._is_in_bad_fork = lambda: False
    torch._register_device_module(NAME, module)
    return torch.device(NAME, 0)
