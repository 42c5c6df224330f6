"""Train a bundled job on the ranks of this MPI job by one method or several, and say what it cost.

Examples:
  hpctk mpirun -n 4 hpctk train digits --method all --run runs/all
  hpctk mpirun -n 4 hpctk train digits --run runs/all --resume
  hpctk mpirun -n 4 hpctk train fashion --model cnn --method saef --compressor sign --set server=sign
  hpctk mpirun -n 2 hpctk train lm --method mean:topk:0.01,celgc --epochs 5 --json result.json
  mpirun -n 8 python -m mpi4py -m hpctk train regression --method adacons
  hpctk train digits --help
  hpctk train --list-methods
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctk.cli.core import task_options
from hpctk.cli.core.progress import Progress
from hpctk.cli.core.table import bytes_text, results_table, wrapped
from hpctk.comm import environment
from hpctk.errors import SettingError
from hpctk.tasks import TASKS, task_class
from hpctk.tasks.core.recipes import check
from hpctk.tasks.core.settings import SETTINGS

if TYPE_CHECKING:
    from hpctk.comm.world import World
    from hpctk.tasks.core.recipes import Recipe
    from hpctk.tasks.core.run_folder import RunFolder
    from hpctk.tasks.core.task import Task
    from hpctk.tasks.core.train import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the tasks, each with its options."""
    parser.add_argument("--list-methods", action="store_true", help="print all methods with their settings, and stop")
    task_options.add_tasks(parser)


def run(options: argparse.Namespace) -> int:
    """Train, then print the table on rank 0. Collective over COMM_WORLD."""
    if options.list_methods:
        print(listed())
        return 0
    if options.task is None:
        raise SettingError(f"say what to train: {', '.join(TASKS)} (or --list-methods)")
    if options.resume and options.folder is None:
        raise SettingError("--resume: say of which run by --run DIR")
    if environment.read("HPCTK_RESPAWN") is not None and not options.resume:
        raise SettingError("hpctk mpirun --respawn begins this anew: say where it goes on by --run DIR --resume")
    # Before torch and MPI, which take seconds to start, and ranks that have met end with pages of their own.
    expected = task_options.foreseen(options, SETTINGS[options.task])
    if expected is not None:
        check(expected)
    from hpctk.comm.world import world
    from hpctk.tasks.core.recipes import recipes
    from hpctk.tasks.core.result import document
    from hpctk.tasks.core.run_folder import RunFolder

    kind = task_class(options.task)
    if expected is not None:
        for recipe in recipes(expected, kind.recipes):
            recipe.make()
    if options.check:
        print(f"hpctk train {options.task}: the settings make sense")
        return 0
    folder = None if options.folder is None else RunFolder(options.folder)
    settings = task_options.resolved(options, kind.settings_class, folder)
    chosen = recipes(settings, kind.recipes)
    here, task = world(), kind(settings)
    # What cannot be written is said before the training, not after it; other ranks may have another disk.
    here.run_on_root("looking where files are to go", lambda: check_writable(options))
    with here.shared_errors("loading the data"):
        task.load()
        for recipe in chosen:
            task.check(here.size, recipe.make())
    if folder is not None:
        remark = f"hpctk train {options.task}, begun on {here.size} ranks"
        here.run_on_root("opening the run", lambda: folder.begin(settings, remark, resume=options.resume))
    ranks = here.size
    if folder is not None:
        ranks = here.run_on_root("looking for a result", lambda: _ranks(folder, here.size))
    entries = {recipe.name: train(here, task, recipe, folder, ranks, several=len(chosen) > 1) for recipe in chosen}
    whole = document(options.task, ranks, dataclasses.asdict(settings), entries)
    hand_over(here, whole, folder, options)
    return 0


def check_writable(options: argparse.Namespace) -> None:
    """Raise SettingError where the result, or the picture, cannot be written where it is to go."""
    for option, path in (("--json", options.json), ("--picture", options.picture)):
        # The folder of the run is made later.
        if path is None or (options.folder is not None and path.parent == Path(options.folder)):
            continue
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise SettingError(f"{option} {path}: {path.parent} is no folder that can be written to")


