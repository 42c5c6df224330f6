"""launch/test with pretended tools: two stages at a time, what is said of them, and how they end."""

import os
import shutil
import signal
import subprocess
import time

import pytest
from jobs import ROOT

TOOLS = ["bash", "cat", "date", "dirname", "env", "grep", "id", "mkfifo", "mktemp", "rm", "sed", "sh", "sleep", "sort",
         "touch", "uniq", "xargs"]  # fmt: skip
#: Passes for every tool: writes down when it began and ended, skips something, and fails or lasts where it is told to.
PRETENDED = """#!/bin/sh
words="${0##*/} $*"
echo "begin $words" >>"$LOG"
for stage in $FAILING; do case $words in *"$stage"*) failing=yes ;; esac; done
for stage in $LASTING; do case $words in *"$stage"*) echo $$ >>"$LOG.pids"; exec sleep 1000 ;; esac; done
echo "said by $words"
sleep 0.2
echo "not installed: a thing" >>"$HPCTK_SKIPS"
echo "still said by $words"
echo "end $words" >>"$LOG"
[ -z "$failing" ]
"""


@pytest.fixture
def tested(tmp_path):
    """A function that starts launch/test of a copy of the project, with only pretended tools."""
    shutil.copytree(ROOT / "launch", tmp_path / "launch")
    (tmp_path / "launch" / "setup").write_text("#!/bin/sh\n")
    tools = tmp_path / ".venv" / "bin"
    tools.mkdir(parents=True)
    for tool in TOOLS:
        (tools / tool).symlink_to(shutil.which(tool))
    for tool in ("git", "lint-imports", "mypy", "python", "ruff", "shellcheck"):
        (tools / tool).write_text(PRETENDED)
        (tools / tool).chmod(0o755)
    temporary = tmp_path / "temporary"
    temporary.mkdir()

    def start(*words, failing="", lasting=""):
        environ = {
            "PATH": str(tools), "HOME": str(tmp_path), "TMPDIR": str(temporary), "LOG": str(tmp_path / "log"),
            "FAILING": failing, "LASTING": lasting,
        }  # fmt: skip
        return subprocess.Popen(
            ["env", "--default-signal=INT", tmp_path / "launch" / "test", *words], env=environ, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    return start


def test_two_stages_at_a_time_each_in_one_piece(tested, tmp_path):
    job = tested("lint", "unit", "ddp")
    output = job.communicate(timeout=60)[0]
    assert job.returncode == 0, output
    assert "test: all passed in " in output
    log = (tmp_path / "log").read_text().splitlines()
    running, most = set(), 0
    for line in log:
        kind, _, words = line.partition(" ")
        running ^= {words}
        assert (kind == "begin") == (words in running), line
        most = max(most, len(running))
    assert most == 2, log
    # In the order in which they were named, kernels before all who use them.
    python = [words for words in log if words.startswith("begin python")]
    order = [name for words in python for name in ("compile_kernels.py", "tests/unit", "tests/ddp") if name in words]
    assert order == ["compile_kernels.py", "tests/unit", "tests/ddp"]
    lines = output.splitlines()
    for name in ("unit", "ddp"):
        (first,) = [
            number for number, line in enumerate(lines) if line.startswith("said by") and f"tests/{name}" in line
        ]
        assert lines[first + 1].startswith("still said by"), output
        assert lines[first + 2].endswith(" s"), output
    # One line for all that is skipped for the same reason.
    assert [line.split() for line in lines if "a thing" in line] == [
        [str(len(log) // 2), "not", "installed:", "a", "thing"]
    ]


def test_all_that_fails_is_named_in_the_end(tested):
    job = tested("--strict", "lint", "unit", "ddp", failing="mypy tests/unit")
    output = job.communicate(timeout=60)[0]
    assert job.returncode == 1
    _, _, failed = output.partition("test: FAILED after ")
    assert sorted(line.strip() for line in failed.splitlines()[1:]) == [
        "--strict: tests that lack an installation", "mypy --strict", "unit tests",
    ]  # fmt: skip
    assert "== torchrun jobs: ok" in output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_every_stage(tested, tmp_path, number):
    job = tested("lint", "unit", "ddp", lasting="tests/unit mypy")
    pids = tmp_path / "log.pids"
    deadline = time.monotonic() + 60
    while not pids.exists() or len(pids.read_text().split()) < 2:
        assert time.monotonic() < deadline
        assert job.poll() is None
        time.sleep(0.05)
    job.send_signal(number)
    output = job.communicate(timeout=60)[0]
    assert job.returncode == 130, output
    assert "test: interrupted" in output
    for pid in pids.read_text().split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)
    assert list((tmp_path / "temporary").iterdir()) == []
