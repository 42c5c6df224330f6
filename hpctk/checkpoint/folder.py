"""A folder of checkpoints: which are whole, which is the newest, which may go.

    FOLDER/
        000007-step-350/    index.json, rank-00000.h5, rank-00001.h5, ...
        000008-step-400/    ...

The index is written last. A folder without one is a save that did not come to its end, and counts for nothing; it
goes when the next save begins. Numbers grow by one, so the newest is the last by name, whatever its step.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctk.checkpoint import rank_file
from hpctk.checkpoint.rank_file import FORMAT, VERSION, Seal
from hpctk.errors import HpctkError

INDEX = "index.json"
#: Whole checkpoints that stay.
KEPT = 2
_NAME = re.compile(r"(\d{6,})-step-\d+")


@dataclass(frozen=True)
class Index:
    """What a checkpoint's index says.

    `checkpoint` is the id that all its files carry, `step` that of rank 0, `saved` the time in UTC, `hpctk` the version
    that wrote it; `settings` are the method's, `seals` one for each rank's file.
    """

    checkpoint: str
    step: int
    ranks: int
    saved: str
    hpctk: str
    settings: dict[str, Any]
    seals: tuple[Seal, ...]

    def to_json(self) -> str:
        """Return the text of an index file."""
        files = [
            {"name": rank_file.name(rank), "bytes": seal.nbytes, "crc32": seal.crc32}
            for rank, seal in enumerate(self.seals)
        ]
        kept = {key: value for key, value in vars(self).items() if key != "seals"}
        return json.dumps({"format": FORMAT, "version": VERSION, **kept, "files": files}, indent=2) + "\n"


def complete(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder that came to their end, the oldest first."""
    return [place for place in _all(folder) if is_whole(place)]


def is_whole(place: Path) -> bool:
    """Return whether a checkpoint came to its end."""
    return (place / INDEX).exists()


def newest(path: Path) -> Path:
    """Return the checkpoint that a path means: itself, or the newest in it. HpctkError where there is none."""
    if is_whole(path):
        return path
    if not path.is_dir():
        raise HpctkError(f"{path}: there is no such folder, so no checkpoint")
    found = complete(path)
    if not found:
        begun = len(_all(path))
        remark = f"; {begun} were begun and did not come to their end" if begun else ""
        raise HpctkError(f"{path}: holds no whole checkpoint{remark}")
    return found[-1]


def before(place: Path) -> Path | None:
    """Return the complete checkpoint before this one, None where there is none."""
    earlier = [one for one in complete(place.parent) if _number(one) < _number(place)]
    return earlier[-1] if earlier else None


def next_place(folder: Path, step: int) -> Path:
    """Return where the next checkpoint goes."""
    last = max(map(_number, _all(folder)), default=0)
    return folder / f"{last + 1:06}-step-{step}"


def write_index(place: Path, index: Index) -> None:
    """Make a checkpoint whole: from now on it counts."""
    rank_file.write_text(place / INDEX, index.to_json())
    rank_file.sync(place.parent)


def read_index(place: Path) -> Index:
    """Return a checkpoint's index; HpctkError names the file and what is wrong with it."""
    path = place / INDEX
    try:
        text = path.read_text()
    except (OSError, ValueError) as error:
        raise HpctkError(f"{path}: cannot be read ({error})") from None
    return index_from_json(place, text)


def index_from_json(place: Path, text: str) -> Index:
    """Return the index that a text holds; HpctkError names the file and what is wrong with it."""
    path = place / INDEX
    try:
        document = json.loads(text)
        if document.get("format") != FORMAT:
            raise HpctkError("is no index of a checkpoint")
        rank_file.check_version(document.get("version"))
        seals = tuple(Seal(int(one["bytes"]), int(one["crc32"])) for one in document["files"])
        index = Index(
            str(document["checkpoint"]), int(document["step"]), int(document["ranks"]), str(document["saved"]),
            str(document["hpctk"]), dict(document["settings"]), seals,
        )  # fmt: skip
    except HpctkError as error:
        raise HpctkError(f"{path}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise HpctkError(f"{path}: is damaged ({type(error).__name__}: {error})") from None
    if not 0 < index.ranks == len(index.seals):
        raise HpctkError(f"{path}: is damaged: {index.ranks} ranks and {len(index.seals)} files")
    return index


def outdated(folder: Path) -> list[str]:
    """Return the names of complete checkpoints that are older than the last KEPT."""
    return [place.name for place in complete(folder)[:-KEPT]]


def unfinished(folder: Path) -> list[str]:
    """Return the names of checkpoints that were begun and never finished."""
    return [place.name for place in _all(folder) if not is_whole(place)]


def remove(place: Path) -> None:
    """Remove a checkpoint. Its index first: half of it must not pass for whole."""
    with suppress(OSError):
        (place / INDEX).unlink(missing_ok=True)
    shutil.rmtree(place, ignore_errors=True)


def _all(folder: Path) -> Sequence[Path]:
    if not folder.is_dir():
        return []
    found = [place for place in folder.iterdir() if _NAME.fullmatch(place.name)]
    return sorted(found, key=_number)


def _number(place: Path) -> int:
    match = _NAME.fullmatch(place.name)
    return int(match[1]) if match else 0


def check_writable(folder: Path, rank: int) -> None:
    """Raise OSError where this rank cannot write into a folder: better now than after an hour."""
    probe = folder / f".writable-{rank}"
    probe.write_text("")
    probe.unlink()
