"""The emulated cluster of `hpctk cluster`: what runs on it, and that nothing stays behind.

Every cluster here has a name of its own, and only that name is looked for afterwards: other clusters may
be up on the same machine.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from pathlib import Path

import pytest
from emulated_cluster import CLUSTER, ROOT, TIMEOUT_S, cluster, environment, needs_cluster, succeed


def leftovers(name, marker):
    """List what still exists of a cluster, and every process whose command line has the marker."""
    found = [*Path("/run").glob(f"netns/hpctk-{name}-*"), *Path("/run").glob(f"hpctk-cluster-{name}")]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line = (process / "cmdline").read_bytes()
        except OSError:  # it has just ended
            continue
        if marker.encode() in line or f"hpctk-cluster-{name}/".encode() in line:
            found.append(f"process {process.name}: {line!r}")
    return found


@pytest.fixture
def fresh_name():
    name = "t" + uuid.uuid4().hex[:12]
    yield name
    cluster("down", "--name", name)


@pytest.fixture(scope="module")
def three_hosts():
    name = "t" + uuid.uuid4().hex[:12]
    succeed("up", 3, "--name", name)
    yield name
    succeed("down", "--name", name)


def wait_for(path):
    deadline_s = time.monotonic() + TIMEOUT_S
    while not path.exists() or not path.read_text().endswith("\n"):
        assert time.monotonic() < deadline_s, f"{path} was never written"
        time.sleep(0.05)
    return path.read_text().strip()


# Says on which cluster it runs, then outlives everything but a signal. `tail` and not `sleep`, because the
# file's name has to stay in the command line, where `leftovers` looks for it.
STAY = """
test "${OMPI_COMM_WORLD_RANK:-0}" != 0 || echo "$HPCTK_CLUSTER_NAME" > "$0"
exec tail -F "$0" > /dev/null 2>&1
"""

HELLO = """
from mpi4py import MPI
import os, socket
world = MPI.COMM_WORLD
shared = world.Split_type(MPI.COMM_TYPE_SHARED).size
line = f"{world.rank} {world.size} {socket.gethostname()} {shared} {os.environ['OMPI_MCA_btl']}"
lines = world.gather(line)
if world.rank == 0:
    print(*lines, sep="\\n")
