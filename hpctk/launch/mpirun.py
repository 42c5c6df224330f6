"""What a job of mpirun needs on this machine, whichever MPI it is.

All that Open MPI, MPICH and Intel MPI can be told by variables is told so: each reads its own and ignores those of the
others, and what stands on the command line wins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpctk.launch.command_line import MPIRUN, CommandLine, options

#: Set by a batch system inside an allocation: mpirun takes hosts and slots from it.
ALLOCATIONS = ("SLURM_JOB_ID", "SLURM_JOBID", "PBS_NODEFILE", "PE_HOSTFILE", "LSB_JOBID", "COBALT_JOBID")

#: Open MPI refuses root.
ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
#: Open MPI binds up to two ranks to a core each: their threads (Horovod's, numba's, data loaders') would share it, and
#: a second job on the machine would be bound to the same cores.
UNBOUND = {"PRTE_MCA_hwloc_default_binding_policy": "none", "OMPI_MCA_hwloc_base_binding_policy": "none"}
#: Open MPI refuses more ranks than cores. PRTE is the mpirun of 5, OMPI of 4.1.
OVERSUBSCRIBED = {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMPI_MCA_rmaps_base_oversubscribe": "1"}
#: The variables of a rank that Open MPI is to forward to other hosts. Hydra forwards all.
FORWARDING = "OMPI_MCA_mca_base_env_list"
#: Variables a rank on another host needs besides HPCTK_*, in the order they are forwarded.
FORWARDED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "OMP_NUM_THREADS", "COLUMNS")

#: Where the ranks go. With one of these the job may leave this machine, and the user knows how many fit.
HOST_OPTIONS = options(
    "H host hosts hostfile default-hostfile machinefile machine f file add-host add-hostfile rankfile rf "
    "rankmap configfile app hosts-group dvm-uri"
)
#: How many ranks share a core or a node, said by the user.
MAPPING_OPTIONS = options(
    "map-by ppr N npernode npersocket pernode bynode byslot bycore oversubscribe nooversubscribe "
    "rankfile rf cpus-per-proc cpus-per-rank use-hwthread-cpus"
)
#: Which cores a rank may use, said by the user; a mapping with PE=n says it too.
BINDING_OPTIONS = options(
    "bind-to bind-to-core bind-to-socket map-by cpu-list cpu-set cpus-per-proc cpus-per-rank rankfile rf"
)
#: What --with-ft takes.
FAULT_TOLERANCE = ("ulfm", "mpi", "none", "no", "yes")
#: Each line of output gets a prefix, which a progress bar does not survive.
TAGGING_OPTIONS = options("tag-output timestamp-output output l prepend-rank prepend-pattern xml")


def mpirun_job(
    typed: Sequence[str], environ: Mapping[str, str], *, root: bool, cores: int, plain: bool = False
) -> tuple[dict[str, str], list[str]]:
    """Return the variables that a job needs, and the words after mpirun; nothing is added where no program starts.

    All that was typed stays, in order. `environ` is the environment that the job starts in.
    """
    typed = with_fault_tolerance(typed)
    line = CommandLine(typed, MPIRUN)
    if not line.starts_program:
        return {}, list(typed)
    parameters = _parameters(line, environ)
    away = bool(line.names & HOST_OPTIONS) or any(name in environ for name in ALLOCATIONS)
    bound = bool(line.names & BINDING_OPTIONS)
    mapped = line.names & MAPPING_OPTIONS or any(name.startswith("rmaps_") for name in parameters)
    added = dict(ROOT) if root else {}
    if not bound and not any("binding_policy" in name for name in parameters):
        added |= UNBOUND
    if not away and not mapped:
        added |= OVERSUBSCRIBED
    if not away and not bound:
        added |= intel_variables(line.ranks(), cores, [*line.first_values("genv", "env"), *environ])
    forwarding = []
    if away and "mca_base_env_list" not in parameters:
        names = forwarded(line, environ)
        if "x" in line.names:
            # Open MPI 4.1 refuses to be told in two ways.
            forwarding = [word for name in names for word in ("-x", name)]
        elif names:
            added[FORWARDING] = ";".join(names)
    return added, forwarding + line.words(plain)


def with_fault_tolerance(typed: Sequence[str]) -> list[str]:
    """Return the words; after `--with-ft` the kind that Open MPI 5 knows, where none is given."""
    words = list(typed)
    before = words.index("--with-ft") if "--with-ft" in words else None
    if before is not None:
        # Unless it is a program's own: then the words in front of it hold that program.
        in_front = CommandLine(words[:before], MPIRUN)
        if not in_front.starts_program and not set(words[before + 1 : before + 2]) & set(FAULT_TOLERANCE):
            words.insert(before + 1, "ulfm")
    return words


def intel_variables(ranks: int, cores: int, names: Sequence[str]) -> dict[str, str]:
    """Return Intel's: it divides the cores among the ranks, which hurts only when there are too few."""
    pinned = any(name.startswith("I_MPI_PIN") for name in names)
    return {"I_MPI_PIN": "0"} if ranks > cores and not pinned else {}


def is_tagged(typed: Sequence[str]) -> bool:
    """Return whether mpirun is asked to put a prefix before each line of output."""
    return bool(CommandLine(typed, MPIRUN).names & TAGGING_OPTIONS)


def forwarded(line: CommandLine, environ: Mapping[str, str]) -> list[str]:
    """Return the variables to forward: those that are set and that the user does not forward already."""
    by_user = {value.partition("=")[0] for value in line.first_values("x")}
    own = sorted(name for name in environ if name.startswith("HPCTK_"))
    return [name for name in (*FORWARDED, *own) if name in environ and name not in by_user]


def _parameters(line: CommandLine, environ: Mapping[str, str]) -> set[str]:
    """Return the names of Open MPI's parameters that were set, on the command line or by the environment."""
    typed = line.first_values("mca", "gmca", "omca", "gomca", "prtemca", "gprtemca")
    inherited = [name for name in environ if name.startswith(("OMPI_MCA_", "PRTE_MCA_"))]
    return {*typed, *(name.split("_MCA_", 1)[1] for name in inherited)}


def job_environment(environ: Mapping[str, str], venv: str | None, columns: int | None, tagged: bool) -> dict[str, str]:
    """Return the variables that any job gets in addition, or with another value.

    The programs of `venv` come first; `columns` is the width of the terminal, None where there is none; where
    lines are `tagged` with a prefix there is no bar.
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
    if columns is not None and not tagged and not environ.get("HPCTK_PROGRESS"):
        added["HPCTK_PROGRESS"] = "bar"
        if not environ.get("COLUMNS"):
            added["COLUMNS"] = str(columns)
    return added
