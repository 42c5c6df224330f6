"""`python -m hpctk.comm.mpi.run`: `python -m mpi4py` for ranks of a job that is to outlive some; see abort.py.

What `hpctk mpirun --with-ft` starts Python programs by. Those that use hpctk would do without; others, and those that
fail before they come to it, may have imported mpi4py.
"""

from __future__ import annotations

import sys
from typing import Any

from mpi4py import run


def abort_in_turn() -> None:
    """Let mpi4py's runner, in this process, abort the job in turn."""
    told = run.set_abort_status

    def tell(status: Any) -> None:
        # What has not started MPI does not abort it.
        if "mpi4py.MPI" in sys.modules:
            from hpctk.comm.mpi.abort import note_status

            note_status()
        told(status)

    run.set_abort_status = tell


def main() -> None:
    """Run the program that the command line names."""
    abort_in_turn()
    run.main()


if __name__ == "__main__":
    main()