"""


@needs_cluster
def test_up_run_down_leaves_nothing(fresh_name, tmp_path):
    marker = str(tmp_path / "name")
    assert "2 hosts" in succeed("up", 2, "--name", fresh_name)
    assert succeed("run", "--name", fresh_name, "--host", 1, "--", "hostname") == "h1\n"
    status = succeed("status", "--name", fresh_name)
    assert "h0  198.18.0.1" in status
    assert "h1  198.18.0.2" in status
    # A process that goes on after its command has ended is what `down` is for.
    succeed("run", "--name", fresh_name, "--host", 0, "--", "sh", "-c", f"({STAY}) &", marker)
    assert wait_for(Path(marker)) == fresh_name
    assert any("process" in str(item) for item in leftovers(fresh_name, marker))
    succeed("down", "--name", fresh_name)
    assert leftovers(fresh_name, marker) == []
    assert cluster("status", "--name", fresh_name).returncode == 1
    succeed("down", "--name", fresh_name)


@needs_cluster
def test_second_up_is_refused_and_harms_nothing(three_hosts):
    refused = cluster("up", 2, "--name", three_hosts)
    assert refused.returncode == 1
    assert f"hpctk cluster down --name {three_hosts}" in refused.stderr
    assert "3 hosts" in succeed("status", "--name", three_hosts)


@needs_cluster
def test_ranks_are_on_hosts_of_their_own(three_hosts):
    lines = succeed("run", "--name", three_hosts, "--", "python", "-m", "mpi4py", "-c", HELLO).splitlines()
    assert lines == [f"{rank} 3 h{rank} 1 tcp,self" for rank in range(3)]


@needs_cluster
def test_ranks_on_one_host_share_memory(three_hosts):
    job = ["-n", 6, "--", "python", "-m", "mpi4py", "-c", HELLO]
    lines = succeed("run", "--name", three_hosts, *job).splitlines()
    assert lines == [f"{rank} 6 h{rank % 3} 2 tcp,sm,self" for rank in range(6)]


@needs_cluster
def test_arguments_environment_and_folder_arrive_unchanged(three_hosts):
    awkward = ["", "two words", "$HOME", "it's", 'a "quoted" line\nand another', "*"]
    show = "import os, sys; print([sys.argv[1:], os.environ['HPCTK_CLUSTER_HOSTS'], os.getcwd()])"
    expected = f"{[awkward, '3', str(Path.cwd())]}\n"
    assert succeed("run", "--name", three_hosts, "--host", 2, "--", "python", "-c", show, *awkward) == expected
    assert succeed("run", "--name", three_hosts, "-n", 1, "--", "python", "-c", show, *awkward) == expected


@needs_cluster
def test_mpirun_arguments_overrule_ours(three_hosts):
    show = ["--", "printenv", "OMPI_MCA_btl"]
    assert succeed("run", "--name", three_hosts, "-n", 1, "--mpirun-args", "--mca btl self", *show) == "self\n"


@needs_cluster
def test_exit_status_is_the_commands(three_hosts):
    assert cluster("run", "--name", three_hosts, "--host", 1, "--", "sh", "-c", "exit 5").returncode == 5
    one_rank = 'test "$OMPI_COMM_WORLD_RANK" != 1 || exit 7'
    assert cluster("run", "--name", three_hosts, "--", "sh", "-c", one_rank).returncode == 7
    assert cluster("with", 2, "--", "sh", "-c", one_rank).returncode == 7
    assert cluster("with", 1, "--host", 0, "--", "true").returncode == 0


@needs_cluster
def test_ranks_that_end_at_once_do_not_hang_the_job(three_hosts):
    for _ in range(10):
        succeed("run", "--name", three_hosts, "--", "true")


@needs_cluster
def test_rate_limits_a_link():
    # Only a lower bound: a busy machine makes it slower, nothing may make it faster.
    send = """
from mpi4py import MPI
import numpy as np
world = MPI.COMM_WORLD
message = np.zeros(4_000_000, np.uint8)
world.Barrier()
start = MPI.Wtime()
if world.rank == 0:
    world.Send(message, 1)
else:
    world.Recv(message, 0)
    print(MPI.Wtime() - start)
