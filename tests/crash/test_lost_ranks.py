"""One rank fails in every way a rank can fail; the job must end, soon, and say who and where."""

import pytest
from jobs import run_ranks

#: Ranks 0 and 2 wait in a collective; rank 1 does what the test says instead.
PROGRAM = """
    import os, signal, sys, time
    from hpctk.comm.world import world
    here = world()

    def misbehave():
        {deed}

    if here.rank == 1:
        misbehave()
    else:
        here.barrier("the meeting")
"""


#: Seconds for a job to start and to end where cores are shared; HPCTK_TIMEOUT_S is 60 unless a test says otherwise.
SOON_S = 30


def crash(deed, tmp_path, *python, timeout_s="60"):
    return run_ranks(3, PROGRAM.format(deed=deed), tmp_path, *python, HPCTK_TIMEOUT_S=timeout_s)


@pytest.mark.parametrize("python", [("-m", "mpi4py"), ("-m", "hpctk", "run"), ("-u",)], ids=" ".join)
def test_raising(tmp_path, python):
    ended = crash("raise ValueError('no such batch')", tmp_path, *python)
    assert ended.code != 0
    assert ended.seconds < SOON_S
    assert "rank 1 of 3" in ended.output
    assert "in misbehave" in ended.output
    assert "ValueError: no such batch" in ended.output


def test_exit_code_under_mpi4py(tmp_path):
    ended = crash("sys.exit(3)", tmp_path)
    assert ended.code == 3
    assert ended.seconds < SOON_S
    assert "rank 1" in ended.output or "process 1" in ended.output


def test_exit_code_with_its_traceback(tmp_path):
    ended = crash("sys.exit(3)", tmp_path, "-m", "hpctk", "run")
    assert ended.code == 3
    assert ended.seconds < SOON_S
    assert "rank 1 of 3" in ended.output
    assert "in misbehave" in ended.output
    assert "SystemExit: 3" in ended.output


@pytest.mark.parametrize(
    "python",
    [
        ("-m", "mpi4py"),
        pytest.param(("-m", "hpctk", "run"), marks=pytest.mark.full),
        pytest.param(("-u",), marks=pytest.mark.full),
    ],
    ids=" ".join,
)
def test_returning_early(tmp_path, python):
    ended = crash("return", tmp_path, *python)
    assert ended.code != 0
    assert ended.seconds < SOON_S
    assert "waits in the meeting, but rank 1 has left the program" in ended.output
    assert "Traceback" in ended.output


@pytest.mark.parametrize("deed", ["time.sleep(1000)", pytest.param("while True: pass", marks=pytest.mark.full)])
def test_never_arriving(tmp_path, deed):
    ended = crash(deed, tmp_path, timeout_s="4")
    assert ended.code != 0
    assert ended.seconds < 4 + SOON_S
    assert "waited 4 s in the meeting" in ended.output
    assert "rank 1 did not come" in ended.output
    assert "rank 1 (pid" in ended.output
    assert "in misbehave" in ended.output


def test_killed(tmp_path):
    ended = crash("os.kill(os.getpid(), signal.SIGKILL)", tmp_path)
    assert ended.code != 0
    assert ended.seconds < SOON_S


def test_never_starting_to_use_hpctk(tmp_path):
    ended = run_ranks(
        3,
        """
        import time
        from mpi4py import MPI
        if MPI.COMM_WORLD.rank == 2:
            time.sleep(1000)
        from hpctk.comm.world import world
        world()
        """,
        tmp_path,
        HPCTK_TIMEOUT_S="3",
    )
    assert ended.code != 0
    assert ended.seconds < 3 + SOON_S
    assert "missing: rank 2" in ended.output


def test_leaving_at_different_times_is_no_error(tmp_path):
    ended = run_ranks(
        3,
        """
        import time
        from hpctk.comm.world import world
        here = world()
        time.sleep(2.5 * here.rank)
        """,
        tmp_path,
    )
    assert ended.code == 0, ended.output
    assert ended.output == ""


#: Rank 1 gives up a broadcast, which rank 0 sends all the same, later.
LATE = """
    import os, time
    import numpy as np
    from mpi4py import MPI
    from hpctk.comm.world import world
    from hpctk.errors import PeerError

    here, n = world(), 300_000
    if here.rank == 0:
        time.sleep(4)
        here.control.Ibcast([bytearray(b"x" * n), MPI.BYTE], 0).Wait()
        MPI.COMM_WORLD.recv(source=1)
    else:
        try:
            here._broadcast(bytearray(n), 0, "a broadcast")
        except PeerError:
            print("gave up", flush=True)
        mine = [np.zeros(n, np.uint8) for _ in range(50)]
        end = time.monotonic() + 4
        while time.monotonic() < end:
            MPI.COMM_WORLD.Iprobe()
            time.sleep(1e-3)
        print("overwritten:", sum(int(one.any()) for one in mine), flush=True)
        MPI.COMM_WORLD.send("seen", 0)
    # Not by hpctk, which would meet at the end.
    os._exit(0)
"""


def test_what_comes_too_late_overwrites_nothing(tmp_path):
    ended = run_ranks(2, LATE, tmp_path, HPCTK_TIMEOUT_S="2")
    assert "gave up" in ended.output
    assert "overwritten: 0" in ended.output, ended.output
