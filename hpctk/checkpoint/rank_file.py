"""One rank's file of a checkpoint: written beside and renamed, synced, and known again by length and checksum.

    rank-00003.h5
        attributes      format, version, checkpoint (a random id, the same in all files of a checkpoint), rank, ranks
        structure, ...  the tree (tree.py)

Length and CRC-32 of the whole file stand in the index, so that whatever was cut off or changed is noticed before HDF5
looks at it. An index can be forged, too; so nothing in a file may lead out of it (hpctk/hdf5.py).
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py

from hpctk import hdf5
from hpctk.checkpoint import tree
from hpctk.errors import HpctkError

FORMAT, VERSION = "hpctk-checkpoint", 1
#: Room for names and tables of the file, where what is needed is compared with what is free.
HEAD_BYTES = 65536
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Seal:
    """How a file is known again."""

    nbytes: int
    crc32: int


@dataclass(frozen=True)
class Header:
    """Which file of which checkpoint this is."""

    checkpoint: str
    rank: int
    ranks: int


def name(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank:05}.h5"


def write(path: Path, header: Header, structure: str, arrays: dict[str, tuple[Any, str]]) -> Seal:
    """Write a file, whole or not at all, and return its seal once it is on disk."""
    check_room(path.parent, len(structure) + sum(array.nbytes for array, _ in arrays.values()))
    with beside(path) as partial:
        try:
            with h5py.File(partial, "w", locking="best-effort") as file:
                file.attrs.update(format=FORMAT, version=VERSION, **vars(header))
                tree.put(file, structure, arrays)
        except (OSError, RuntimeError) as error:
            raise OSError(f"{path}: {hdf5.reason(error)}") from None
        return _synced_seal(partial)


def check_room(folder: Path, nbytes: int) -> None:
    """Raise OSError where a folder has no room for a file of so many bytes."""
    free = os.statvfs(folder)
    available = free.f_bavail * free.f_frsize
    if nbytes + HEAD_BYTES > available:
        raise OSError(f"{folder}: needs {nbytes / 1e6:.1f} MB, {available / 1e6:.1f} MB are free on that disk")


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """Give a name to write to; what is there afterwards takes the place of `path`, unless the block raises."""
    partial = path.with_name(path.name + ".partial")
    try:
        yield partial
        os.replace(partial, path)
        sync(path.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text, whole or not at all."""
    with beside(path) as partial:
        partial.write_text(text, encoding="utf-8")
        sync(partial)


def check(path: Path, seal: Seal) -> None:
    """Raise HpctkError where a file is not what was written, or takes anything from another one."""
    if not path.exists():
        raise HpctkError(f"{path}: is missing")
    length = path.stat().st_size
    if length != seal.nbytes:
        what = "is cut off" if length < seal.nbytes else "is too long"
        raise HpctkError(f"{path}: {what}: it has {length} bytes, {seal.nbytes} were written")
    if _checksum(path) != seal.crc32:
        raise HpctkError(f"{path}: is damaged: its checksum is not that of what was written")
    with _hdf5(path) as file:
        hdf5.check_inside(file["/"].id)


@contextmanager
def opened(path: Path, header: Header) -> Iterator[Any]:
    """Open a file that has been checked, and make sure that it belongs to the checkpoint; errors name the file."""
    with _hdf5(path) as file:
        kept = dict(file.attrs)
        if kept.get("format") != FORMAT:
            raise HpctkError("is no file of a checkpoint")
        check_version(kept.get("version"))
        found = Header(str(kept.get("checkpoint")), int(kept.get("rank", -1)), int(kept.get("ranks", -1)))
        if found != header:
            raise HpctkError(
                f"belongs to another checkpoint: it is rank {found.rank} of {found.ranks} of "
                f"{found.checkpoint}, wanted is rank {header.rank} of {header.ranks} of {header.checkpoint}"
            )
        yield file


@contextmanager
def _hdf5(path: Path) -> Iterator[Any]:
    """Open a file with HDF5; errors in the block name it."""
    try:
        with h5py.File(path, "r", locking="best-effort") as file:
            yield file
    except HpctkError as error:
        raise HpctkError(f"{path}: {error}") from None
    except hdf5.ERRORS as error:
        raise HpctkError(f"{path}: cannot be read by HDF5 ({hdf5.reason(error)})") from None


def check_version(version: Any) -> None:
    """Raise HpctkError for a format that this hpctk does not read."""
    if version != VERSION:
        newer = isinstance(version, int) and version > VERSION
        advice = "it was written by a newer hpctk: install that one" if newer else "it is unknown"
        raise HpctkError(f"format version {version}, this hpctk reads {VERSION}; {advice}")


def _synced_seal(path: Path) -> Seal:
    """Return a file's seal once it is on disk; the checksum is taken while the disk is at work."""
    errors: list[OSError] = []

    def sync_here() -> None:
        try:
            sync(path)
        except OSError as error:
            errors.append(error)

    syncing = threading.Thread(target=sync_here)
    syncing.start()
    seal = Seal(path.stat().st_size, _checksum(path))
    syncing.join()
    if errors:
        raise errors[0]
    return seal


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checksum(path: Path) -> int:
    block, checksum = memoryview(bytearray(_BLOCK_BYTES)), 0
    with path.open("rb", buffering=0) as file:
        while length := file.readinto(block):
            checksum = zlib.crc32(block[:length], checksum)
    return checksum
