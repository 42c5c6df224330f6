"""What a command line depends on besides its words, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hpctk.comm import environment

#: Set by a batch system inside an allocation: mpirun takes hosts and slots from it.
ALLOCATIONS = ("SLURM_JOB_ID", "SLURM_JOBID", "PBS_NODEFILE", "PE_HOSTFILE", "LSB_JOBID", "COBALT_JOBID")


@dataclass(frozen=True)
class Facts:
    """What is here.

    Attributes
    ----------
    launcher
        The mpirun or horovodrun to start.
    root
        Whether the user is root.
    cores
        Cores of this machine; hardware threads of one core count once, as in Open MPI's slots.
    environ
        The environment the job starts in.
    """

    launcher: str
    root: bool = False
    cores: int = 1
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def allocated(self) -> bool:
        """Whether a batch system says where ranks go."""
        return any(name in self.environ for name in ALLOCATIONS)


def job_environment(
    environ: Mapping[str, str], venv: str | None, columns: int | None, tagged: bool
) -> dict[str, str]:
    """Return the variables that a job gets in addition, or with another value.

    Parameters
    ----------
    venv
        The virtual environment whose programs come first; None leaves PATH as it is.
    columns
        The width of the terminal that standard error is; None where it is none.
    tagged
        Each line of output gets a prefix.
    """
    added = {}
    if venv is not None:
        path = environ.get("PATH", "")
        if path.split(":")[0] != f"{venv}/bin":
            added["PATH"] = f"{venv}/bin:{path}"
        if environ.get("VIRTUAL_ENV") != venv:
            added["VIRTUAL_ENV"] = venv
    # Ranks share the cores: a rank that starts a thread for each of them only fights the others.
    if not environ.get("OMP_NUM_THREADS"):
        added["OMP_NUM_THREADS"] = "1"
    # mpirun stands between the ranks and the terminal: tell them what there is.
    if columns is not None and not tagged and environment.read("HPCTK_PROGRESS", environ) is None:
        added["HPCTK_PROGRESS"] = "bar"
        if not environ.get("COLUMNS"):
            added["COLUMNS"] = str(columns)
    return added
