"""Job scripts for Slurm: write one with your values, or write, check and submit it.

The command goes behind `--`; "{run}" in it stands for the folder of the run, which the job also finds in $HPCTK_RUN.
`hpctk train` gets its --run and --resume by itself, Python programs their `-m mpi4py`. Values that are the same for all
your jobs can stand in a TOML file (--site); the page "Slurm" of the documentation tells more.

Examples:
  hpctk slurm render mpi --nodes 1 --ntasks-per-node 2 --time 02:00:00 -- hpctk train digits --method saef
  hpctk slurm render ddp --partition gpu -- python train_ddp.py --folder '{run}' > job.sbatch
  hpctk slurm submit mpi --job-name saef --account physics -- python train.py '{run}/checkpoints'
  hpctk slurm submit array --methods mean,saef,celgc --seeds 1,2,3 --at-once 4 -- hpctk train digits
  hpctk slurm submit gpu --nodes 4 --gpus-per-node 4 --venv ~/venv -- python train.py
  hpctk slurm render mpi --help
"""

from __future__ import annotations

import argparse
import os
import shlex
from dataclasses import replace
from pathlib import Path

from hpctk.cli.calibrate import keep
from hpctk.comm import environment
from hpctk.errors import SettingError
from hpctk.settings import settings_of
from hpctk.slurm import options as known
from hpctk.slurm.options import KINDS, Options, from_layers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions, and for each the kinds with their options."""
    actions = parser.add_subparsers(dest="action", metavar="render|submit", required=True)
    for action, summary in (
        ("render", "print a job script"),
        ("submit", "write a job script, let Slurm check it, submit it, and say where to look"),
    ):
        one = actions.add_parser(action, help=summary, description=f"{summary}.".capitalize())
        kinds = one.add_subparsers(dest="kind", metavar="KIND", required=True)
        for kind, meaning in KINDS.items():
            sub = kinds.add_parser(kind, help=meaning, description=f"{kind}: {meaning}.", allow_abbrev=False)
            # Otherwise usage shows [command ...] without the -- that must come before it.
            sub.usage = f"hpctk slurm {action} {kind} [OPTION ...] [-- COMMAND ...]"
            _add_options(sub, kind)


def _add_options(parser: argparse.ArgumentParser, kind: str) -> None:
    declared = settings_of(Options)
    for name in known.known(kind):
        about, flag = declared[name], f"--{name.replace('_', '-')}"
        if about.kind is tuple and name != "table":
            flag = "--module" if name == "modules" else flag
            parser.add_argument(flag, dest=name, action="append", metavar=about.metavar, help=about.help)
        elif name != "table":
            parser.add_argument(flag, dest=_dest(name), type=about.kind, metavar=about.metavar, help=about.help)
    if kind == "array":
        parser.add_argument(
            "--table", dest="table_file", type=Path, metavar="FILE", help="a line of options for each job"
        )
        parser.add_argument("--methods", metavar="A,B,...", help="a table of these methods ...")
        parser.add_argument("--seeds", metavar="1,2,...", help="... with each of these seeds [1]")
    parser.add_argument(
        "--site", type=Path, metavar="FILE",
        help=f"defaults of your site, a TOML file [{environment.slurm_site_file()}, if it is there]",
    )  # fmt: skip
    parser.add_argument("words", nargs="*", metavar="COMMAND", help="the program, behind --")


def _dest(name: str) -> str:
    # `run` is what the parser calls.
    return "folder" if name == "run" else name


def run(options: argparse.Namespace) -> int:
    """Print the script, or submit it."""
    from hpctk.slurm import commands
    from hpctk.slurm.render import render

    if options.action == "submit":
        # Before anything is written.
        commands.find_sbatch()
    chosen = resolved(options)
    text = render(chosen)
    print(text if options.action == "render" else f"{submitted(chosen, text)}\n", end="")
    return 0


def resolved(options: argparse.Namespace) -> Options:
    """Return the options: those of the site's file, and of the command line, which wins."""
    file: Path | None = options.site or environment.slurm_site()
    defaults = {} if file is None else known.read_site(file, options.kind)
    given = {name: getattr(options, _dest(name), None) for name in known.known(options.kind)}
    if options.kind == "array":
        given["table"] = table(options)
    chosen = from_layers(options.kind, defaults, {**given, "command": tuple(options.words)})
    # The shell would not, once it is quoted.
    return chosen if chosen.venv is None else replace(chosen, venv=os.path.expanduser(chosen.venv))


def table(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the lines of a sweep: of a file, or all methods with all seeds."""
    file: Path | None = options.table_file
    if file is not None and options.methods is not None:
        raise SettingError("--table and --methods: give one of them")
    if options.methods is None and options.seeds is not None:
        raise SettingError("--seeds: needs --methods")
    if file is not None:
        return table_lines(file)
    if options.methods is None:
        return ()
    methods = [word.strip() for word in options.methods.split(",")]
    seeds = [word.strip() for word in (options.seeds or "1").split(",")]
    if not all(methods) or not all(seed.isdecimal() for seed in seeds):
        raise SettingError(
            f"--methods {options.methods} --seeds {options.seeds or '1'}: need names and whole numbers, with commas"
        )
    return tuple(f"--method {method} --seed {seed}" for method in methods for seed in seeds)


def table_lines(file: Path) -> tuple[str, ...]:
    """Return the lines of a file that are neither empty nor remarks. Raise SettingError if there is none."""
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"--table {file}: {getattr(error, 'strerror', None) or 'it is no text'}") from None
    found = tuple(line for line in lines if line and not line.startswith("#"))
    if not found:
        raise SettingError(f"--table {file}: has no line")
    return found


def submitted(chosen: Options, text: str) -> str:
    """Keep the script in the run's folder, let Slurm check and take it; return what to say."""
    from hpctk.slurm import commands

    folder = Path(chosen.run or f"runs/{chosen.job_name}")
    script = folder / "job.sbatch"
    try:
        keep(script, text)
    except OSError as error:
        raise SettingError(f"{folder}: the run's folder cannot be written ({error.strerror})") from None
    commands.check(script)
    job = commands.submit(script)
    lines, log, run, each = "", f"{chosen.job_name}-{job}.out", str(folder), str(folder)
    if chosen.kind == "array":
        lines, log = f", {len(chosen.table) or 'all'} lines", f"{chosen.job_name}-{job}_*.out"
        run, each = f"{folder}/LINE, a folder for each line", f"{folder}/LINE"
    # Names may be anything, and the command in it will be pasted.
    return f"""\
job         {job}{lines}
log         {log}
run         {run}
statistics  {each}/stats; shown by: hpctk report {shlex.quote(each)}
script      {script}
look at it with squeue --job {job}, end it with scancel {job}"""
