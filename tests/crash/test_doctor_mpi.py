"""`hpctk doctor --mpi` as an MPI job: every rank looks, one speaks."""

import json
import sys

from jobs import mpirun, run

DOCTOR = (sys.executable, "-m", "mpi4py", "-m", "hpctk", "doctor", "--mpi")


def test_json_is_printed_once():
    ended = run(mpirun(2, *DOCTOR, "--json"), timeout_s=120)
    assert ended.code == 0, ended.output
    facts = json.loads(ended.output)
    assert facts["mpi"]["started"] is True
    assert (facts["mpi"]["rank"], facts["mpi"]["size"]) == (0, 2)
    assert facts["mpi"]["thread_level"] == "MULTIPLE"
    assert facts["launcher"]
    # The ranks' own probes must not have joined the job, nor waited for it.
    assert facts["horovod"].keys() == {"mpi", "gloo", "nccl", "cuda", "rocm"} or "error" in facts["horovod"]


def test_text_is_printed_once():
    ended = run(mpirun(2, *DOCTOR), timeout_s=120)
    assert ended.code == 0, ended.output
    assert ended.output.count("GPU-aware MPI") == 1
    assert "rank 0 of 2" in ended.output
    assert "no mpirun on PATH" not in ended.output
