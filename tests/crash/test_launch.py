"""launch/mpirun and launch/horovodrun for real, on whichever MPI this environment holds."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jobs import ROOT, clean_environment, run

from hpctk.launch.horovodrun import mpi_kind

BIN = Path(sys.executable).parent
KIND = mpi_kind(str(BIN / "mpirun"))
HAS_HOROVOD = (BIN / "horovodrun").exists()
needs_horovod = pytest.mark.skipif(
    not HAS_HOROVOD,
    reason="Horovod is built for Open MPI here"
    if KIND == "mpich"
    else "not installed: Horovod (./launch/setup --with-horovod)",
)

#: One write per rank, so that no line is torn.
TELL = """
import sys
from mpi4py import MPI
text = f"rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size} {sys.argv[1:]}"
print(text + chr(10), end="", flush=True)
"""
TELL_HOROVOD = """
import sys
import torch
import horovod.torch as hvd
from mpi4py import MPI
hvd.init()
total = int(hvd.allreduce(torch.tensor([hvd.rank() + 1]), op=hvd.Sum))
multiple = MPI.Query_thread() == MPI.THREAD_MULTIPLE
print(f"rank {hvd.rank()} of {hvd.size()} total {total} {multiple} {sys.argv[1:]}" + chr(10), end="", flush=True)
"""
#: One rank leaves with a status of its own, the others wait for it.
LEAVE = """
import sys
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1:
    sys.exit(7)
MPI.COMM_WORLD.Barrier()
"""
ODD = ["a b", "*", "$HOME", "it's", '"', ""]


def wrapper(name, *words, **environ):
    return run([str(ROOT / "launch" / name), *words], HPCTK_VENV=sys.prefix, **environ)


@pytest.fixture
def script(tmp_path):
    def write(text):
        (tmp_path / "program.py").write_text(text)
        return str(tmp_path / "program.py")

    return write


def test_mpirun_starts_ranks_and_keeps_arguments(script):
    ended = wrapper("mpirun", "-n", "3", "python", script(TELL), *ODD)
    assert ended.code == 0, ended.output
    assert sorted(ended.output.splitlines()) == [f"rank {rank} of 3 {ODD}" for rank in range(3)]


def test_mpirun_gives_the_status_of_a_rank_that_leaves(script):
    ended = wrapper("mpirun", "-n", "3", script(LEAVE))
    assert ended.code == 7, ended.output


def test_mpirun_prints_a_line_that_works_when_pasted(script, tmp_path):
    mark = tmp_path / "was run"
    program = script(f"open({str(mark)!r}, 'a').close()\n{TELL}")
    # A shell in which the environment is not active.
    bare = {"PATH": "/usr/bin:/bin", "VIRTUAL_ENV": ""}
    printed = wrapper("mpirun", "--print", "-n", "2", "python", program, *ODD, **bare)
    assert printed.code == 0, printed.output
    assert printed.output.count("\n") == 1
    assert f"{sys.prefix}/bin/mpirun" in printed.output
    assert not mark.exists()
    pasted = run(["sh", "-c", printed.output], **bare)
    assert pasted.code == 0, pasted.output
    assert sorted(pasted.output.splitlines()) == [f"rank {rank} of 2 {ODD}" for rank in range(2)]
    assert mark.exists()


def test_mpirun_is_replaced_so_that_signals_arrive(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import os, time\n"
        "from mpi4py import MPI\n"
        f"open(f'{tmp_path}/{{MPI.COMM_WORLD.rank}}.pid', 'w').write(str(os.getpid()))\n"
        "MPI.COMM_WORLD.Barrier()\n"
        f"open(f'{tmp_path}/{{MPI.COMM_WORLD.rank}}.ready', 'w').close()\n"
        "time.sleep(120)\n"
    )
    job = subprocess.Popen(
        [ROOT / "launch" / "mpirun", "-n", "2", program],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env=clean_environment(HPCTK_VENV=sys.prefix), start_new_session=True,
    )  # fmt: skip
    try:
        wait_for(lambda: all((tmp_path / f"{rank}.ready").exists() for rank in range(2)))
        pids = [int((tmp_path / f"{rank}.pid").read_text()) for rank in range(2)]
        # To this process alone, not to its group.
        os.kill(job.pid, signal.SIGTERM)
        assert job.wait(timeout=60) != 0
        wait_for(lambda: not any(alive(pid) for pid in pids))
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.parametrize("name", ["mpirun", "horovodrun"])
def test_help_and_misuse(name):
    helped = wrapper(name, "--help")
    assert helped.code == 0
    for words in (f"usage: hpctk {name}", "--print", "--plain", "openmpi5", "examples:"):
        assert words in helped.output
    assert wrapper(name).code == 2
    wrong = wrapper(name, "--mpi=lam", "-n", "2", "true")
    assert wrong.code == 2
    assert "--mpi 'lam'" in wrong.output
    nowhere = run([str(ROOT / "launch" / name), "true"], HPCTK_VENV="/nowhere")
    assert nowhere.code == 2
    assert "HPCTK_VENV='/nowhere'" in nowhere.output


@needs_horovod
def test_horovodrun_starts_ranks_and_keeps_arguments(script):
    ended = wrapper("horovodrun", "-np", "3", "python", script(TELL_HOROVOD), *ODD)
    assert ended.code == 0, ended.output
    for rank in range(3):
        assert f"rank {rank} of 3 total 6 True {ODD}" in ended.output


@needs_horovod
def test_horovodrun_gives_the_status_of_a_rank_that_leaves(script):
    ended = wrapper("horovodrun", "-np", "3", script(LEAVE))
    assert ended.code == 7, ended.output


@needs_horovod
def test_horovodrun_prints_and_runs_nothing(script, tmp_path):
    mark = tmp_path / "was run"
    printed = wrapper("horovodrun", "--print", "-np", "2", script(f"open({str(mark)!r}, 'w').close()"))
    assert printed.code == 0, printed.output
    assert printed.output.count("\n") == 1
    assert ("--binding-args" in printed.output) == (KIND == "openmpi5")
    assert not mark.exists()


@needs_horovod
def test_horovodrun_refuses_gloo():
    ended = wrapper("horovodrun", "--gloo", "-np", "2", "true")
    assert ended.code == 2
    assert "--gloo" in ended.output


@pytest.mark.parametrize("name", ["mpirun", "horovodrun"])
def test_an_environment_without_hpctk_is_said(tmp_path, name):
    ended = run(
        [str(ROOT / "launch" / name), "-np", "2", "true"],
        HPCTK_VENV=str(tmp_path), PATH="/usr/bin:/bin", VIRTUAL_ENV="",
    )  # fmt: skip
    assert ended.code != 0
    assert "HPCTK_VENV" in ended.output
    assert "launch/setup" in ended.output


@pytest.mark.skipif(KIND != "mpich", reason="about MPICH")
def test_horovodrun_refuses_mpich():
    ended = wrapper("horovodrun", "-np", "2", "true")
    assert ended.code == 2
    assert "mpirun is MPICH" in ended.output


def test_getting_lost_ranks_back_needs_open_mpi_5():
    ended = wrapper("mpirun", "--respawn", "1", "-n", "2", "true")
    if KIND == "openmpi5":
        assert ended.code == 0, ended.output
        return
    assert ended.code == 2
    assert "--respawn needs Open MPI 5" in ended.output


@pytest.mark.parametrize(
    "command",
    [[ROOT / "launch" / "mpirun"], [BIN / "hpctk", "mpirun"], [sys.executable, "-m", "hpctk", "mpirun"]],
    ids=["launch/mpirun", "hpctk mpirun", "python -m hpctk mpirun"],
)
def test_ranks_may_use_all_cores_unless_bound(script, command):
    program = script("import os; print(len(os.sched_getaffinity(0)), flush=True)")
    for options, cores in (([], len(os.sched_getaffinity(0))), (["--bind-to", "core"], 1)):
        words = [*map(str, command), *options, "-n", "1", program]
        ended = run(words, HPCTK_VENV=sys.prefix)
        assert ended.output == f"{cores}\n"


#: Passes for ssh: the other host is this one, and has nothing of the environment.
AGENT = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
shift
exec env -i HOME="$HOME" PATH=/usr/bin:/bin sh -c "$*"
"""


