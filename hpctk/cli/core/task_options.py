"""The options of `hpctk train TASK`: one for each setting of the task, and those about the run."""

from __future__ import annotations

import argparse
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctk.comm import launcher
from hpctk.errors import SettingError
from hpctk.settings import settings_of
from hpctk.tasks import TASKS
from hpctk.tasks.core.settings import SAVED, SETTINGS, read, resolve

if TYPE_CHECKING:
    from hpctk.tasks.core.run_folder import RunFolder
    from hpctk.tasks.core.settings import Settings

EPILOG = """The same settings can stand in a TOML file (--settings), by the same names with _ for -, those of the method
in a table [method_settings]; the command line wins. The page "Training jobs" of the documentation has more."""


def add_tasks(parser: argparse.ArgumentParser) -> None:
    """Declare a subcommand for each task."""
    tasks = parser.add_subparsers(dest="task", metavar="TASK")
    for name, (_, _, summary) in TASKS.items():
        one = tasks.add_parser(name, help=summary, description=f"{name}: {summary}.", epilog=EPILOG)
        one.formatter_class = argparse.RawDescriptionHelpFormatter
        _add_settings(one.add_argument_group("settings"), SETTINGS[name])
        _add_running(one.add_argument_group("running"))


def _add_settings(group: Any, kind: type[Settings]) -> None:
    for name, about in settings_of(kind).items():
        if name == "method_settings":
            group.add_argument(
                "--set", action="append", default=[], metavar="KEY=VALUE",
                help="a setting of the method; may be repeated",
            )  # fmt: skip
            continue
        group.add_argument(
            f"--{name.replace('_', '-')}", type=about.kind, default=argparse.SUPPRESS, help=about.help,
            metavar="|".join(about.choices) or name.rpartition("_")[2].upper(),
        )  # fmt: skip


def _add_running(group: Any) -> None:
    group.add_argument("--settings", type=Path, metavar="FILE", help="take settings from a TOML file")
    group.add_argument(
        "--run", dest="folder", type=Path, metavar="DIR", help="keep settings, checkpoints and result in DIR"
    )
    group.add_argument(
        "--resume", action="store_true",
        help="go on with the run in DIR, with its settings; begin where there is none",
    )  # fmt: skip
    group.add_argument("--check", action="store_true", help="say whether these settings make sense, and train nothing")
    group.add_argument("--json", metavar="FILE", type=Path, help="write the result to FILE, too")
    group.add_argument(
        "--picture", metavar="FILE", type=Path,
        help="draw loss against bytes and against seconds (PNG; needs matplotlib)",
    )  # fmt: skip


def resolved(options: argparse.Namespace, kind: type[Settings], folder: RunFolder | None) -> Settings:
    """Return the settings: defaults, those of the run that is resumed, of the file, of the command line.

    Collective over COMM_WORLD where a run is resumed.
    """
    from hpctk.comm.world import world

    saved: dict[str, Any] | None = None
    if folder is not None and options.resume:
        saved = world().run_on_root("reading the run", lambda: folder.saved(kind))
    return resolve(kind, saved or {}, *typed(options, kind))


def foreseen(options: argparse.Namespace, kind: type[Settings]) -> Settings | None:
    """Return the settings as far as one process sees them, None where it does not see the run that is resumed.

    Local: what is wrong with them is found before the ranks meet.
    """
    saved: dict[str, Any] = {}
    if options.resume:
        file = options.folder / SAVED
        # On rank 0 that means that there is no run yet, on others maybe only that they have another disk.
        if not file.exists() and launcher.rank(os.environ):
            return None
        saved = read(file, kind) if file.exists() else {}
    return resolve(kind, saved, *typed(options, kind))


def typed(options: argparse.Namespace, kind: type[Settings]) -> list[dict[str, Any]]:
    """Return the settings of the file and of the command line, which wins."""
    file = {} if options.settings is None else read(options.settings, kind)
    names = [name for name in settings_of(kind) if name != "method_settings"]
    given = {name: getattr(options, name) for name in names if hasattr(options, name)}
    return [file, {**given, "method_settings": overrides(options.set)}]


def overrides(texts: list[str]) -> dict[str, Any]:
    """Return the settings that KEY=VALUE texts give, numbers as numbers."""
    pairs = [text.partition("=") for text in texts]
    for key, equals, _ in pairs:
        if not key or not equals:
            raise SettingError(f"--set {key}: need KEY=VALUE, such as --set period=16")
    return {key: _value(text) for key, _, text in pairs}


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for number in (int, float):
        with suppress(ValueError):
            return number(text)
    return text
