"""What a job script may be told, checked: an unknown or impossible value is an error that says what is allowed."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpctk.errors import SettingError

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
    "table": ("array",),
    "at_once": ("array",),
}

#: sbatch options that a template needs as they are, or that have a name of their own here.
GOVERNED = (
    "job-name", "nodes", "ntasks-per-node", "ntasks", "cpus-per-task", "gpus-per-node", "mem", "time", "partition",
    "account", "qos", "constraint", "mail-user", "mail-type", "output", "error", "open-mode", "requeue", "no-requeue",
    "signal", "array", "dependency",
)  # fmt: skip

_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<a>\d+)(?::(?P<b>\d{1,2}))?(?::(?P<c>\d{1,2}))?")
_MAIL_TYPES = (
    "NONE", "BEGIN", "END", "FAIL", "REQUEUE", "ALL", "TIME_LIMIT", "TIME_LIMIT_50", "TIME_LIMIT_80", "TIME_LIMIT_90",
    "ARRAY_TASKS",
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """What a job script is told; None keeps what the template says.

    Attributes
    ----------
    kind : str
        One of KINDS.
    job_name : str
    nodes, ntasks_per_node, cpus_per_task : int, optional
        For ddp, ntasks_per_node are the processes of each torchrun.
    gpus_per_node : int, optional
    mem, time, partition, account, qos, constraint, mail, mail_type : str, optional
        As sbatch knows them.
    mpi : str, optional
        What `srun --mpi` calls the MPI.
    warning_s : int, optional
        Seconds between the request to save and the time limit.
    max_restarts : int, optional
    run : str, optional
        The folder of the run.
    modules, setup : tuple of str
        Modules to load; lines of shell as they are, for what else a site needs.
    venv : str, optional
        A virtual environment to activate.
    sbatch : tuple of str
        Further options of sbatch, such as "--exclusive".
    table : tuple of str
        The lines of a sweep.
    at_once : int, optional
        Jobs of a sweep at the same time.
    command : tuple of str
        The program; "{run}" in a word stands for the run's folder.
    """

    kind: str
    job_name: str = ""
    nodes: int | None = None
    ntasks_per_node: int | None = None
    cpus_per_task: int | None = None
    gpus_per_node: int | None = None
    mem: str | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    mail: str | None = None
    mail_type: str | None = None
    mpi: str | None = None
    warning_s: int | None = None
    max_restarts: int | None = None
    run: str | None = None
    modules: tuple[str, ...] = ()
    venv: str | None = None
    setup: tuple[str, ...] = ()
    sbatch: tuple[str, ...] = ()
    table: tuple[str, ...] = ()
    at_once: int | None = None
    command: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise SettingError(f"kind={self.kind!r}: allowed are {', '.join(KINDS)}")
        if not self.job_name:
            object.__setattr__(self, "job_name", f"hpctk-{self.kind}")
        for name, kinds in ONLY.items():
            if getattr(self, name) not in (None, ()) and self.kind not in kinds:
                raise SettingError(
                    f"{name}: {self.kind} has no such option, only {', '.join(kinds)} "
                    f"{'have' if len(kinds) > 1 else 'has'}; {self.kind} knows {', '.join(known(self.kind))}"
                )
        _check_texts(self)
        _check_numbers(self)
        _check_lists(self)


def known(kind: str) -> list[str]:
    """Return the names of the options that a kind has."""
    names = [field.name for field in dataclasses.fields(Options) if field.name not in ("kind", "command")]
    return [name for name in names if kind in ONLY.get(name, (kind,))]


def from_layers(kind: str, *layers: Mapping[str, Any]) -> Options:
    """Return the options that layers give, later ones winning; None gives nothing."""
    merged: dict[str, Any] = {}
    for layer in layers:
        merged |= {name: value for name, value in layer.items() if value not in (None, (), [])}
    names = [field.name for field in dataclasses.fields(Options)]
    unknown = [name for name in merged if name not in names]
    if unknown:
        raise SettingError(f"no option {unknown[0]!r} for {kind}: known are {', '.join(known(kind))}")
    return Options(kind, **merged)


def seconds(time: str) -> float:
    """Return a time limit of Slurm's in seconds; SettingError where it is none."""
    found = _TIME.fullmatch(time)
    if found is None or time.count(":") > 2:
        raise SettingError(
            f"time={time!r}: allowed are MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS, DAYS-HOURS, "
            "DAYS-HOURS:MINUTES and DAYS-HOURS:MINUTES:SECONDS"
        )
    a, b, c = (None if found[name] is None else int(found[name]) for name in "abc")
    if found["days"] is not None:
        return int(found["days"]) * 86400 + (a or 0) * 3600 + (b or 0) * 60 + (c or 0)
    if c is not None:
        return (a or 0) * 3600 + (b or 0) * 60 + c
    return (a or 0) * 60 + (b or 0)


