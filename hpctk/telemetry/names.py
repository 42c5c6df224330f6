"""What the folders and files of a run's statistics are called."""

from __future__ import annotations

import re
from pathlib import Path

#: The folder of statistics in the folder of a run.
STATS = "stats"
#: The name of a rank's file.
FILE = re.compile(r"rank-(\d{5,9})\.h5")
#: The name of a recording's folder.
FOLDER = re.compile(r"\d{3,9}")


def file_name(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank:05d}.h5"


def folder_name(recording: int) -> str:
    """Return the name of a recording's folder."""
    return f"{recording:03d}"


def run_id(path: Path) -> str:
    """Return the id of the run that a rank's file belongs to. Raise OSError or KeyError where it does not say."""
    # With h5py, which nobody needs who writes nothing.
    import h5py

    with h5py.File(path, "r", locking=False) as file:
        text = file.attrs["run_id"]
        return text.decode() if isinstance(text, bytes) else str(text)
