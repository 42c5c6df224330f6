"""Agreement, shared errors and waiting, on real ranks."""

import time

import numpy as np
import pytest
from mpi4py import MPI

import hpctk.comm.mpi.world
import hpctk.comm.world
from hpctk.errors import MismatchError, PeerError, SettingError


def test_one_world_per_communicator(comm, world):
    assert hpctk.comm.world.world() is world
    assert hpctk.comm.world.world(comm) is world
    assert (world.rank, world.size) == (comm.rank, comm.size)


def test_freed_with_the_users_communicator(comm):
    copy = comm.Dup()
    made = hpctk.comm.world.world(copy)
    copy.Free()
    assert made.data == MPI.COMM_NULL
    assert made not in hpctk.comm.mpi.world._worlds


def test_split_communicators_have_their_own_world(comm):
    half = comm.Split(color=comm.rank % 2, key=comm.rank)
    made = hpctk.comm.world.world(half)
    assert made.size == half.size
    assert made.minimum([comm.rank, -comm.rank], "lowest rank")[0] == comm.rank % 2
    half.Free()


def test_node_split(world):
    # All ranks of this run are on one machine.
    assert world.nodes == (tuple(range(world.size)),)
    assert (world.local_rank, world.local_size) == (world.rank, world.size)


def test_agree(world):
    world.agree("things", [("lr", 0.1), ("shape", (3, 4))])


@pytest.mark.parametrize(
    ("ours", "odd", "wanted"),
    [
        ([("size", 5)], [("size", 6)], ["size is 5 on rank 0 and 6 on rank {odd}"]),
        ([("dtype of w", "float32")], [("dtype of w", "float64")], ["float32", "float64"]),
        ([("a", 1), ("b", 2)], [("b", 2), ("a", 1)], ["item 0", "'a'", "'b'"]),
        ([("a", 1), ("b", 2)], [("a", 1)], ["2 items", "1", "'b' is only on rank 0"]),
        ([], [("a", 1)], ["0 items", "'a' is only on rank {odd}"]),
        ([("lr", 0.1), ("method", "SAEF")], [("lr", 0.1), ("method", "SASG")], ["SAEF", "SASG", "method"]),
    ],
)
def test_disagreement_is_the_same_error_everywhere(world, ours, odd, wanted):
    if world.size < 2:
        pytest.skip("one rank cannot disagree")
    last = world.size - 1
    with pytest.raises(MismatchError) as caught:
        world.agree("settings", odd if world.rank == last else ours)
    text = str(caught.value)
    for part in wanted:
        assert part.format(odd=last) in text
    world.agree("the error itself", [("text", text)])


def test_shared_error(world):
    culprit = world.size - 1
    with pytest.raises(PeerError) as caught, world.shared_errors("opening the log"):
        if world.rank == culprit:
            raise FileNotFoundError("no such file: x.h5")
    assert str(caught.value) == f"opening the log failed on rank {culprit}: FileNotFoundError: no such file: x.h5"
    assert isinstance(caught.value.__cause__, FileNotFoundError) == (world.rank == culprit)


def test_no_error_is_shared_when_there_is_none(world):
    with world.shared_errors("nothing"):
        pass


def test_run_on_root(world):
    calls = []
    result = world.run_on_root("counting", lambda: calls.append(1) or {"n": 3, "of": ["a", None]})
    assert result == {"n": 3, "of": ["a", None]}
    assert len(calls) == (world.rank == 0)


def test_run_on_root_fails_everywhere(world):
    root = world.size - 1

    def fail():
        raise KeyError("lr")

    with pytest.raises(PeerError, match=f"reading failed on rank {root}: KeyError: 'lr'"):
        world.run_on_root("reading", fail, root=root)


def test_run_on_root_refuses_what_json_cannot_say(world):
    with pytest.raises(PeerError, match="TypeError"):
        world.run_on_root("odd", lambda: {1, 2})


def test_deadline_names_operation_and_rank(world, monkeypatch):
    if world.size < 2:
        pytest.skip("one rank waits for nobody")
    monkeypatch.setattr(world._watchdog, "timeout_s", 1.0)
    buffer = np.empty(1, np.uint8)
    if world.rank == 0:
        request = world.data.Irecv([buffer, MPI.BYTE], 1, 99)
        with pytest.raises(PeerError) as caught:
            world.wait([request], "a message that never comes", [1])
        assert "rank 0 of" in str(caught.value)
        assert "a message that never comes" in str(caught.value)
        assert "rank 1 did not come" in str(caught.value)
        request.Cancel()
        request.Wait()
    else:
        time.sleep(2.5)


def test_roll_call_tells_where_the_others_are(world, monkeypatch):
    if world.size < 2:
        pytest.skip("one rank waits for nobody")
    timeout = 1.0 if world.rank == 0 else 20.0
    monkeypatch.setattr(world._watchdog, "timeout_s", timeout)
    if world.rank == 0:
        request = world.data.Irecv([np.empty(1, np.uint8), MPI.BYTE], 1, 99)
        with pytest.raises(PeerError, match="rank 1 waits in the second act"):
            world.wait([request], "the first act", [1])
        request.Cancel()
        request.Wait()
    world.barrier("the second act")


def test_wrong_slurm_launch(comm, monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", str(comm.size + 3))
    copy = comm.Dup()
    with pytest.raises(SettingError) as caught:
        hpctk.comm.world.world(copy)
    wanted = "pmix" if MPI.get_vendor()[0] == "Open MPI" else "pmi2"
    assert f"--mpi={wanted}" in str(caught.value)
    assert str(comm.size + 3) in str(caught.value)


def test_right_slurm_launch(comm, monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", str(comm.size))
    copy = comm.Dup()
    assert hpctk.comm.world.world(copy).size == comm.size
    copy.Free()


def test_a_farewell_may_overtake_what_was_sent_before_it(world, monkeypatch):
    """Rank 1 is known to have left while its last message is still on its way."""
    if world.size == 1:
        pytest.skip("needs another rank")
    monkeypatch.setattr("hpctk.comm.mpi.watchdog.PATIENCE_S", 0.05)
    monkeypatch.setattr("hpctk.comm.mpi.watchdog.ANSWER_S", 0.05)
    data = np.zeros(1, np.int64)
    if world.rank == 0:
        monkeypatch.setitem(world._watchdog.left, 1, "has left the program")
        world.wait([world.control.Irecv([data, MPI.INT64_T], 1, 5)], "a late message", [1])
        assert data[0] == 7
    elif world.rank == 1:
        time.sleep(1.0)
        world.control.Send([np.array([7], np.int64), MPI.INT64_T], 0, 5)


def test_who_waits_for_a_rank_that_has_left_is_told(world, monkeypatch):
    if world.size == 1:
        pytest.skip("needs another rank")
    monkeypatch.setattr("hpctk.comm.mpi.watchdog.PATIENCE_S", 0.05)
    monkeypatch.setattr("hpctk.comm.mpi.watchdog.GRACE_S", 0.2)
    if world.rank == 0:
        monkeypatch.setitem(world._watchdog.left, 1, "has left the program")
        request = world.control.Irecv([np.zeros(1, np.int64), MPI.INT64_T], 1, 6)
        with pytest.raises(PeerError, match="rank 1 has left the program and will never come"):
            world.wait([request], "a message", [1])
        request.Cancel()
        request.Wait()
