"""Near the time limit: the ranks save, the job goes back into the queue, and ends as if nothing had happened."""

import sys

from slurm_jobs import SIZE, digest, training

from hpctk.stats import read as stats


def requeued(slurm, folder, name, method, kind="mpi"):
    """Return a job that was asked to save and went back into the queue."""
    job = slurm.submit(folder, kind, name, *SIZE, "--", *training(method))
    job.saves()
    job.ask_to_save()
    job.wait_for(lambda: job.facts()["Restarts"] == "1")
    return job


def check(job, expected):
    """Wait for its end, and compare with what it would have come to without."""
    assert job.ended() == "COMPLETED", job.log()
    log = job.log()
    # One log for both attempts.
    assert log.index("restart 0 of") < log.index("USR1: the ranks are asked to save") < log.index("restart 1 of")
    assert "stopped by SIGUSR2 and saved in" in log
    assert "status 85: back into the queue" in log
    assert ", resumed [" in log
    # Statistics of both attempts, of both ranks, in the run's folder.
    recordings = stats.load(job.run / "stats").recordings
    assert [sorted(one.ranks) for one in recordings] == [[0, 1], [0, 1]]
    restarts = [one.ranks[0].environment["SLURM_RESTART_COUNT"] for one in recordings[1:]]
    assert restarts == ["1"]
    # Nothing is lost of the attempt that was stopped: together they have every step.
    assert [one.ranks[0].attributes["state"] for one in recordings] == ["closed", "closed"]
    (method,) = job.result()["methods"].values()
    for rank in (0, 1):
        steps = [step for one in recordings for step in one.ranks[rank].table("steps")["step"].tolist()]
        assert steps == list(range(method["ranks"][rank]["steps"]))
    report = job.slurm.run(sys.executable, "-m", "hpctk", "report", str(job.run))
    assert "MISSING" not in report, report
    assert job.result()["ranks"] == 2
    assert digest(job.result()) == expected


def test_a_requeued_job_ends_bit_for_bit_the_same(slurm, tmp_path, trained):
    # The name is only a name for the shell, sbatch and the file system; while the job waits, the other one trains.
    job = requeued(slurm, tmp_path, "x; rm -rf ~", "saef")
    check(job, trained())
    assert f"log         x; rm -rf ~-{job.number}.out\n" in job.said
    assert "restart 0 of at most 20" in job.log()
    assert job.facts()["NodeList"].startswith("n[")


def test_no_restart_is_left(slurm, tmp_path):
    job = slurm.submit(tmp_path, "mpi", "last", *SIZE, "--max-restarts", "0", "--", *training("mean", 500))
    job.saves()
    job.ask_to_save()
    assert job.ended() == "FAILED", job.log()
    assert job.facts()["ExitCode"] == "85:0"
    assert job.facts()["Restarts"] == "0"
    assert "no restart is left; submitted again, it goes on from runs/last" in job.log()
