"""Whether Horovod has started MPI, and so ends it: on every rank, as soon as the first one leaves.

Whatever hpctk does at that moment on another rank ends in an error of MPI. Where mpi4py has started MPI, Horovod leaves
it running.
"""

from __future__ import annotations

import sys

from hpctk.log import log


def warn_where_horovod_owns_mpi() -> None:
    """Warn of it. To be called before anything imports mpi4py.MPI: afterwards nobody can tell."""
    hvd = sys.modules.get("horovod.torch")
    if hvd is not None and "mpi4py.MPI" not in sys.modules and hvd.is_initialized():
        log.warning(
            "Horovod has started MPI and will end it on all ranks when the first one leaves: import hpctk.horovod, "
            "which starts it, before hvd.init(), or let the script end with hvd.barrier() and hvd.shutdown()."
        )
