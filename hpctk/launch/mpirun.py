"""The command line of mpirun: what the installed MPI needs, in front of what was typed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpctk.launch import kinds, typed
from hpctk.launch.facts import Facts
from hpctk.launch.python_program import through_mpi4py

#: Variables a rank on another host needs besides HPCTK_*, in the order they are forwarded.
FORWARDED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "OMP_NUM_THREADS", "COLUMNS")

_RANKS = ("n", "np", "c")
_PARAMETERS = ("mca", "gmca", "omca", "gomca", "prtemca", "gprtemca")
_PARAMETER_VARIABLES = ("OMPI_MCA_", "PRTE_MCA_")


def mpirun_line(kind: str, words: Sequence[str], facts: Facts, plain: bool = False) -> list[str]:
    """Return the command line, program first; without a program to start, nothing is added.

    Parameters
    ----------
    kind
        One of `kinds.KINDS`.
    words
        What was typed after mpirun. All of it stays, in order.
    plain
        Leave Python programs as they are, without `-m mpi4py`.
    """
    sections = typed.read_sections(words, kinds.arity(kind))
    if not any(section.program for section in sections):
        return [facts.launcher, *words]
    line = [facts.launcher, *flags(kind, sections, facts)]
    for i, section in enumerate(sections):
        line += [":"] if i else []
        line += section.options
        line += section.program if plain else through_mpi4py(section.program)
    return line


def flags(kind: str, sections: Sequence[typed.Section], facts: Facts) -> list[str]:
    """Return what this MPI needs to be told."""
    away = facts.allocated or bool(typed.names(sections) & kinds.HOST_OPTIONS)
    crowded = not away and typed.ranks(sections, _RANKS) > facts.cores
    if kind in kinds.OPEN_MPI:
        return open_mpi_flags(sections, facts, away, crowded)
    if kind == "intel":
        return intel_flags(sections, facts, crowded)
    # MPICH binds nothing, counts no slots and minds no root; its Hydra hands on the whole environment, of
    # which -genvlist would leave the rest behind.
    return []


def open_mpi_flags(sections: Sequence[typed.Section], facts: Facts, away: bool, crowded: bool) -> list[str]:
    """Return Open MPI's: it refuses root and more ranks than cores, binds to cores, forwards nothing."""
    given, parameters = typed.names(sections), set(_parameters(sections, facts))
    added = []
    if facts.root and "allow-run-as-root" not in given:
        added.append("--allow-run-as-root")
    # Up to two ranks are bound to a core each: their threads (Horovod's, numba's, data loaders') would share
    # it, and a second job on the machine would be bound to the same cores.
    if not given & kinds.BINDING_OPTIONS and not any("binding_policy" in name for name in parameters):
        added += ["--bind-to", "none"]
    mapped = given & kinds.MAPPING_OPTIONS or any(name.startswith("rmaps_") for name in parameters)
    if crowded and not mapped:
        added += ["--map-by", ":OVERSUBSCRIBE"]
    # Ranks on this machine inherit the environment; daemons on others start with none of it. Open MPI
    # refuses -x beside its own parameter for the same purpose.
    if away and "mca_base_env_list" not in parameters:
        for name in forwarded(sections, facts):
            added += ["-x", name]
    return added


def intel_flags(sections: Sequence[typed.Section], facts: Facts, crowded: bool) -> list[str]:
    """Return Intel's: it divides the cores among the ranks, which only hurts when there are too few.

    Root and the environment need nothing: it is Hydra, as MPICH's.
    """
    typed_pins = [value[0] for value in typed.values(sections, ("genv", "env")) if value]
    pinned = any(name.startswith("I_MPI_PIN") for name in (*typed_pins, *facts.environ))
    if not crowded or pinned or typed.names(sections) & kinds.BINDING_OPTIONS:
        return []
    return ["-genv", "I_MPI_PIN", "0"]


def forwarded(sections: Sequence[typed.Section], facts: Facts) -> list[str]:
    """Return the variables to forward: those that are set and that the user does not forward already."""
    by_user = {value[0].partition("=")[0] for value in typed.values(sections, ("x",)) if value}
    own = sorted(name for name in facts.environ if name.startswith("HPCTK_"))
    return [name for name in (*FORWARDED, *own) if name in facts.environ and name not in by_user]


def _parameters(sections: Sequence[typed.Section], facts: Facts) -> Iterator[str]:
    """Yield the names of Open MPI's parameters that were set, on the command line or by the environment."""
    for value in typed.values(sections, _PARAMETERS):
        yield value[0] if value else ""
    for name in facts.environ:
        if name.startswith(_PARAMETER_VARIABLES):
            yield name.split("_MCA_", 1)[1]
