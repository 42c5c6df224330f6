"""What keeps an MPI test run from hanging, and the fixtures all tests share.

Three defences (each catches what the others miss):
1. `python -m mpi4py -m pytest` (launch/test): an exception that escapes pytest aborts the job;
2. `faulthandler_timeout` (pyproject.toml): a line that never returns is shown and the process ended;
3. the verdict below: after every mpi-marked test the ranks tell each other how it went, so that a
   test that failed on one rank fails on all, and a rank that never arrives ends the job by name.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))

#: A test that loses a rank ends by hpctk's own deadline, well before the verdict's.
os.environ.setdefault("HPCTK_TIMEOUT_S", "20")
VERDICT_S = 60.0

_verdicts = None


def pytest_collection_modifyitems(config, items):
    """Everything in these folders is an MPI test; saying so in each file would only be forgotten in one.

    What is marked `full` runs with HPCTK_FULL=1, which `launch/test --full` sets: more of the same, for which a change
    need not wait.
    """
    if os.environ.get("HPCTK_FULL") != "1":
        left_out = [item for item in items if item.get_closest_marker("full") is not None]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    folders = {Path(__file__).parent / name for name in ("mpi", "devices", "horovod/ranks")}
    for item in items:
        if not folders.isdisjoint(item.path.parents) and item.get_closest_marker("mpi") is None:
            item.add_marker(pytest.mark.mpi)


def wait_for_all(request, name: str) -> None:
    """Poll a collective of all ranks; abort the job if a rank never joins."""
    deadline = time.monotonic() + VERDICT_S
    while not request.Test():
        if time.monotonic() > deadline:
            sys.stderr.write(f"rank {_verdicts.rank}: {name}: other ranks never finished this test\n")
            sys.stderr.flush()
            _verdicts.Abort(70)
        time.sleep(1e-3)


def share_verdict(failure: str | None, name: str) -> str | None:
    """Return the lowest failing rank's account of a test, None if it passed everywhere."""
    global _verdicts
    import numpy as np
    from mpi4py import MPI

    if _verdicts is None:
        _verdicts = MPI.COMM_WORLD.Dup()
    text = (failure or "").encode()
    mine = np.array([-1 if failure is None else len(text)], np.int64)
    lengths = np.empty(_verdicts.size, np.int64)
    wait_for_all(_verdicts.Iallgather([mine, MPI.INT64_T], [lengths, MPI.INT64_T]), name)
    failed = np.flatnonzero(lengths >= 0)
    if failed.size == 0:
        return None
    first = int(failed[0])
    account = bytearray(text if _verdicts.rank == first else int(lengths[first]))
    wait_for_all(_verdicts.Ibcast([account, MPI.BYTE], first), name)
    return f"failed on rank {', '.join(map(str, failed))}; rank {first} says:\n{account.decode()}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    is_mpi = item.get_closest_marker("mpi") is not None and item.config.getoption("--with-mpi", default=False)
    # Each rank speaks once per test: when it did not get past the setup, else after the call.
    if is_mpi and (report.when == "call" or (report.when == "setup" and not report.passed)):
        account = share_verdict(report.longreprtext if report.failed else None, item.nodeid)
        if account is not None:
            report.outcome, report.longrepr = "failed", account
            if _verdicts.rank == 0:
                # At once: the summary is lost where a later test ends the job.
                sys.__stderr__.write(f"\n{item.nodeid} {account}\n")
                sys.__stderr__.flush()
    return report


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    """Rank 0 speaks for all: the verdict brings it every failure's account."""
    rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or "0"
    if config.getoption("--with-mpi", default=False) and rank != "0":
        config.pluginmanager.unregister(name="terminalreporter")


def pytest_terminal_summary(terminalreporter):
    """Add the reasons of skips to the file that launch/test shows at its end."""
    path = os.environ.get("HPCTK_SKIPS")
    if path:
        reasons = [report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", [])]
        with open(path, "a") as file:
            file.writelines(f"{' '.join(reason.split())}\n" for reason in reasons)


@pytest.fixture
def comm():
    """COMM_WORLD, for MPI tests."""
    from mpi4py import MPI

    return MPI.COMM_WORLD


@pytest.fixture
def world(comm):
    """The World of COMM_WORLD, for MPI tests."""
    import hpctk.comm.world

    return hpctk.comm.world.world(comm)


@pytest.fixture(scope="module")
def shared_folder():
    """A folder that all ranks see, for MPI tests too quick to make one each; gone after the module."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    folder = Path(comm.bcast(tempfile.mkdtemp(prefix="hpctk-tests-") if comm.rank == 0 else None))
    yield folder
    comm.barrier()
    if comm.rank == 0:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def process_group():
    """A gloo group of the job's ranks beside MPI, for MPI tests; gone, with its connections, after the module."""
    import torch.distributed as dist

    import hpctk.comm.world

    here = hpctk.comm.world.world()
    folder = here.run_on_root("making a folder", lambda: tempfile.mkdtemp(prefix="hpctk-gloo-"))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=here.rank, world_size=here.size)
    yield dist.group.WORLD
    # Not before all are done: the first to leave would cut the connections of the others.
    here.barrier("leaving gloo")
    dist.destroy_process_group()
    if here.rank == 0:
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def hvd():
    """Horovod, running, for the tests that need it; process sets may be added at any time."""
    # MPI first, so that it runs with THREAD_MULTIPLE.
    importlib.import_module("mpi4py.MPI")
    horovod = importlib.import_module("horovod.torch")
    horovod.init(process_sets="dynamic")
    return horovod


@pytest.fixture(scope="session")
def slurm():
    """A Slurm of this machine: the one that launch/test has started for all, or one of this test run's own."""
    import slurm_jobs

    if slurm_jobs.missing():
        pytest.skip(slurm_jobs.missing())
    conf = os.environ.get("SLURM_CONF", "")
    if conf.startswith("/tmp/hpctk-slurm-") and Path(conf).exists():
        yield slurm_jobs.Slurm(conf)
        return
    name, made = slurm_jobs.bring_up()
    yield made
    slurm_jobs.slurm_local("down", "--name", name)
