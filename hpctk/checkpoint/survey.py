"""A look into a checkpoint from outside, without a job: is it whole, and what does it hold?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpctk.checkpoint import folder, rank_file, tree
from hpctk.checkpoint.rank_file import Header
from hpctk.errors import HpctkError


def survey(path: Path, *, tensors: bool = False) -> dict[str, Any]:
    """Return what a checkpoint holds, ready for JSON.

    Raises
    ------
    HpctkError
        Where there is none, or its index cannot be read. Damaged files are named in `files` instead.
    """
    place = folder.newest(path)
    index = folder.read_index(place)
    files = []
    for rank, seal in enumerate(index.seals):
        file = place / rank_file.name(rank)
        files.append({"name": file.name, "bytes": seal.nbytes, "state": _state(file, rank, index)})
    inside = _inside(place / rank_file.name(0), tensors) if files[0]["state"] == "whole" else {}
    return {
        "checkpoint": str(place),
        **{key: getattr(index, key) for key in ("step", "ranks", "saved", "hpctk", "settings")},
        "files": files,
        "parts": inside.get("parts", []),
        "extra": inside.get("extra", {}),
        "tensors": inside.get("tensors", []),
        "others": [one.name for one in folder.complete(place.parent) if one != place],
    }


def _state(file: Path, rank: int, index: folder.Index) -> str:
    try:
        rank_file.check(file, index.seals[rank])
        with rank_file.opened(file, Header(index.checkpoint, rank, index.ranks)):
            return "whole"
    except (HpctkError, OSError) as error:
        return str(error).removeprefix(f"{file}: ")


def _inside(path: Path, tensors: bool) -> dict[str, Any]:
    with h5py.File(path, "r") as file:
        names: list[str] = []
        file.visit(names.append)
        kept = {name: file[name] for name in names if isinstance(file[name], h5py.Dataset) and name != tree.STRUCTURE}
        extra = tree.read(file, "extra")
        return {
            "parts": _parts(kept),
            "extra": {str(key): value for key, value in extra.items() if isinstance(value, int | float | str | None)},
            "tensors": [_described(name, dataset) for name, dataset in kept.items()] if tensors else [],
        }


def _parts(datasets: dict[str, Any]) -> list[dict[str, Any]]:
    """Return how much lies under each key, one level down for the method's."""
    found: dict[str, dict[str, Any]] = {}
    for name, dataset in datasets.items():
        words = name.split("/")
        key = "/".join(words[:2]) if words[0] == "method" else words[0]
        part = found.setdefault(key, {"name": key, "tensors": 0, "bytes": 0})
        part["tensors"] += 1
        part["bytes"] += int(dataset.nbytes)
    return list(found.values())


def _described(name: str, dataset: Any) -> dict[str, Any]:
    dtype = str(dataset.attrs.get("torch_dtype", dataset.dtype))
    # Stored as whole numbers where HDF5 does not know the dtype: their norm would say nothing.
    values = dataset[...] if dtype == str(dataset.dtype) else np.zeros(0)
    norm = 0.0 if values.dtype.kind == "c" else float(np.linalg.norm(values.astype(np.float64)))
    shape = "x".join(map(str, dataset.shape)) or "number"
    return {"name": name, "dtype": dtype, "shape": shape, "norm": norm}
