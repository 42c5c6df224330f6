"""The MPI library for those who do not import mpi4py: what it says of itself, and scripts run as its ranks."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from typing import Any

from hpctk.comm import gpu, postmortem
from hpctk.errors import SettingError


def thread_level() -> str:
    """Return which threads may call MPI, such as MULTIPLE. Start MPI if it is not."""
    from mpi4py import MPI

    levels = {
        MPI.THREAD_SINGLE: "SINGLE",
        MPI.THREAD_FUNNELED: "FUNNELED",
        MPI.THREAD_SERIALIZED: "SERIALIZED",
        MPI.THREAD_MULTIPLE: "MULTIPLE",
    }
    return levels[MPI.Query_thread()]


def describe(start: bool) -> dict[str, Any]:
    """Return what the library says of itself. Start MPI if asked to, otherwise only load it."""
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.initialize = start
    from mpi4py import MPI

    name, numbers = MPI.get_vendor()
    try:
        aware = gpu.decide(MPI)
    except SettingError as error:
        aware = gpu.GpuAware(False, str(error))
    facts = {
        "library": f"{name} {'.'.join(map(str, numbers))}",
        "standard": ".".join(map(str, MPI.Get_version())),
        "gpu_aware": aware.aware,
        "gpu_aware_because": aware.because,
        "started": MPI.Is_initialized(),
        "mpirun": shutil.which("mpirun"),
    }
    if MPI.Is_initialized():
        world = MPI.COMM_WORLD
        facts |= {"thread_level": thread_level(), "rank": world.rank, "size": world.size}
        facts["host"] = MPI.Get_processor_name()
    return facts


def run_script(words: Sequence[str]) -> int:
    """Run a script, `-m MODULE` or `-c CODE` as `python -m mpi4py` does: where it fails, the MPI job is aborted.

    A rank that calls sys.exit with an error also says where it left.
    """
    from mpi4py import run

    from hpctk.comm.mpi.run import abort_in_turn

    abort_in_turn()
    try:
        run.run_command_line(list(words))
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            postmortem.report_exit(leaving)
        run.set_abort_status(leaving)
        raise
    except BaseException as error:
        run.set_abort_status(error)
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0
