"""Checkpoints from one job to the next: new processes, signals, ranks that are killed, disks that are full."""

import os
import signal
import subprocess

import pytest
from interrupted import Running, digests
from jobs import ROOT, run_ranks
from restarts import METHODS
from small_disk import mounted

PATHS = f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'support'}"

#: All methods, one after the other: the whole way and, anew, its first half; or its second half.
PARTS = """
    from pathlib import Path
    from restarts import METHODS, Job

    for name, method in METHODS.items():
        kept = Path({folder!r}) / name

        def job():
            return Job(method(), adam="saef" in name)

        def tell(job):
            print("digest", job.opt.world.rank, name, job.digest(), flush=True)

        if {second}:
            going_on = job()
            going_on.load(kept)
            going_on.train(10)
            tell(going_on)
        else:
            straight = job()
            straight.train(20)
            tell(straight)
            half = job()
            half.train(10)
            half.save(kept)
"""


def test_ten_steps_and_ten_in_new_processes_are_twenty(tmp_path):
    seen = []
    for second in (False, True):
        program = PARTS.format(folder=str(tmp_path), second=second)
        ended = run_ranks(2, program, tmp_path, timeout_s=180, PYTHONPATH=PATHS)
        assert ended.code == 0, ended.output
        seen.append(digests(ended.output))
    assert len(seen[0]) == 2 * len(METHODS)
    assert seen[1] == seen[0]


STEPS = 300


SIGNALS = {"a rank": signal.SIGTERM, "mpirun": signal.SIGUSR2}


@pytest.mark.parametrize(
    ("told", "killed"),
    [(["a rank"], [[0, 1]]), pytest.param(["mpirun", "a rank"], [[1], [0, 1]], marks=pytest.mark.full)],
)
def test_signals_and_killed_ranks_lose_nothing(tmp_path, told, killed):
    """Interrupted in several ways, one after the other: the end is that of a run that nobody disturbed."""
    code, output = Running(tmp_path / "straight", STEPS).ended()
    assert code == 0, output
    wanted = digests(output)
    home = tmp_path / "interrupted"
    for whom in told:
        job = Running(home)
        os.kill(job.pid(1) if whom == "a rank" else job.trains().process.pid, SIGNALS[whom])
        code, output = job.ended()
        assert code == 85, output
        saved = job.checkpoints()[-1]
        assert f"stopped by {SIGNALS[whom].name} and saved in {saved}" in output
    for ranks in killed:
        job = Running(home)
        before = job.checkpoints()[-1]
        pids = [job.pid(rank) for rank in ranks]
        job.wait_for(lambda job=job, before=before: job.checkpoints()[-1] != before)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        code, output = job.ended()
        assert code not in (0, 85), output
        assert job.checkpoints()
    assert job.step() < STEPS, "nothing was left to do: the test shows nothing"
    code, output = Running(home, STEPS).ended()
    assert code == 0, output
    assert digests(output) == wanted


#: Saves a first checkpoint, fills the disk, and tries again: with a look at the room there is, and without.
FULL = """
    import os
    from pathlib import Path
    import torch, hpctk
    from hpctk.checkpoint import folder, rank_file

    home = Path({home!r})
    model = torch.nn.Linear(200, 100)
    opt = hpctk.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), hpctk.Mean(), model=model)
    first = hpctk.save_checkpoint(home, opt, model)
    if opt.world.rank == 0:
        filler, length = os.open(home / "filler", os.O_WRONLY | os.O_CREAT), 0
        try:
            while True:
                length += os.write(filler, bytes(4096))
        except OSError:
            os.ftruncate(filler, length - 16384)
    opt.world.barrier()
    looked = rank_file.check_room
    for look in (looked, lambda *words: None):
        rank_file.check_room = look
        try:
            hpctk.save_checkpoint(home, opt, model)
        except hpctk.HpctkError as error:
            print("refused:", error, flush=True)
        opt.world.barrier()
        assert folder.complete(home) == [first], "the first checkpoint is not alone"
        assert not list(home.glob("**/*.partial")), "half a file was left"
        hpctk.load_checkpoint(home, opt, model)
    hpctk.save_checkpoint(home, opt, model)
"""


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 1 MB."""
    with mounted(tmp_path / "disk", "1m") as disk:
        yield disk


def test_a_full_disk(tmp_path, small_disk):
    program = FULL.format(home=str(small_disk / "kept"))
    ended = run_ranks(2, program, tmp_path, PYTHONPATH=PATHS)
    # The last save is not caught, and ends the job.
    assert ended.code != 0
    assert ended.output.count("MB are free on that disk") == 2
    # As if the room had gone after it was looked for: HDF5 itself meets the end of the disk.
    assert ended.output.count("refused:") == 4
    assert "No space left on device" in ended.output
    assert "AssertionError" not in ended.output


READ_ONLY = """
    import torch, hpctk
    model = torch.nn.Linear(2, 2)
    opt = hpctk.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), hpctk.Mean(), model=model)
    hpctk.Checkpoints({home!r}, opt, model)
"""


def test_a_folder_that_cannot_be_written(tmp_path, small_disk):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    ended = run_ranks(2, READ_ONLY.format(home=str(small_disk / "kept")), tmp_path, PYTHONPATH=PATHS)
    assert ended.code != 0
    assert "keeping checkpoints in" in ended.output
    assert "Read-only file system" in ended.output
