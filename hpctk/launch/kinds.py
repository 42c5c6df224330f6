"""The MPIs whose mpirun is known: how each says who it is, and which of its options take values.

Options stand without their dashes: Open MPI 4.1 and Hydra take one or two for most of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpctk.errors import SettingError

KINDS = ("openmpi5", "openmpi4", "mpich", "intel")
OPEN_MPI = ("openmpi5", "openmpi4")


def option_names(text: str) -> frozenset[str]:
    """Return the options that a text lists, without their dashes."""
    return frozenset(text.split())


#: Open MPI 4.1's and 5's, which share most.
_OPEN_MPI_VALUES = option_names("""
n np c N H host hostfile default-hostfile machinefile add-host add-hostfile rf rankfile app am tune
bind-to map-by rank-by ppr npernode npersocket cpu-list cpu-set cpus-per-proc cpus-per-rank cf cartofile
x unset-env wd wdir path prefix tmpdir preload-files stdin output output-filename xml-file stream-buffering
display timeout spawn-timeout report-events report-pid report-uri report-state debugger launch-agent
exec-agent max-restarts max-vm-size ompi-server hnp dvm-uri namespace personality pset runtime-options
with-ft initial-errhandler memory-alloc-kinds num-connect-retries gpu-support xterm
""")
_OPEN_MPI_PAIRS = option_names("mca gmca omca gomca prtemca gprtemca pmixmca gpmixmca prepend-env append-env")

#: MPICH's Hydra, and what Intel added to it.
_HYDRA_VALUES = option_names("""
n np f file host hosts hostfile machine machinefile rankmap configfile wdir path arch soft
genvlist genvexcl envlist envexcl launcher launcher-exec bootstrap bootstrap-exec bootstrap-exec-args rmk
topolib bind-to map-by membind demux ppn perhost grr iface localhost nameserver order-nodes usize
outfile-pattern errfile-pattern prepend-pattern gpus-per-proc memory-alloc-kinds
gwdir gpath gumask umask hosts-group branch-count tmpdir gtool gtoolfile
""")
_HYDRA_PAIRS = option_names("genv env")

#: Where the ranks go. With one of these the job may leave this machine.
HOST_OPTIONS = option_names(
    "H host hosts hostfile default-hostfile machinefile machine f file add-host add-hostfile rankfile rf "
    "rankmap configfile app hosts-group dvm-uri"
)
#: How many ranks share a core or a node, said by the user. Open MPI 5 turns all of them into one
#: --map-by, and refuses a second.
MAPPING_OPTIONS = option_names(
    "map-by ppr N npernode npersocket pernode bynode byslot bycore oversubscribe nooversubscribe "
    "rankfile rf cpus-per-proc cpus-per-rank use-hwthread-cpus"
)
#: Which cores a rank may use, said by the user; a mapping with PE=n says it too.
BINDING_OPTIONS = option_names(
    "bind-to bind-to-core bind-to-socket map-by cpu-list cpu-set cpus-per-proc cpus-per-rank rankfile rf"
)
#: Each line of output gets a prefix, which a progress bar does not survive.
TAGGING_OPTIONS = option_names("tag-output timestamp-output output l prepend-rank prepend-pattern xml")


@dataclass(frozen=True)
class Arity:
    """How many values follow each option; options that are not listed have none."""

    one: frozenset[str]
    two: frozenset[str]
    #: Whether NAME=VALUE may stand for the two values NAME VALUE.
    joined: bool = False

    def of(self, name: str, following: str) -> int:
        """Return the number of values of an option; `following` is the first of them, should it have any."""
        if name in self.two:
            return 1 if self.joined and "=" in following else 2
        return int(name in self.one)


def arity(kind: str) -> Arity:
    """Return how the options of this MPI's mpirun are written."""
    if kind in OPEN_MPI:
        return Arity(_OPEN_MPI_VALUES, _OPEN_MPI_PAIRS)
    return Arity(_HYDRA_VALUES, _HYDRA_PAIRS, joined=True)


def check_kind(kind: str) -> str:
    """Return the kind if it is a known one."""
    if kind not in KINDS:
        raise SettingError(f"--mpi '{kind}': known are {', '.join(KINDS)}")
    return kind


def kind_of(version: str) -> str:
    """Return the kind of the MPI whose `mpirun --version` printed this."""
    found = re.search(r"\(Open ?MPI\)\s+v?(\d+)", version)
    if found:
        # Before 5.0 mpirun was Open MPI's own; since then it is PRRTE's, which reads options differently.
        return "openmpi5" if int(found[1]) >= 5 else "openmpi4"
    for words, kind in (("PRRTE", "openmpi5"), ("Intel(R) MPI Library", "intel"), ("HYDRA", "mpich")):
        if words in version:
            return kind
    first = (version.strip().splitlines() or ["nothing"])[0]
    raise SettingError(
        f"no MPI that is known here: `mpirun --version` says '{first}'. Say which one it is like: "
        f"--mpi {', '.join(KINDS)}"
    )
