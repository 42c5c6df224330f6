"""The command line of horovodrun: it writes one for mpirun itself, with flags of Open MPI 4."""

from __future__ import annotations

from collections.abc import Sequence

from hpctk.errors import SettingError
from hpctk.launch import typed
from hpctk.launch.facts import Facts
from hpctk.launch.kinds import Arity, option_names
from hpctk.launch.python_program import through_mpi4py

#: Options of Horovod 0.28.1 that take a value; tests compare them with its own parser.
VALUES = option_names(
    """
    np num-proc start-timeout network-interfaces network-interface output-filename config-file p ssh-port i
    ssh-identity-file fusion-threshold-mb cycle-time-ms cache-capacity autotune-log-file autotune-warmup-samples
    autotune-steps-per-sample autotune-bayes-opt-max-samples autotune-gaussian-process-noise min-np min-num-proc
    max-np max-num-proc slots-per-host elastic-timeout reset-limit timeline-filename
    stall-check-warning-time-seconds stall-check-shutdown-time-seconds mpi-args binding-args num-nccl-streams
    thread-affinity gloo-timeout-seconds log-level H hosts hostfile host-discovery-script
    """
)
PAIRS = option_names("blacklist-cooldown-range")
#: Options that make horovodrun start gloo, whatever it was built with.
GLOO = option_names("gloo host-discovery-script min-np min-num-proc")

ARITY = Arity(VALUES, PAIRS)


def horovodrun_line(kind: str, words: Sequence[str], facts: Facts, plain: bool = False) -> list[str]:
    """Return the command line, program first; without a program to start, nothing is added.

    horovodrun itself allows root, forwards the environment and gives this machine as many slots as there
    are ranks. What it says about binding is what Open MPI 5 does not understand: `-bind-to none` is an
    option with one dash, and `none` passes for the program.
    """
    (section,) = typed.read_sections(words, ARITY, colons=False)
    given = typed.names([section])
    if given & GLOO:
        raise SettingError(
            f"--{min(given & GLOO)}: that is gloo, and hpctk's collectives run over MPI "
            "(launch/setup builds Horovod without gloo): leave it out"
        )
    if not section.program:
        return [facts.launcher, *words]
    # First, so that a --config-file still decides.
    added = ["--binding-args=--bind-to none --map-by slot"]
    needed = kind == "openmpi5" and "binding-args" not in given
    program = section.program if plain else through_mpi4py(section.program)
    return [facts.launcher, *(added if needed else []), *section.options, *program]


def horovodrun_environment(kind: str, words: Sequence[str], facts: Facts) -> dict[str, str]:
    """Return the variables this MPI needs: horovodrun has no option for Intel's pinning."""
    sections = typed.read_sections(words, ARITY, colons=False)
    crowded = typed.ranks(sections, ("np", "num-proc")) > facts.cores
    away = facts.allocated or typed.names(sections) & {"H", "hosts", "hostfile"}
    pinned = any(name.startswith("I_MPI_PIN") for name in facts.environ)
    return {"I_MPI_PIN": "0"} if kind == "intel" and crowded and not away and not pinned else {}


def check_mpi(kind: str, mpirun: str) -> None:
    """Refuse an MPI that the Horovod of launch/setup cannot run on."""
    if kind == "mpich":
        raise SettingError(
            f"{mpirun} is MPICH, and Horovod is built for Open MPI by launch/setup. Put Open MPI's mpirun first "
            "in PATH, or say --mpi mpich if your Horovod was built with MPICH"
        )
