"""The text of a job script: a template with the options' values in it. Pure.

A template is a script that works as it is. Its lines are found by how they begin, so a value can only ever take the
place of a value; whatever it holds is quoted, for sbatch or for the shell.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from importlib import resources

from hpctk.errors import SettingError
from hpctk.launch.python_program import through_mpi4py
from hpctk.slurm.options import Options

#: In a word of the command: the folder of the run.
RUN = "{run}"


def template(kind: str) -> str:
    """Return the text of a template."""
    return resources.files("hpctk.templates").joinpath(f"{kind}.sbatch").read_text(encoding="utf-8")


def render(options: Options, text: str | None = None) -> str:
    """Return the job script that the options describe, by the template of their kind unless another text is given."""
    lines = (template(options.kind) if text is None else text).splitlines()
    for change in (_directives, _values, _environment, _table, _command):
        change(lines, options)
    return "\n".join(lines) + "\n"


def sbatch_quoted(value: str) -> str:
    """Return a value as sbatch reads it in an #SBATCH line; for the shell these lines are comments."""
    if re.fullmatch(r"[A-Za-z0-9_.,:@%+=/-]+", value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def shell_quoted(word: str) -> str:
    """Return a word of the command for the shell, with the run's folder where it has {run}."""
    if RUN not in word:
        return shlex.quote(word)
    return '"$run"'.join(shlex.quote(part) if part else "" for part in word.split(RUN))


def _directives(lines: list[str], options: Options) -> None:
    _set_directive(lines, "job-name", options.job_name)
    tasks, cpus = options.ntasks_per_node, options.cpus_per_task
    if options.kind == "ddp":
        # One torchrun on each node, with the CPUs of all its processes.
        given = lines[_find(lines, "processes=")].removeprefix("processes=")
        processes = int(given) if tasks is None else tasks
        _replace(lines, "processes=", [f"processes={processes}"])
        if cpus is not None or tasks is not None:
            cpus, tasks = processes * (cpus or 1), None
    mail_type = None if options.mail is None else options.mail_type or "FAIL,REQUEUE,END"
    for name, value in (
        ("nodes", options.nodes), ("ntasks-per-node", tasks), ("cpus-per-task", cpus), ("time", options.time),
        ("partition", options.partition), ("account", options.account), ("mail-user", options.mail),
        ("gpus-per-node", options.gpus_per_node), ("mem", options.mem), ("qos", options.qos),
        ("constraint", options.constraint), ("mail-type", mail_type),
    ):  # fmt: skip
        if value is not None:
            _set_directive(lines, name, str(value))
    if options.warning_s is not None:
        _set_directive(lines, "signal", f"B:USR1@{options.warning_s}")
    for word in options.sbatch:
        name, _, value = word[2:].partition("=")
        _set_directive(lines, name, value or None)


def _values(lines: list[str], options: Options) -> None:
    if options.max_restarts is not None:
        _replace(lines, "max_restarts=", [f"max_restarts={options.max_restarts}"])
    if options.mpi is not None:
        _replace(lines, "mpi=", [f"mpi={options.mpi}"])
    if options.on_lost_rank == "shrink":
        _edit(lines, "start=(", lambda line: line.replace("(mpirun ", "(mpirun --with-ft ulfm ", 1))
        lines.insert(_find(lines, "start=("), "export HPCTK_ON_LOST_RANK=shrink")
        # Slurm itself would end the job with its first node that fails.
        _set_directive(lines, "no-kill", None)
    if options.run is None:
        return
    quoted = shlex.quote(options.run)
    if options.kind == "array":
        _edit(lines, "run=", lambda line: line.replace("runs/$SLURM_JOB_NAME", quoted, 1))
    else:
        _replace(lines, "run=", [f"run={quoted}"])


def _environment(lines: list[str], options: Options) -> None:
    modules = [f"module load {shlex.quote(name)}" for name in options.modules]
    activate = []
    if options.venv is not None:
        activate = [f"source {shlex.quote(options.venv.rstrip('/') + '/bin/activate')} || exit 1"]
    if modules:
        _replace(lines, "# module load", modules)
    if activate or options.setup:
        _replace(lines, "# source", [*options.setup, *activate])


def _table(lines: list[str], options: Options) -> None:
    if not options.table:
        if options.at_once is not None:
            _edit(lines, "#SBATCH --array=", lambda line: f"{line.partition('%')[0]}%{options.at_once}")
        return
    first, last = _find(lines, "table=("), _find(lines, ")")
    lines[first + 1 : last] = [f"    {shlex.quote(line)}" for line in options.table]
    at_once = "" if options.at_once is None else f"%{options.at_once}"
    _set_directive(lines, "array", f"0-{len(options.table) - 1}{at_once}")


def _command(lines: list[str], options: Options) -> None:
    if not options.command:
        return
    words = [shell_quoted(word) for word in command(options)]
    if options.kind == "array":
        words.append('"${options[@]}"')
    _replace(lines, "command=(", [f"command=({' '.join(words)})"])


def command(options: Options) -> list[str]:
    """Return the words of the program: Python through mpi4py, and `hpctk train` with its run's folder."""
    words = list(options.command)
    if options.kind != "ddp":
        words = through_mpi4py(words)
    if _trains(words) and not any(word == "--run" or word.startswith("--run=") for word in words):
        words += ["--run", RUN] + ([] if "--resume" in words else ["--resume"])
    return words


def _trains(words: list[str]) -> bool:
    """Return whether the program is `hpctk train TASK`."""
    for i, word in enumerate(words[:-1]):
        if word.rpartition("/")[2] == "hpctk":
            return words[i + 1] == "train"
    return False


def _set_directive(lines: list[str], name: str, value: str | None) -> None:
    """Give an sbatch option its value: where the template has it, also as a comment, else behind the others."""
    line = f"#SBATCH --{name}" if value is None else f"#SBATCH --{name}={sbatch_quoted(value)}"
    found = [i for i, one in enumerate(lines) if re.match(rf"##?SBATCH --{re.escape(name)}(=|$)", one)]
    if found:
        lines[found[0]] = line
        return
    last = max(i for i, one in enumerate(lines) if one.startswith("#SBATCH"))
    lines.insert(last + 1, line)


def _find(lines: list[str], start: str) -> int:
    found = [i for i, line in enumerate(lines) if line.startswith(start)]
    if not found:
        raise SettingError(f"the template has no line that begins with {start!r}")
    return found[0]


def _replace(lines: list[str], start: str, new: list[str]) -> None:
    at = _find(lines, start)
    lines[at : at + 1] = new


def _edit(lines: list[str], start: str, edit: Callable[[str], str]) -> None:
    at = _find(lines, start)
    lines[at] = edit(lines[at])
