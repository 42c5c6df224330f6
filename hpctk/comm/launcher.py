"""What started this process, read from its environment: pure functions, no MPI."""

from __future__ import annotations

from collections.abc import Mapping

#: Variables that tell who started a rank. Values are safe to show: counts, ids and node lists.
PREFIXES = ("OMPI_COMM_WORLD_", "PMI_RANK", "PMI_SIZE", "PMIX_RANK", "PMIX_NAMESPACE", "HYDI_", "MPI_LOCAL")
SLURM_NAMES = (
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_NTASKS",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_NUM_NODES",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_JOB_NUM_NODES",
    "SLURM_MPI_TYPE",
)


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the launcher's variables among `environ`."""
    return {name: value for name, value in sorted(environ.items()) if name.startswith(PREFIXES) or name in SLURM_NAMES}


def rank(environ: Mapping[str, str]) -> int:
    """Return this process's rank as its launcher counts, before MPI is started; 0 where nobody says."""
    for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"):
        if environ.get(name, "").isdecimal():
            return int(environ[name])
    return 0


def by_srun(environ: Mapping[str, str]) -> bool:
    """Return whether srun started this process itself, not an mpirun in its allocation."""
    by_mpirun = "OMPI_COMM_WORLD_SIZE" in environ or "HYDI_CONTROL_FD" in environ
    return "SLURM_STEP_ID" in environ and not by_mpirun


def slurm_complaint(environ: Mapping[str, str], size: int, vendor: str) -> str | None:
    """Return what is wrong if srun started more (or fewer) tasks than MPI sees ranks, else None.

    With the wrong `srun --mpi` every task becomes a job of its own with one rank, silently.
    Under mpirun a step with one task per node is normal: those tasks are mpirun's own daemons.
    """
    text = environ.get("SLURM_STEP_NUM_TASKS", "")
    if not text.isdecimal() or int(text) == size:
        return None
    by_mpirun = "OMPI_COMM_WORLD_SIZE" in environ or "HYDI_CONTROL_FD" in environ
    if by_mpirun and environ.get("SLURM_STEP_NUM_NODES") == text:
        return None
    wanted = mpi_plugin(vendor)
    return (
        f"Slurm started {text} tasks in this step (SLURM_STEP_NUM_TASKS) but MPI's COMM_WORLD has {size} "
        f"rank{'s' if size != 1 else ''}: srun and {vendor} did not find each other. Try `srun --mpi={wanted}` "
        "(`srun --mpi=list` shows what this site has), or start with mpirun inside the allocation"
    )


def complaint(environ: Mapping[str, str], size: int, vendor: str) -> str | None:
    """Return what is wrong if what started this process says more ranks than COMM_WORLD has, else None.

    Every process would train a model of its own, in silence.
    """
    told = {name: _count(environ, name) for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")}
    if "RANK" in environ:
        told["WORLD_SIZE"] = _count(environ, "WORLD_SIZE")
    # One that agrees is the one that started it; others were inherited from around it.
    if size not in told.values():
        for name, count in told.items():
            if count > size:
                return _too_few(name, count, size, vendor)
    return slurm_complaint(environ, size, vendor)


def _count(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else 0


def _too_few(name: str, count: int, size: int, vendor: str) -> str:
    who = {
        "OMPI_COMM_WORLD_SIZE": "Open MPI's mpirun",
        "PMI_SIZE": "mpiexec or srun, by PMI,",
        "WORLD_SIZE": "torchrun",
    }[name]
    what_to_do = (
        "Under torchrun call torch.distributed.init_process_group('gloo') and use hpctk.ddp.DistributedOptimizer (or "
        f"hpctk.ddp.attach), or start with `mpirun -n {count} python -m mpi4py train.py` instead"
        if name == "WORLD_SIZE"
        else f"that launcher belongs to another MPI than {vendor}, which mpi4py uses here. Start with the mpirun of "
        f"{vendor} (`hpctk doctor` shows where it is)"
    )
    ranks = "1 rank" if size == 1 else f"{size} ranks"
    return (
        f"{who} started {count} processes ({name}), but MPI's COMM_WORLD has {ranks} here, so each would train a model "
        f"of its own: {what_to_do}"
    )


def mpi_plugin(vendor: str) -> str:
    """Return the `srun --mpi` type an MPI library needs."""
    if vendor == "Open MPI":
        return "pmix"
    if "Cray" in vendor:
        return "cray_shasta"
    return "pmi2"
