"""What the job scripts in golden_job_scripts/ were made from; `python tests/support/slurm_cases.py` makes them anew.

Look at the difference before it is committed: it is what users get.
"""

from __future__ import annotations

from pathlib import Path

GOLDEN = Path(__file__).parent / "golden_job_scripts"

CASES = {
    "mpi": [
        "--job-name", "x; rm -rf ~", "--nodes", "3", "--ntasks-per-node", "2", "--cpus-per-task", "4", "--time",
        "1-12:30", "--partition", "batch", "--account", "it's \"ours\"", "--mail", "me@example.org", "--mem", "16G",
        "--qos", "long", "--constraint", "a&b", "--mpi", "pmi2", "--warning-s", "600", "--max-restarts", "3",
        "--module", "gcc/12", "--module", "openmpi", "--venv", "my venv", "--setup", "ulimit -l unlimited",
        "--sbatch=--exclusive", "--sbatch=--exclude=n[1-2]", "--", "hpctk", "train", "digits", "--method", "saef",
    ],
    "mpirun": [
        "--on-lost-rank", "shrink", "--run", "my runs/$(one)",
        "--", "python", "train.py", "{run}/checkpoints", "a b", "$HOME", "it's",
    ],
    "horovod": ["--gpus-per-node", "2", "--", "python", "-u", "train_horovod.py", "--folder={run}"],
    "ddp": ["--ntasks-per-node", "4", "--cpus-per-task", "3", "--", "python", "train_ddp.py", "--folder", "{run}"],
    "gpu": ["--nodes", "8", "--gpus-per-node", "2", "--ntasks-per-node", "2", "--", "./train.py", "{run}"],
    "array": [
        "--methods", "mean,saef", "--seeds", "1,2,3", "--at-once", "2", "--run", "sweep",
        "--", "hpctk", "train", "digits",
    ],
}  # fmt: skip


if __name__ == "__main__":
    import subprocess
    import sys

    for kind, words in CASES.items():
        command = [sys.executable, "-m", "hpctk", "slurm", "render", kind, "--site", "/dev/null", *words]
        (GOLDEN / f"{kind}.sbatch").write_text(subprocess.check_output(command, text=True))