@pytest.mark.skipif(KIND not in ("openmpi5", "openmpi4"), reason="only Open MPI has to be told")
@pytest.mark.parametrize("typed", [[], ["-x", "OTHER=3"]], ids=["", "-x"])
def test_variables_arrive_on_another_host(script, tmp_path, typed):
    program = script("import os; print(os.environ['HPCTK_PROGRESS'], os.environ.get('OTHER'), flush=True)")
    agent = tmp_path / "agent"
    agent.write_text(AGENT)
    agent.chmod(0o755)
    name = ["--prtemca", "plm_ssh_agent"] if KIND == "openmpi5" else ["--mca", "plm_rsh_agent"]
    words = [*name, str(agent), *typed, "-n", "1", "-H", "127.0.0.2:1", program]
    ended = wrapper("mpirun", *words, HPCTK_PROGRESS="lines")
    assert ended.code == 0, ended.output
    # On a busy machine mpirun warns of an agent that has begun before it could be given a group: "setpgid failed".
    said = [line for line in ended.output.splitlines() if "setpgid" not in line]
    assert said == [f"lines {'3' if typed else None}"]


def test_what_a_killed_mpirun_of_the_same_number_has_left_is_no_obstacle(tmp_path):
    """Open MPI 5 does not start where a folder named after its process is there already."""
    left = 'mkdir "$TMPDIR/ompi.$$"; touch "$TMPDIR/ompi.$$/left"; LEFT=$TMPDIR/ompi.$$/left exec "$@"'
    words = ["mpirun", "--plain", "-n", "1", "sh", "-c", 'test ! -e "$LEFT" && echo gone']
    ended = run(["sh", "-c", left, "sh", sys.executable, "-m", "hpctk", *words], TMPDIR=str(tmp_path))
    assert ended.code == 0, ended.output
    assert "gone" in ended.output
