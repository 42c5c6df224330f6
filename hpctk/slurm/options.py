"""What a job script may be told, checked: an unknown or impossible value is an error that says what is allowed.

What all jobs of a site have in common may stand in a TOML file (`read_site`):

    partition = "batch"
    modules = ["openmpi/5.0"]

    [gpu]                       # for one kind only
    partition = "gpu"
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctk.errors import SettingError
from hpctk.settings import check, read_toml, required, setting, settings_of

#: Kind of job script: what it is for.
KINDS = {
    "mpi": "srun starts the ranks",
    "mpirun": "mpirun starts the ranks, where srun does not know your MPI",
    "horovod": "srun starts a program that uses Horovod",
    "ddp": "torchrun on every node, no MPI",
    "gpu": "srun starts ranks that have a GPU each",
    "array": "a sweep: a job for each line of a table",
}

#: Options that only some kinds know.
ONLY = {
    "mpi": ("mpi", "horovod", "gpu", "array"),
    "gpus_per_node": ("gpu", "ddp", "horovod"),
    "on_lost_rank": ("mpirun",),
    "table": ("array",),
    "at_once": ("array",),
}

#: sbatch options that a template needs as they are, or that have a name of their own here.
GOVERNED = (
    "job-name", "nodes", "ntasks-per-node", "ntasks", "cpus-per-task", "gpus-per-node", "mem", "time", "partition",
    "account", "qos", "constraint", "mail-user", "mail-type", "output", "error", "open-mode", "requeue", "no-requeue",
    "signal", "array", "dependency",
)  # fmt: skip

#: What no file of a site gives.
_OF_ONE_JOB = ("job_name", "run", "table")

#: Seconds between the request to save and the time limit, in the templates.
WARNING_S = 180

_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<a>\d+)(?::(?P<b>\d{1,2}))?(?::(?P<c>\d{1,2}))?")
_MAIL_TYPES = (
    "NONE", "BEGIN", "END", "FAIL", "REQUEUE", "ALL", "TIME_LIMIT", "TIME_LIMIT_50", "TIME_LIMIT_80", "TIME_LIMIT_90",
    "ARRAY_TASKS",
)  # fmt: skip


def _is_line(text: str) -> bool:
    return bool(text) and text.isprintable() and len(text) <= 200


def _are_lines(words: tuple[str, ...]) -> bool:
    return all(word.strip() and word.isprintable() for word in words)


def _text(meaning: str, metavar: str, **rules: Any) -> Any:
    """Declare a text that the template or Slurm has a default for."""
    line = {"allowed": "a text of 1 to 200 printable characters, in one line", "is_allowed": _is_line}
    return setting(None, meaning, metavar=metavar, **{**line, **rules})


def _count(meaning: str, at_most: int, *, at_least: int = 1, metavar: str = "N", shown: str = "") -> Any:
    return setting(None, meaning, at_least=at_least, at_most=at_most, metavar=metavar, shown=shown)


def _lines(meaning: str, metavar: str) -> Any:
    allowed = "a list of texts of printable characters, none of them empty"
    return setting((), meaning, metavar=metavar, allowed=allowed, is_allowed=_are_lines)


@dataclass(frozen=True)
class Options:
    """What a job script is told; None keeps what the template says."""

    kind: str = field(metadata=required("what starts the ranks", choices=tuple(KINDS)))
    job_name: str = setting(
        "", "also names the log and, unless --run says otherwise, the run's folder", metavar="NAME", shown="hpctk-KIND"
    )
    nodes: int | None = _count("nodes", 100_000)
    ntasks_per_node: int | None = _count("ranks on each node; of ddp, processes of its torchrun", 4096)
    cpus_per_task: int | None = _count("CPUs, and threads, of each rank", 4096)
    gpus_per_node: int | None = _count("GPUs of each node", 64)
    mem: str | None = _text(
        "memory of each node, such as 16G",
        "SIZE",
        allowed="a number with K, M, G or T behind it, such as 16G",
        is_allowed=re.compile(r"\d+[KMGT]?").fullmatch,
    )
    time: str | None = _text(
        "time limit, such as 02:00:00 or 1-12; restarts get as much again",
        "LIMIT",
        allowed="MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS, DAYS-HOURS, DAYS-HOURS:MINUTES or "
        "DAYS-HOURS:MINUTES:SECONDS",
        is_allowed=_TIME.fullmatch,
    )
    partition: str | None = _text("partition", "NAME")
    account: str | None = _text("account that pays", "NAME")
    qos: str | None = _text("quality of service", "NAME")
    constraint: str | None = _text("features that nodes must have", "FEATURES")
    mail: str | None = _text(
        "where Slurm writes to",
        "ADDRESS",
        allowed="one address",
        is_allowed=lambda text: _is_line(text) and not re.search(r"[\s,]", text),
    )
    mail_type: str | None = _text(
        "about what",
        "EVENTS",
        shown="FAIL,REQUEUE,END",
        allowed=f"one or more, with commas, of {', '.join(_MAIL_TYPES)}",
        is_allowed=lambda text: set(text.split(",")) <= set(_MAIL_TYPES),
    )
    mpi: str | None = _text(
        "what `srun --mpi=list` calls your MPI",
        "TYPE",
        shown="pmix",
        allowed="what `srun --mpi=list` shows, such as pmix, pmi2, cray_shasta",
        is_allowed=re.compile(r"[A-Za-z0-9_]+").fullmatch,
    )
    warning_s: int | None = _count(
        "ask the ranks to save so long before the time limit", 65535, metavar="SECONDS", shown=str(WARNING_S)
    )
    max_restarts: int | None = _count("how often the job may go back into the queue", 10_000, at_least=0, shown="20")
    on_lost_rank: str | None = setting(
        None, "what becomes of the others where a rank is lost; shrink: they go on, on Open MPI 5",
        choices=("raise", "shrink"), shown="raise",
    )  # fmt: skip
    run: str | None = _text("the run's folder", "DIR", shown="runs/NAME")
    modules: tuple[str, ...] = _lines("a module to load; may be repeated", "NAME")
    venv: str | None = _text("virtual environment to activate", "DIR")
    setup: tuple[str, ...] = _lines("a line of shell, as it is, before the program starts; may be repeated", "LINE")
    sbatch: tuple[str, ...] = _lines(
        "a further option of sbatch, such as --sbatch=--exclusive; may be repeated", "OPTION"
    )
    table: tuple[str, ...] = _lines("the lines of a sweep, options of one job in each", "FILE")
    at_once: int | None = _count("jobs of the sweep at the same time", 100_000)
    command: tuple[str, ...] = setting((), 'the program; "{run}" in a word stands for the run\'s folder')

    def __post_init__(self) -> None:
        if self.kind in KINDS and not self.job_name:
            object.__setattr__(self, "job_name", f"hpctk-{self.kind}")
        for name, value in check(self).items():
            object.__setattr__(self, name, value)
        for name, kinds in ONLY.items():
            if getattr(self, name) not in (None, ()) and self.kind not in kinds:
                raise SettingError(
                    f"{name}: {self.kind} has no such option, only {', '.join(kinds)} "
                    f"{'have' if len(kinds) > 1 else 'has'}; {self.kind} knows {', '.join(known(self.kind))}"
                )
        _check_job_name(self.job_name)
        _check_together(self)
        _check_words(self)
        _check_table(self)


def known(kind: str) -> list[str]:
    """Return the names of the options that a kind has."""
    names = [name for name in settings_of(Options) if name not in ("kind", "command")]
    return [name for name in names if kind in ONLY.get(name, (kind,))]


def from_layers(kind: str, *layers: Mapping[str, Any]) -> Options:
    """Return the options that layers give, later ones winning; None gives nothing."""
    merged: dict[str, Any] = {}
    for layer in layers:
        merged |= {name: value for name, value in layer.items() if value not in (None, (), [])}
    unknown = [name for name in merged if name not in settings_of(Options)]
    if unknown:
        raise SettingError(f"no option {unknown[0]!r} for {kind}: known are {', '.join(known(kind))}")
    return Options(kind, **merged)


def read_site(path: Path, kind: str) -> dict[str, Any]:
    """Return the defaults that a site's TOML file gives for a kind; SettingError where one is unknown or wrong."""
    given = read_toml(path)
    try:
        # All kinds, so that a mistake shows before the day on which it counts.
        layers = {one: _defaults(given, one) for one in KINDS}
    except SettingError as error:
        raise SettingError(f"{path}: {error}") from None
    return layers[kind]


