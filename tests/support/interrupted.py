"""A training of two ranks that runs while a test does something to it, and goes on when it is started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

from jobs import ROOT, clean_environment, mpirun

#: Trains to the end and tells its digest; without an end, slowly, until somebody ends it.
LOOP = """
    import os, sys, time
    from pathlib import Path
    import hpctk
    from restarts import METHODS, Job

    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    job = Job(METHODS[sys.argv[3]]())
    checkpoints = hpctk.Checkpoints(folder / "kept", job.opt, job.model, every_steps=int(sys.argv[4]))
    kept = checkpoints.resume()
    if kept:
        job.t = kept["t"]
        job.rates.load_state_dict(kept["rates"])
    while job.t != steps:
        job.step()
        checkpoints.after_step(t=job.t, rates=job.rates)
        if steps < 0:
            (folder / f"pid-{job.opt.world.rank}").write_text(str(os.getpid()))
            time.sleep(float(sys.argv[5]))
    print("digest", job.opt.world.rank, "x", job.digest(), flush=True)
"""


def digests(output: str) -> dict:
    """Return the digests that a job printed, in any order of the ranks."""
    lines = [line[line.index("digest ") :].split() for line in output.splitlines() if "digest " in line]
    return {(rank, name): digest for _, rank, name, digest in lines}


class Running:
    """The job. Without `steps` it has no end of its own."""

    def __init__(self, folder, steps=-1, method="saef_topk", every=7, pause_s=0.05):
        folder.mkdir(exist_ok=True)
        self.folder = folder
        script = folder / "loop.py"
        script.write_text(textwrap.dedent(LOOP))
        for rank in (0, 1):
            self._pid(rank).unlink(missing_ok=True)
        words = [str(script), str(folder), str(steps), method, str(every), str(pause_s)]
        paths = f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'support'}"
        self.process = subprocess.Popen(
            mpirun(2, sys.executable, "-m", "mpi4py", *words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", stdin=subprocess.DEVNULL, start_new_session=True,
            env=clean_environment(PYTHONPATH=paths),
        )  # fmt: skip

    def _pid(self, rank):
        return self.folder / f"pid-{rank}"

    def wait_for(self, what):
        """Return once `what()` is true; AssertionError where the job ends before."""
        deadline = time.monotonic() + 90
        while not what():
            assert time.monotonic() < deadline, "it never came"
            assert self.process.poll() is None, self.process.stdout.read()
            time.sleep(0.005)

    def pid(self, rank):
        """Return the process of a rank once it trains."""
        self.wait_for(lambda: self._pid(rank).exists() and self._pid(rank).read_text())
        return int(self._pid(rank).read_text())

    def trains(self):
        """Return the job once both ranks train."""
        for rank in (0, 1):
            self.pid(rank)
        return self

    def checkpoints(self):
        """Return the whole checkpoints, the oldest first."""
        return sorted(index.parent for index in self.folder.glob("kept/*/index.json"))

    def step(self):
        """Return the step of the newest checkpoint."""
        return int(self.checkpoints()[-1].name.rpartition("-")[2])

    def ended(self, timeout_s=90):
        """Return exit code and output."""
        try:
            output, _ = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise
        return self.process.returncode, output
