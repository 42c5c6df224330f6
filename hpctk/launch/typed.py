"""What was typed after mpirun: options and programs, told apart without changing a word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hpctk.errors import SettingError
from hpctk.launch.kinds import Arity


@dataclass
class Section:
    """One program with the options before it; mpirun takes several, with a colon between them."""

    options: list[str] = field(default_factory=list)
    given: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    program: list[str] = field(default_factory=list)


def read_sections(words: Sequence[str], arity: Arity, colons: bool = True) -> list[Section]:
    """Return the sections of a command line.

    An option that is not known is taken to have no value. If it does have one, that value passes for the
    program: the words and their order stay, only what would have been added is not.
    """
    sections = [Section()]
    at = 0
    while at < len(words):
        word, section = words[at], sections[-1]
        if colons and word == ":":
            sections.append(Section())
            at += 1
        elif section.program or not is_option(word):
            section.program.append(word)
            at += 1
        else:
            name, equals, value = word.lstrip("-").partition("=")
            n = 0 if equals else arity.of(name, words[at + 1] if at + 1 < len(words) else "")
            section.options += words[at : at + 1 + n]
            section.given.append((name, (value,) if equals else tuple(words[at + 1 : at + 1 + n])))
            at += 1 + n
    return sections


def is_option(word: str) -> bool:
    """Return whether a word is an option rather than a program."""
    return word.startswith("-") and word != "-"


def names(sections: Sequence[Section]) -> set[str]:
    """Return the names of all options given."""
    return {name for section in sections for name, _ in section.given}


def values(sections: Sequence[Section], wanted: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the values of every occurrence of some options."""
    return [value for section in sections for name, value in section.given if name in wanted]


def ranks(sections: Sequence[Section], options: Sequence[str]) -> int:
    """Return how many ranks are asked for; a section that does not say counts as none."""
    counts = [value[0] for value in values(sections, options) if value]
    return sum(int(count) for count in counts if count.isdecimal())


@dataclass
class Own:
    """The options of the wrappers themselves."""

    show: bool = False
    plain: bool = False
    help: bool = False
    mpi: str | None = None


def take_own(words: Sequence[str], kinds: Sequence[str], flag_too: bool = False) -> tuple[Own, list[str]]:
    """Return the wrapper's own options, which come first, and all other words.

    Parameters
    ----------
    flag_too
        `--mpi` without a kind after it is an option of the program that is wrapped.
    """
    own, rest = Own(), list(words)
    while rest:
        name, equals, value = rest[0].partition("=")
        if rest[0] == "--print":
            own.show = True
        elif rest[0] == "--plain":
            own.plain = True
        elif rest[0] in ("-h", "--help"):
            own.help = True
        elif name == "--mpi" and equals:
            own.mpi = value
        elif name == "--mpi" and (not flag_too or (len(rest) > 1 and rest[1] in kinds)):
            if len(rest) < 2:
                raise SettingError(f"--mpi needs a kind: {', '.join(kinds)}")
            own.mpi = rest.pop(1)
        else:
            break
        rest.pop(0)
    return own, rest
