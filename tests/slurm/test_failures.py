"""Jobs that fail on Slurm: at once, with a message, and with files that the next one goes on from."""

import subprocess
import sys

from slurm_jobs import SIZE, digest, training

from hpctk.stats import read as stats


def test_a_killed_rank_ends_the_job_and_the_next_goes_on(slurm, tmp_path, trained):
    job = slurm.submit(tmp_path, "mpi", "killed", *SIZE, "--", *training())
    job.saves()
    job.kill_rank(1)
    # Its time limit is 20 minutes away.
    assert job.ended(60) == "FAILED", job.log()
    assert "Killed" in job.log()
    assert not (job.run / "result.json").exists()
    again = slurm.submit(tmp_path, "mpi", "killed", *SIZE, "--", *training())
    assert again.ended() == "COMPLETED", again.log()
    assert "saef, resumed [" in again.log()
    assert digest(again.result()) == trained()


def test_a_cancelled_job_leaves_readable_files(slurm, tmp_path):
    job = slurm.submit(tmp_path, "mpi", "cancelled", *SIZE, "--", *training("mean", 2000))
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
    job = slurm.submit(tmp_path, "mpi", "lonely", *SIZE, "--mpi", "none", "--", *training("mean"))
    assert job.ended() == "FAILED", job.log()
    assert "Slurm started 2 tasks in this step (SLURM_STEP_NUM_TASKS) but MPI's COMM_WORLD has 1 rank" in job.log()
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