def _defaults(given: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return what a document says for a kind: what it says for all, where the kind knows it, and for this one."""
    tables = {name: value for name, value in given.items() if isinstance(value, dict)}
    unknown = [name for name in tables if name not in KINDS]
    if unknown:
        raise SettingError(f"no kind [{unknown[0]}]: known are {', '.join(KINDS)}")
    everywhere = {name: value for name, value in given.items() if name not in tables}
    anywhere = sorted({name for one in KINDS for name in known(one)} - set(_OF_ONE_JOB))
    for name in (*everywhere, *tables.get(kind, {})):
        if name not in anywhere:
            raise SettingError(f"no option {name!r}: known are {', '.join(anywhere)}")
    shared = {name: value for name, value in everywhere.items() if name in known(kind)}
    merged = {**shared, **tables.get(kind, {})}
    from_layers(kind, merged)
    return merged


def seconds(time: str) -> int:
    """Return a time limit of Slurm's in seconds."""
    found = _TIME.fullmatch(time)
    assert found is not None
    days, *parts = (None if text is None else int(text) for text in found.group("days", "a", "b", "c"))
    first, second, third = parts
    # With days the first number counts hours; without, hours only where there are three.
    if days is None and third is None:
        return (first or 0) * 60 + (second or 0)
    return (days or 0) * 86400 + (first or 0) * 3600 + (second or 0) * 60 + (third or 0)


def _check_job_name(name: str) -> None:
    if not _is_line(name):
        raise SettingError(f"job_name={name!r}: need a text of 1 to 200 printable characters, in one line")
    if "/" in name or name.strip(". ") == "":
        raise SettingError(
            f"job_name={name!r}: it names a folder and a log, so it may neither hold / nor be made of dots and "
            "spaces only"
        )


def _check_together(given: Options) -> None:
    """Check what one option asks of another."""
    if given.mail_type is not None and given.mail is None:
        raise SettingError("mail_type: needs mail, the address")
    warning_s = given.warning_s or WARNING_S
    if given.time is not None and seconds(given.time) <= warning_s:
        raise SettingError(
            f"time={given.time!r}: is not longer than warning_s={warning_s}, so the job would be asked to save as soon "
            "as it starts: give it more time, or a smaller warning_s"
        )
    if given.kind == "array" and not given.table and given.command:
        raise SettingError("table: a sweep needs its lines: --table FILE, or --methods and --seeds")


def _check_words(given: Options) -> None:
    with_nul = next((word for word in given.command if "\0" in word), None)
    if with_nul is not None:
        raise SettingError(
            f"command: {with_nul!r} holds a NUL byte, which no shell and no program can be given: the words of a "
            "command may hold any other character"
        )
    if any(word.startswith("-") for word in given.modules):
        raise SettingError(f"modules={list(given.modules)!r}: need names of modules")
    for word in given.sbatch:
        option = re.fullmatch(r"--([a-z][a-z0-9-]*)(=.+)?", word)
        if option is None:
            raise SettingError(f"sbatch={word!r}: need --OPTION or --OPTION=VALUE")
        if option[1] in GOVERNED:
            raise SettingError(
                f"sbatch={word!r}: the template needs its own, or it has a name here: {', '.join(known(given.kind))}"
            )


def _check_table(given: Options) -> None:
    lines: set[tuple[str, ...]] = set()
    for line in given.table:
        if re.search(r"""['"\\]""", line):
            raise SettingError(
                f"table: {line!r}: its words are split at blanks, so it may hold neither quotes nor a backslash"
            )
        words = tuple(line.split())
        if words in lines:
            raise SettingError(f"table: {line!r}: stands there twice, and both jobs would train the same")
        lines.add(words)
