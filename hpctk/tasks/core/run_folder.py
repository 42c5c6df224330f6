"""The folder of a run: what it was told, how it went, and its checkpoints.

    settings.toml       the resolved settings; --settings reads them again
    result.json         how it went, once it is over
    checkpoints/        what it is resumed from
    stats/              what every rank sent; hpctk report
    METHOD/             the same for each of several methods: result.json, checkpoints/ and stats/

Files are written beside and renamed: whoever reads them finds the old or the new, never half of one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpctk.checkpoint.rank_file import write_text
from hpctk.errors import HpctkError, SettingError
from hpctk.tasks.core import settings as told
from hpctk.tasks.core.settings import Settings
from hpctk.telemetry.names import STATS

SETTINGS, RESULT, CHECKPOINTS = told.SAVED, "result.json", "checkpoints"


class RunFolder:
    """A run's folder, as rank 0 sees it. Everything here is local: call it by `World.run_on_root`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints, self.stats = path / CHECKPOINTS, path / STATS

    def saved(self, kind: type[Settings]) -> dict[str, Any] | None:
        """Return the settings that the run was begun with, None where there is no run yet."""
        file = self.path / SETTINGS
        if not file.exists():
            return None
        saved = told.read(file, kind)
        if not saved:
            raise HpctkError(f"{file}: is empty, so what the run was told is lost: give another --run")
        return saved

    def begin(self, settings: Settings, remark: str, *, resume: bool) -> bool:
        """Write the settings down; return whether a run was there already.

        Raises
        ------
        SettingError
            Where the folder holds a run, and it was not asked to be resumed or has other settings; where it cannot be
            written.
        """
        try:
            saved = self.saved(type(settings))
        except OSError as error:
            raise self._refused(error) from None
        if saved is not None and not resume:
            raise SettingError(
                f"{self.path} holds a run already: --resume goes on with it, another --run starts a new one"
            )
        if saved is not None:
            other = told.differences(saved, settings)
            if other:
                raise SettingError(
                    f"{self.path} holds a run with other settings: {'; '.join(other)}. Resume it with its own, or "
                    "start a new one by another --run"
                )
        elif (self.path / RESULT).exists():
            raise SettingError(f"{self.path} holds a {RESULT} but no {SETTINGS}: give another --run")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_text(self.path / SETTINGS, told.toml(settings, remark))
        except OSError as error:
            raise self._refused(error) from None
        return saved is not None

    def _refused(self, error: OSError) -> SettingError:
        return SettingError(f"--run {self.path}: cannot be written ({error.strerror}): give another folder")

    def of_method(self, name: str, *, several: bool) -> RunFolder:
        """Return the folder of one method: this one, where it is the only one."""
        return RunFolder(self.path / name.replace(":", "-")) if several else self

    def result(self) -> dict[str, Any] | None:
        """Return how the run went, None where it is not over."""
        file = self.path / RESULT
        if not file.exists():
            return None
        try:
            document: dict[str, Any] = json.loads(file.read_text())
            if not isinstance(document, dict):
                raise ValueError("it holds no table")
        except ValueError as error:
            raise HpctkError(f"{file}: damaged ({error}): remove it to have it made again") from None
        return document

    def write_result(self, document: Mapping[str, Any]) -> None:
        """Write how the run went, whole or not at all."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.path / RESULT, document)


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document, whole or not at all; numbers that JSON does not know become null."""
    write_text(path, json.dumps(finite(document), indent=2, allow_nan=False) + "\n")


def finite(value: Any) -> Any:
    """Return a document in which numbers that JSON does not know are None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: finite(one) for key, one in value.items()}
    return [finite(one) for one in value] if isinstance(value, list | tuple) else value
