"""Does this MPI take device memory? Asked, not guessed: the wrong answer is a segmentation fault.

In this order: HPCTK_GPU_AWARE; the info key mpi_memory_alloc_kinds (MPI 4.1); the query functions of
Open MPI and MPICH; Cray's MPICH_GPU_SUPPORT_ENABLED. Nothing says yes: stage through the host.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpctk.comm import environment

QUERY_FUNCTIONS = ("MPIX_Query_cuda_support", "MPIX_Query_rocm_support")


@dataclass(frozen=True)
class GpuAware:
    """The answer, and how it was found."""

    aware: bool
    because: str


def decide(mpi: Any, environ: Mapping[str, str] = os.environ) -> GpuAware:
    """Return whether the MPI library behind `mpi` (the mpi4py.MPI module) takes device memory."""
    asked = environment.read("HPCTK_GPU_AWARE", environ)
    if asked is not None:
        return GpuAware(asked == "1", f"HPCTK_GPU_AWARE={asked}")
    kinds = memory_kinds(mpi) if mpi.Is_initialized() else ""
    if kinds:
        return GpuAware("cuda" in kinds or "rocm" in kinds, f"mpi_memory_alloc_kinds={kinds!r}")
    for name in QUERY_FUNCTIONS:
        answer = query(mpi.__file__, name)
        if answer:
            return GpuAware(True, f"{name}() = 1")
    if environ.get("MPICH_GPU_SUPPORT_ENABLED") == "1":
        return GpuAware(True, "MPICH_GPU_SUPPORT_ENABLED=1")
    return GpuAware(False, "nothing says that this MPI takes device memory")


def memory_kinds(mpi: Any) -> str:
    """Return what MPI 4.1 says of the memory it takes, an empty string where it says nothing."""
    info = mpi.COMM_WORLD.Get_info()
    try:
        return info.Get("mpi_memory_alloc_kinds") or ""
    finally:
        info.Free()


def query(library: str, name: str) -> bool | None:
    """Return what a query function of the MPI library says, None where there is none.

    `library` is mpi4py's extension module: it is linked to the MPI in use, while CDLL(None) sees neither.
    """
    try:
        function = getattr(ctypes.CDLL(library), name)
    except (OSError, AttributeError):
        return None
    function.restype = ctypes.c_int
    return bool(function())