"""
    elapsed_s = float(succeed("with", 2, "--rate", "50mbit", "--", "python", "-m", "mpi4py", "-c", send))
    assert elapsed_s >= 0.8 * 4_000_000 * 8 / 50e6


@needs_cluster
@pytest.mark.parametrize("mpi", [True, False], ids=["with mpirun", "without"])
@pytest.mark.parametrize("to_group", [True, False], ids=["ctrl-c", "sigterm"])
def test_interrupted_with_leaves_nothing(tmp_path, to_group, mpi):
    marker = tmp_path / "name"
    place = [] if mpi else ["--host", "1"]
    process = subprocess.Popen(
        # A runner in the background may have SIGINT ignored, and a shell cannot undo that.
        ["env", "--default-signal=INT", CLUSTER, "with", "2", *place, "--", "sh", "-c", STAY, marker],
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    name = wait_for(marker)
    assert leftovers(name, str(marker)) != []
    if to_group:
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.terminate()
    assert process.wait(TIMEOUT_S) == (130 if to_group else 143)
    assert leftovers(name, str(marker)) == []


@needs_cluster
@pytest.mark.parametrize("delay_s", [0.01, 0.05, 0.1])
def test_interrupted_up_leaves_all_or_nothing(fresh_name, delay_s):
    process = subprocess.Popen(
        [CLUSTER, "up", "16", "--name", fresh_name], env=environment(), stderr=subprocess.DEVNULL
    )
    time.sleep(delay_s)
    process.terminate()
    if process.wait(TIMEOUT_S) != 0:
        # No marker: a subshell of `up` itself may need a moment longer to end than `up`.
        assert leftovers(fresh_name, "no process has this in its command line") == []
    else:
        assert "16 hosts" in succeed("status", "--name", fresh_name)


@needs_cluster
def test_down_after_mpirun_was_killed(fresh_name, tmp_path):
    marker = tmp_path / "name"
    succeed("up", 2, "--name", fresh_name)
    # `run` becomes mpirun, so its process is the one to kill; the ranks will not go by themselves.
    process = subprocess.Popen(
        [CLUSTER, "run", "--name", fresh_name, "--", "sh", "-c", f"trap '' TERM; {STAY}", marker],
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for(marker)
    process.kill()
    process.wait(TIMEOUT_S)
    assert any("process" in str(item) for item in leftovers(fresh_name, str(marker)))
    succeed("down", "--name", fresh_name)
    assert leftovers(fresh_name, str(marker)) == []


@needs_cluster
def test_hosts_that_disappear_are_survived(fresh_name, tmp_path):
    """One whose processes die, and one whose link is down: of that only MPI's heartbeats tell the others."""
    detector = "--mca mpi_ft_detector true --mca mpi_ft_detector_period 0.5 --mca mpi_ft_detector_timeout 5"
    words = ["-n", "6", "--with-ft", "--mpirun-args", detector, "--", "python", "-m", "mpi4py"]
    program = [str(ROOT / "tests" / "crash" / "lost_host.py"), str(tmp_path)]
    succeed("up", 3, "--name", fresh_name)
    job = subprocess.Popen(
        [CLUSTER, "run", "--name", fresh_name, *words, *program],
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert [wait_for(tmp_path / str(rank)) for rank in (0, 3)] == ["2 left, 50 steps"] * 2
    finally:
        # It waits for the host that it cannot reach: docs/faults.md.
        job.kill()
        job.wait(TIMEOUT_S)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["up"], "number of hosts ''"),
        (["up", "0"], "1 to 64"),
        (["up", "65"], "1 to 64"),
        (["up", "two"], "number of hosts 'two'"),
        (["up", "2", "3"], "unexpected '3'"),
        (["up", "2", "--rate", "fast"], "--rate 'fast'"),
        (["up", "2", "--rate", "0mbit"], "1mbit to 100gbit"),
        (["up", "2", "--rate=1.5gbit"], "1mbit to 100gbit"),
        (["up", "2", "--rate"], "--rate needs a value"),
        (["up", "2", "--name", "a-b"], "--name 'a-b'"),
        (["up", "2", "--nmae", "a"], "unknown option '--nmae'; known here: --rate --name"),
        (["run"], "nothing to run"),
        (["run", "hostname"], "goes after --"),
        (["run", "-n", "0", "--", "true"], "-n '0'"),
        (["run", "--host", "-1", "--", "true"], "--host '-1'"),
        (["run", "--host", "0", "-n", "2", "--", "true"], "without MPI"),
        (["run", "--host", "0", "--with-ft", "--", "true"], "without MPI"),
        (["fly"], "known: up run with status down"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_arguments_are_named(arguments, complaint):
    done = cluster(*arguments)
    assert done.returncode == 2
    assert complaint in done.stderr


@needs_cluster
def test_hosts_and_clusters_that_are_not_there_are_named(three_hosts):
    outside = cluster("run", "--name", three_hosts, "--host", 3, "--", "true")
    assert outside.returncode == 2
    assert "hosts 0 to 2" in outside.stderr
    absent = cluster("run", "--name", "absent", "--", "true")
    assert absent.returncode == 1
    assert "hpctk cluster up N --name absent" in absent.stderr


def test_help_shows_examples():
    assert "hpctk cluster with 4 -- python -m mpi4py train.py" in succeed("--help")
    assert succeed("up", "--help") == succeed("--help")


@needs_cluster
def test_without_root_it_says_so_and_exits_77():
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        # The script itself: somebody else may not be able to read the environment.
        copy = shutil.copy(ROOT / "hpctk" / "launch" / "cluster.sh", folder)
        environ = {"PATH": os.environ["PATH"], "HPCTK_VENV": folder}
        done = subprocess.run(
            ["bash", copy, "up", "2"], cwd="/", user=65534, env=environ, capture_output=True, text=True
        )
    assert done.returncode == 77
    assert "need root" in done.stderr
