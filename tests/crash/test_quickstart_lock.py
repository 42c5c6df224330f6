"""Two quickstarts in one folder: the second is told of the first. Without flock each starts, as there is no lock."""

import fcntl
import os
import shutil
import subprocess

import pytest
from jobs import ROOT

from hpctk.cli.quickstart import lock
from hpctk.errors import SettingError

#: What the script needs of a bare machine, up to its call of launch/setup.
TOOLS = ["bash", "cat", "dirname", "mkdir", "sh"]
#: The pretended launch/setup ends with it.
SET_UP = 7


@pytest.fixture
def project(tmp_path):
    """The script beside a launch/setup that only says that it was called."""
    folder = tmp_path / "project"
    (folder / "launch").mkdir(parents=True)
    (folder / "runs").mkdir()
    for name in ("quickstart", "env.sh"):
        shutil.copy(ROOT / "launch" / name, folder / "launch" / name)
    (folder / "launch" / "setup").write_text(f"#!/bin/sh\nexit {SET_UP}\n")
    (folder / "launch" / "setup").chmod(0o755)
    return folder


def quickstart(project, *tools):
    """Return the ended script, on a machine with these tools besides the usual ones."""
    programs = project.parent / "bin"
    programs.mkdir()
    for tool in (*TOOLS, *tools):
        (programs / tool).symlink_to(shutil.which(tool))
    environ = {"PATH": str(programs), "HOME": str(project.parent)}
    return subprocess.run([project / "launch" / "quickstart"], env=environ, capture_output=True, text=True, timeout=30)


def test_a_second_one_is_told_of_the_first(project):
    with (project / "runs" / "quickstart.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        print(4711, file=lock, flush=True)
        ended = quickstart(project, "flock")
    assert ended.returncode == 2, ended.stderr
    assert "another quickstart (process 4711) is at work in this folder" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_what_a_killed_one_has_left_is_no_lock(project):
    (project / "runs" / "quickstart.lock").write_text("4711\n")
    ended = quickstart(project, "flock")
    assert (ended.returncode, ended.stderr) == (SET_UP, "")


def test_without_flock(project):
    ended = quickstart(project)
    assert (ended.returncode, ended.stderr) == (SET_UP, "")


@pytest.fixture
def lock_file(tmp_path, monkeypatch):
    """The lock of `hpctk quickstart` in a folder, after a start that was killed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "quickstart.lock").write_text("4711\n")
    return tmp_path / "runs" / "quickstart.lock"


def test_hpctk_quickstart_takes_a_lock_that_nobody_holds(lock_file):
    with lock():
        assert lock_file.read_text() == f"{os.getpid()}\n"


def test_hpctk_quickstart_is_told_of_another(lock_file):
    with lock_file.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(SettingError, match=r"another quickstart \(process 4711\) is at work in this folder"):
            lock()


def test_the_lock_of_the_script_that_became_hpctk_quickstart_is_its_own(lock_file):
    lock_file.write_text(f"{os.getpid()}\n")
    with lock_file.open("a") as script:
        fcntl.flock(script, fcntl.LOCK_EX)
        lock().close()
