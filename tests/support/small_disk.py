"""A disk that is soon full."""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager

import pytest


@contextmanager
def mounted(disk, size):
    """Give a folder that is a disk of so many bytes, such as "1m"."""
    if os.getuid() != 0:
        pytest.skip("only root can mount a small disk")
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)], check=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)