def train(
    here: World, task: Task[Any], recipe: Recipe, folder: RunFolder | None, ranks: int, *, several: bool
) -> dict[str, Any]:
    """Train by one method, unless it was; return how it went. Collective over the communicator.

    `ranks` is how many there were at the start: some may have been lost since.
    """
    from hpctk.checkpoint import Stopped
    from hpctk.tasks.core.recipes import readable
    from hpctk.tasks.core.result import document, entry
    from hpctk.tasks.core.train import Job

    own = None if folder is None else folder.of_method(recipe.name, several=several)
    kept = None if own is None else finished(here, own, recipe.name, ranks, several=several)
    if kept is not None:
        return kept
    checkpoints = None if own is None else own.checkpoints
    job = Job(here, task, recipe, checkpoints, _stats(own, recipe, several=several))
    resumed = job.resume()
    bar = Progress(recipe.name + (", resumed" if resumed else ""))
    try:
        result = job.run(lambda report: _show(bar, report) if here.rank == 0 else None)
    finally:
        bar.finish()
    late = job.close()
    text = json.dumps(dataclasses.asdict(result))
    texts = job.optimizer.together(lambda: here.gather_texts(text, "gathering the results"))
    made = entry(readable(recipe.make()), [json.loads(text) for text in texts])
    if own is not None:
        settings = dataclasses.asdict(task.settings)
        whole = document(task.settings.task, ranks, settings, {recipe.name: made})
        here.run_on_root("writing the result", lambda: own.write_result(whole))
    if several and here.minimum([-late], "asking for signals") != [0]:
        raise Stopped(f"stopped after {recipe.name}; --resume goes on with the other methods")
    return made


def _stats(own: RunFolder | None, recipe: Recipe, *, several: bool) -> Path | None:
    """Return where the statistics of a method go: into its run; else, of several, each into a folder of its own."""
    if own is not None:
        return own.stats
    given: Path | None = environment.read("HPCTK_STATS")
    return given / recipe.name if given is not None and several else given


def finished(here: World, own: RunFolder, name: str, ranks: int, *, several: bool) -> dict[str, Any] | None:
    """Return how a method did where that is known already. Collective over the communicator."""
    found: dict[str, Any] | None = here.run_on_root("looking for a result", own.result)
    if found is None or not found["methods"][name]["complete"]:
        return None
    if several and found["ranks"] != ranks:
        raise SettingError(
            f"{own.path}: {name} was trained on {found['ranks']} ranks, now there are {ranks}: a comparison needs "
            "the same number for all"
        )
    kept: dict[str, Any] = found["methods"][name]
    return kept


def _ranks(folder: RunFolder, now: int) -> int:
    """Return how many ranks trained: those of now, unless the run is over already."""
    found = folder.result()
    over = found is not None and all(method["complete"] for method in found["methods"].values())
    return int(found["ranks"]) if found is not None and over else now


def hand_over(here: World, whole: dict[str, Any], folder: RunFolder | None, options: argparse.Namespace) -> None:
    """Write the result and the picture, print the table. Collective over the communicator."""
    from hpctk.tasks.core.run_folder import write_json

    if folder is not None:
        here.run_on_root("writing the result", lambda: folder.write_result(whole))
    if options.json is not None:
        here.run_on_root("writing the result", lambda: write_json(options.json, whole))
    lines = [results_table(whole["methods"])]
    if options.picture is not None:
        lines.append(here.run_on_root("drawing the picture", lambda: _drawn(whole, options.picture)))
    if folder is not None:
        lines.append(f"report: {report_command(folder.path, several=len(whole['methods']) > 1)}")
    if here.rank == 0:
        print("\n".join(lines))


def report_command(folder: Path, *, several: bool) -> str:
    """Return the command that reports on a run, for a shell."""
    quoted = shlex.quote(str(folder))
    return f"hpctk report --compare {quoted}/*/" if several else f"hpctk report {quoted}"


def _show(bar: Progress, report: Report) -> None:
    sent = "" if report.bytes_per_step is None else f"  {bytes_text(report.bytes_per_step)}/step"
    remark = f"loss {report.loss:.3g}  {report.samples_per_s:.0f} samples/s{sent}"
    bar.step(report.done, report.total, remark)


def _drawn(whole: dict[str, Any], target: Path) -> str:
    from hpctk.tasks.core.picture import draw

    try:
        draw(whole, target)
    except ImportError:
        return "no picture: it needs matplotlib (pip install 'hpctk[plot]')"
    return f"picture: {target}"


def listed() -> str:
    """Return all methods with their settings, and how compressors are written."""
    from hpctk.compressors import forms
    from hpctk.settings import rows, settings_of
    from hpctk.tasks.core.recipes import classes

    lines = []
    for name, kind in classes().items():
        lines.append(wrapped(f"{name:<10} {kind.summary}", " " * 11))
        for setting, values, default, meaning in rows(settings_of(kind)):
            lines.append(wrapped(f"    {setting}: {values} [{default or 'to be given'}]; {meaning}", " " * 8))
    lines.append(f"{'all':<10} mean and the five methods, one after the other")
    lines += ["", wrapped(f"Compressors: {', '.join(forms())}; mean:COMPRESSOR is averaging with one")]
    return "\n".join(lines)
