"""launch/slurm-local: what it starts, what it refuses, and that nothing stays behind.

Every instance here has a name of its own, and only that name is looked for afterwards: others may be up.
"""

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from pathlib import Path

import pytest
from jobs import ROOT, clean_environment
from slurm_jobs import LOCAL, Slurm, missing, slurm_local

needs_slurm = pytest.mark.skipif(bool(missing()), reason=missing())


def folder_of(name):
    return Path(f"/tmp/hpctk-slurm-{os.geteuid()}-{name}")


def leftovers(name):
    """List what still exists of an instance: its folder, its daemons, and what its jobs started."""
    found = [str(folder_of(name))] if folder_of(name).exists() else []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            text = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        except OSError:  # it has just ended
            continue
        if f"{folder_of(name)}/".encode() in text:
            found.append(f"process {process.name}: {text[:200]!r}")
    return found


@pytest.fixture
def name():
    name = "t" + uuid.uuid4().hex[:12]
    yield name
    slurm_local("down", "--name", name)


@needs_slurm
def test_up_run_down_leaves_nothing(name):
    done = slurm_local("up", "--nodes", "2", "--name", name)
    assert done.returncode == 0, done.stderr
    assert "2 nodes" in done.stdout
    slurm = Slurm(re.search(r"export SLURM_CONF=(\S+)", done.stdout)[1])
    assert sorted(slurm.run("srun", "-N", "2", "printenv", "SLURMD_NODENAME").split()) == ["n1", "n2"]
    # What a job leaves running, and a job that waits, and a second `up`.
    stays = "trap '' TERM; sleep 1000 & wait; sleep 1000"
    slurm.run("sbatch", "--output=/dev/null", "--nodes=2", "--exclusive", "--wrap", stays)
    slurm.run("sbatch", "--output=/dev/null", "--nodes=2", "--exclusive", "--wrap", "true")
    again = slurm_local("up", "--name", name)
    assert again.returncode == 1
    assert f"launch/slurm-local down --name {name}" in again.stderr
    deadline = time.monotonic() + 60
    while "RUNNING" not in slurm.run("squeue", "-h", "-o", "%T"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    status = slurm_local("status", "--name", name)
    assert status.returncode == 0
    assert "n2  " in status.stdout
    assert "PENDING" in status.stdout
    done = slurm_local("down", "--name", name)
    assert (done.returncode, done.stderr) == (0, "")
    assert leftovers(name) == []
    assert slurm_local("status", "--name", name).returncode == 1
    assert slurm_local("down", "--name", name).returncode == 0


@needs_slurm
def test_two_at_a_time_do_not_see_each_other(name):
    other = name[:-1] + "x"
    try:
        for one in (name, other):
            assert slurm_local("up", "--nodes", "1", "--name", one).returncode == 0
        first, second = (Slurm(str(folder_of(one) / "slurm.conf")) for one in (name, other))
        first.run("sbatch", "--hold", "--output=/dev/null", "--wrap", "true")
        assert first.run("squeue", "-h") != ""
        assert second.run("squeue", "-h") == ""
        assert slurm_local("down", "--name", name).returncode == 0
        assert second.run("srun", "echo", "here") == "here\n"
    finally:
        slurm_local("down", "--name", other)


@needs_slurm
def test_with_gives_the_status_of_its_command_and_cleans_up():
    script = 'echo "$SLURM_CONF"; srun true && exit 5'
    done = slurm_local("with", "--nodes", "1", "--", "bash", "-c", script)
    assert done.returncode == 5, done.stderr
    conf = Path(done.stdout.strip())
    assert conf.name == "slurm.conf"
    assert leftovers(conf.parent.name.rpartition("-")[2]) == []


@needs_slurm
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_interrupted_with_leaves_nothing(tmp_path, number):
    said = tmp_path / "said"
    process = subprocess.Popen(
        # A runner in the background may have SIGINT ignored, and a shell cannot undo that.
        ["env", "--default-signal=INT", LOCAL, "with", "--nodes", "1", "--", "bash", "-c",
         'echo "$SLURM_CONF" >"$0"; exec srun sleep 1000', said],
        env=clean_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not said.exists() or not said.read_text().endswith("\n"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.3)
    os.killpg(process.pid, number)
    assert process.wait(60) == 128 + number
    assert leftovers(Path(said.read_text().strip()).parent.name.rpartition("-")[2]) == []


@needs_slurm
@pytest.mark.parametrize("delay_s", [0.02, 0.1, 0.3])
def test_interrupted_up_leaves_all_or_nothing(name, delay_s):
    process = subprocess.Popen([LOCAL, "up", "--name", name], env=clean_environment(), stderr=subprocess.DEVNULL)
    time.sleep(delay_s)
    process.terminate()
    if process.wait(60) != 0:
        assert leftovers(name) == []
    else:
        assert slurm_local("status", "--name", name).returncode == 0


@needs_slurm
def test_a_slurm_that_does_not_start_leaves_its_words_and_nothing_else(name, tmp_path):
    fake = tmp_path / "slurmctld"
    fake.write_text("#!/bin/sh\necho 'no such luck' >&2\nexit 1\n")
    fake.chmod(0o755)
    environ = clean_environment()
    environ["PATH"] = f"{tmp_path}:{environ['PATH']}"
    done = subprocess.run([LOCAL, "up", "--name", name], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "no such luck" in done.stderr
    assert "did not come up" in done.stderr
    assert leftovers(name) == []


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["up", "--nodes", "0"], "--nodes '0': 1 to 64"),
        (["up", "--nodes", "65"], "1 to 64"),
        (["up", "--nodes"], "--nodes needs a value"),
        (["up", "4"], "unexpected '4'"),
        (["up", "--cpus=many"], "--cpus 'many'"),
        (["up", "--name", "../x"], "--name '../x'"),
        (["up", "--nmae", "x"], "unknown option '--nmae'; known here: --nodes --cpus --name"),
        (["with"], "nothing to run"),
        (["with", "--name", "x", "--", "true"], "unknown option '--name'"),
        (["fly"], "known: up with status down"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_arguments_are_named(words, complaint):
    done = slurm_local(*words)
    assert done.returncode == 2
    assert complaint in done.stderr


def test_help_shows_examples():
    assert "./launch/slurm-local up --nodes 2 --name mine" in slurm_local("--help").stdout


def test_without_the_packages_it_says_what_to_install():
    with tempfile.TemporaryDirectory() as folder:
        # bash and what the script itself needs, but no Slurm.
        for program in ("bash", "env", "getconf"):
            (Path(folder) / program).symlink_to(shutil.which(program))
        text = LOCAL.read_text().replace("PATH=$PATH:/usr/sbin:/sbin", "")
        copy = Path(folder) / "slurm-local"
        copy.write_text(text)
        copy.chmod(0o755)
        done = subprocess.run([copy, "up"], env={"PATH": folder}, capture_output=True, text=True)
    assert done.returncode == 77
    assert "no munged slurmctld slurmd sbatch: apt-get install" in done.stderr


@needs_slurm
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_no_root_is_needed():
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        copy = shutil.copy(ROOT / "launch" / "slurm-local", folder)
        done = subprocess.run(
            [copy, "with", "--nodes", "2", "--", "srun", "-N", "2", "id", "-un"], cwd="/", user="nobody",
            group="nogroup", capture_output=True, text=True, timeout=120,
            env={"PATH": os.environ["PATH"], "HOME": "/"},
        )  # fmt: skip
    assert done.stdout == "nobody\nnobody\n", done.stderr
