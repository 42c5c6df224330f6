"""Jobs that fail on Slurm: at once, with a message, and with files that the next one goes on from."""

import json
import subprocess
import sys

from jobs import mpirun, run
from slurm_jobs import digest

from hpctk.stats import read as stats

SIZE = ("--nodes", "2", "--ntasks-per-node", "1", "--time", "20")
TRAIN = ("hpctk", "train", "digits", "--epochs", "12", "--method", "mean", "--checkpoint-steps", "40")


def test_a_killed_rank_ends_the_job_and_the_next_goes_on(slurm, tmp_path):
    job = slurm.submit(tmp_path, "mpi", "killed", *SIZE, "--", *TRAIN)
    job.saves()
    job.kill_rank(1)
    # Its time limit is 20 minutes away.
    assert job.ended(60) == "FAILED", job.log()
    assert "Killed" in job.log()
    assert not (job.run / "result.json").exists()
    again = slurm.submit(tmp_path, "mpi", "killed", *SIZE, "--", *TRAIN)
    file = tmp_path / "straight.json"
    straight = run(
        mpirun(2, sys.executable, "-m", "mpi4py", "-m", *TRAIN[:-2], "--json", str(file)), timeout_s=150
    )
    assert straight.code == 0, straight.output
    assert again.ended() == "COMPLETED", again.log()
    assert "mean, resumed [" in again.log()
    assert digest(again.result()) == digest(json.loads(file.read_text()))


def test_a_cancelled_job_leaves_readable_files(slurm, tmp_path):
    words = [*TRAIN]
    words[words.index("12")] = "2000"
    job = slurm.submit(tmp_path, "mpi", "cancelled", *SIZE, "--", *words)
    job.saves()
    slurm.run("scancel", job.number)
    assert job.ended(60) == "CANCELLED", job.log()
    assert job.facts()["Restarts"] == "0"
    inspected = slurm.run(
        sys.executable, "-m", "hpctk", "checkpoint", "inspect", "runs/cancelled/checkpoints", cwd=tmp_path
    )
    assert inspected.count("whole") == 2, inspected
    (recording,) = stats.load(job.run / "stats").recordings
    assert sorted(recording.ranks) == [0, 1]
    for rank in recording.ranks.values():
        assert rank.table("calls")["sent_bytes"].size > 0
    # scancel sends SIGTERM first, which the ranks take as the request to save.
    assert "stopped by SIGTERM and saved in" in job.log()


def test_the_wrong_mpi_is_an_error_and_not_two_lonely_ranks(slurm, tmp_path):
    job = slurm.submit(tmp_path, "mpi", "lonely", *SIZE, "--mpi", "none", "--", *TRAIN)
    assert job.ended() == "FAILED", job.log()
    assert (
        "Slurm started 2 tasks in this step (SLURM_STEP_NUM_TASKS) but MPI's COMM_WORLD has 1 rank"
        in job.log()
    )
    assert "Try `srun --mpi=pmix`" in job.log()
    assert not (job.run / "result.json").exists()


def test_what_slurm_would_not_run_is_said_before_it_is_submitted(slurm, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "hpctk", "slurm", "submit", "mpi", "--nodes", "99", "--partition", "debug"],
        env=slurm.environ, cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("hpctk slurm: Slurm does not take this job: "), done.stderr
    assert "The script is runs/hpctk-mpi/job.sbatch" in done.stderr
    assert slurm.run("squeue", "-h", "--name", "hpctk-mpi") == ""