def _check_texts(given: Options) -> None:
    for name in (
        "job_name",
        "partition",
        "account",
        "qos",
        "constraint",
        "mail",
        "run",
        "venv",
        "mem",
        "mpi",
    ):
        value = getattr(given, name)
        if value is None:
            continue
        if not isinstance(value, str) or not value or not value.isprintable() or len(value) > 200:
            raise SettingError(f"{name}={value!r}: need a text of 1 to 200 printable characters, in one line")
    if "/" in given.job_name or given.job_name.strip(". ") == "":
        raise SettingError(
            f"job_name={given.job_name!r}: it names a folder and a log, so it may neither hold / nor be "
            "made of dots and spaces only"
        )
    for name, pattern, allowed in (
        ("mem", r"\d+[KMGT]?", "a number with K, M, G or T behind it, such as 16G"),
        ("mpi", r"[A-Za-z0-9_]+", "what `srun --mpi=list` shows, such as pmix, pmi2, cray_shasta"),
        ("mail", r"[^\s,]+", "one address"),
    ):
        value = getattr(given, name)
        if value is not None and not re.fullmatch(pattern, value):
            raise SettingError(f"{name}={value!r}: allowed is {allowed}")
    if given.mail_type is not None:
        wrong = [word for word in given.mail_type.split(",") if word not in _MAIL_TYPES]
        if wrong:
            raise SettingError(f"mail_type={given.mail_type!r}: allowed are {', '.join(_MAIL_TYPES)}")
    if given.mail_type is not None and given.mail is None:
        raise SettingError("mail_type: needs mail, the address")


def _check_numbers(given: Options) -> None:
    ranges = {
        "nodes": (1, 100_000), "ntasks_per_node": (1, 4096), "cpus_per_task": (1, 4096), "gpus_per_node": (1, 64),
        "warning_s": (1, 65535), "max_restarts": (0, 10_000), "at_once": (1, 100_000),
    }  # fmt: skip
    for name, (low, high) in ranges.items():
        value = getattr(given, name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise SettingError(f"{name}={value!r}: need a whole number, {low} to {high}")
    if given.time is not None:
        if not isinstance(given.time, str):
            raise SettingError(f"time={given.time!r}: need a text, such as '01:00:00'")
        limit, warning = seconds(given.time), given.warning_s or 180
        if limit <= warning:
            raise SettingError(
                f"time={given.time!r}: is not longer than warning_s={warning}, so the job would be asked to save as "
                "soon as it starts: give it more time, or a smaller warning_s"
            )


def _check_lists(given: Options) -> None:
    for name in ("modules", "setup", "sbatch", "table", "command"):
        words = getattr(given, name)
        if isinstance(words, str) or not all(isinstance(word, str) for word in words):
            raise SettingError(f"{name}={words!r}: need a list of texts")
        if name != "command" and not all(word.strip() and word.isprintable() for word in words):
            raise SettingError(
                f"{name}={list(words)!r}: need texts of printable characters, none of them empty"
            )
        with_nul = next((word for word in words if "\0" in word), None)
        if with_nul is not None:
            raise SettingError(
                f"{name}: {with_nul!r} holds a NUL byte, which no shell and no program can be given: the words of a "
                "command may hold any other character"
            )
        object.__setattr__(given, name, tuple(words))
    for word in given.modules:
        if word.startswith("-"):
            raise SettingError(f"modules={list(given.modules)!r}: need names of modules")
    for word in given.sbatch:
        option = re.fullmatch(r"--([a-z][a-z0-9-]*)(=.+)?", word)
        if option is None:
            raise SettingError(f"sbatch={word!r}: need --OPTION or --OPTION=VALUE")
        if option[1] in GOVERNED:
            raise SettingError(
                f"sbatch={word!r}: the template needs its own, or it has a name here: {', '.join(known(given.kind))}"
            )
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
    if given.kind == "array" and not given.table and given.command:
        raise SettingError("table: a sweep needs its lines: --table FILE, or --methods and --seeds")
