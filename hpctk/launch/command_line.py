"""What was typed after mpirun or horovodrun: options and programs, told apart without changing a word.

Options are named without their dashes: Open MPI 4.1 and Hydra take one or two for most of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hpctk.launch.python_program import RUNNER, TOLERANT, through_mpi4py


@dataclass(frozen=True)
class Arity:
    """How many values follow each option; options that are not listed have none."""

    one: frozenset[str]
    two: frozenset[str]

    def of(self, name: str, following: str) -> int:
        """Return the number of values of an option; `following` is the first of them, should it have any."""
        if name in self.two:
            # Hydra takes `-genv A b` and `-genv A=b`.
            return 1 if name in ("genv", "env") and "=" in following else 2
        return int(name in self.one)


def options(text: str) -> frozenset[str]:
    """Return the options that a text lists."""
    return frozenset(text.split())


#: Of all MPIs together: none takes a value after an option that another has without. First those of Open MPI 4.1 and 5,
#: then those of MPICH's Hydra, and what Intel added to it.
MPIRUN = Arity(
    options("""
    n np c N H host hostfile default-hostfile machinefile add-host add-hostfile rf rankfile app am tune
    bind-to map-by rank-by ppr npernode npersocket cpu-list cpu-set cpus-per-proc cpus-per-rank cf cartofile
    x unset-env wd wdir path prefix tmpdir preload-files stdin output output-filename xml-file stream-buffering
    display timeout spawn-timeout report-events report-pid report-uri report-state debugger launch-agent
    exec-agent max-restarts max-vm-size ompi-server hnp dvm-uri namespace personality pset runtime-options
    with-ft initial-errhandler memory-alloc-kinds num-connect-retries gpu-support xterm

    f file hosts machine rankmap configfile arch soft genvlist genvexcl envlist envexcl launcher launcher-exec
    bootstrap bootstrap-exec bootstrap-exec-args rmk topolib membind demux ppn perhost grr iface localhost
    nameserver order-nodes usize outfile-pattern errfile-pattern prepend-pattern gpus-per-proc gwdir gpath
    gumask umask hosts-group branch-count gtool gtoolfile
    """),
    options("mca gmca omca gomca prtemca gprtemca pmixmca gpmixmca prepend-env append-env genv env"),
)

#: Options of Horovod 0.28.1; tests compare them with its own parser.
HOROVODRUN = Arity(
    options("""
    np num-proc start-timeout network-interfaces network-interface output-filename config-file p ssh-port i
    ssh-identity-file fusion-threshold-mb cycle-time-ms cache-capacity autotune-log-file autotune-warmup-samples
    autotune-steps-per-sample autotune-bayes-opt-max-samples autotune-gaussian-process-noise min-np min-num-proc
    max-np max-num-proc slots-per-host elastic-timeout reset-limit timeline-filename
    stall-check-warning-time-seconds stall-check-shutdown-time-seconds mpi-args binding-args num-nccl-streams
    thread-affinity gloo-timeout-seconds log-level H hosts hostfile host-discovery-script
    """),
    options("blacklist-cooldown-range"),
)


@dataclass
class Section:
    """One program with the options before it; mpirun takes several, with a colon between them."""

    options: list[str] = field(default_factory=list)
    #: Name and values of each option.
    given: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    program: list[str] = field(default_factory=list)


class CommandLine:
    """What was typed, in sections.

    An option that is not known is taken to have no value. If it does have one, that value passes for the
    program: the words and their order stay, only what would have been added is not.
    """

    def __init__(self, words: Sequence[str], arity: Arity, colons: bool = True) -> None:
        self.sections = [Section()]
        at = 0
        while at < len(words):
            word, section = words[at], self.sections[-1]
            n = 0
            if colons and word == ":":
                self.sections.append(Section())
            elif section.program or not word.startswith("-") or word == "-":
                section.program.append(word)
            else:
                name, equals, value = word.lstrip("-").partition("=")
                n = 0 if equals else arity.of(name, words[at + 1] if at + 1 < len(words) else "")
                section.options += words[at : at + 1 + n]
                section.given.append((name, (value,) if equals else tuple(words[at + 1 : at + 1 + n])))
            at += 1 + n
        self.names = {name for section in self.sections for name, _ in section.given}
        self.starts_program = any(section.program for section in self.sections)

    def first_values(self, *names: str) -> list[str]:
        """Return the first value of every occurrence of some options."""
        given = [one for section in self.sections for one in section.given]
        return [values[0] for name, values in given if name in names and values]

    def ranks(self) -> int:
        """Return how many ranks are asked for; a section that does not say counts as none."""
        return sum(int(n) for n in self.first_values("n", "np", "c", "num-proc") if n.isdecimal())

    def words(self, plain: bool) -> list[str]:
        """Return all words; unless `plain`, Python programs run under `python -m mpi4py`, or what outlives ranks."""
        words, runner = [], TOLERANT if "with-ft" in self.names else RUNNER
        for section in self.sections:
            words += [":"] if section is not self.sections[0] else []
            words += section.options + (section.program if plain else through_mpi4py(section.program, runner))
        return words
