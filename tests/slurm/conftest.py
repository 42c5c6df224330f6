"""What the trainings of these tests come to without Slurm."""

import os
import time

import pytest
from slurm_jobs import PATIENCE_S, straight


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """Return a function for the digest that `training()` comes to under mpirun: run once, by whoever asks first."""
    base = tmp_path_factory.getbasetemp()
    # pytest-xdist gives every worker a folder of its own below the one of all.
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "straight"

    def trained():
        try:
            folder.mkdir()
        except FileExistsError:
            deadline = time.monotonic() + PATIENCE_S
            while not (folder / "digest").exists():
                assert time.monotonic() < deadline, "the run under mpirun has failed, or does not end"
                time.sleep(0.1)
        else:
            (folder / "new").write_text(straight(folder))
            (folder / "new").rename(folder / "digest")
        return (folder / "digest").read_text()

    return trained
