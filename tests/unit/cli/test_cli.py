"""The `hpctk` command: what it says to wrong words, to closed pipes, and what it hands to a script."""

import os
import subprocess
import sys

import pytest
from jobs import clean_environment

from hpctk.cli import COMMANDS

SHOW = "import sys; print(sys.argv)"


def hpctk(*words, **options):
    options = {"stdout": subprocess.PIPE, "env": clean_environment(), **options}
    return subprocess.run(
        [sys.executable, "-m", "hpctk", *words],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        **options,
    )


@pytest.mark.parametrize("words", [["dcotor"], ["dcotor", "--json"], ["nothing", "doctor"]], ids=" ".join)
def test_unknown_command(words):
    done = hpctk(*words)
    assert done.returncode == 2
    assert f"'{words[0]}'" in done.stderr
    for name in COMMANDS:
        assert name in done.stderr
    assert "Traceback" not in done.stderr


def test_no_command():
    done = hpctk()
    assert done.returncode == 2
    assert done.stderr.startswith("hpctk: which command? Known are quickstart, doctor, ")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command(command):
    done = hpctk(command, "--help")
    assert done.returncode == 0, done.stderr
    assert f"usage: hpctk {command}" in done.stdout
    assert "xamples:" in done.stdout


def test_an_error_of_hpctk_is_one_line():
    done = hpctk("train", "digits", "--epochs", "0")
    assert done.returncode == 2
    assert done.stderr == "hpctk train: epochs=0: need a whole number from 1 to 10000\n"
    assert done.stdout == ""


# Python notices a closed pipe while it prints if unbuffered, else only when it ends.
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_gone_is_no_error(tmp_path, unbuffered):
    (tmp_path / "torch.py").write_text("raise ImportError('not needed here, and slow')")
    environ = clean_environment(PYTHONUNBUFFERED=unbuffered, PYTHONPATH=str(tmp_path))
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = hpctk("doctor", stdout=writer, env=environ)
    finally:
        os.close(writer)
    assert done.stderr == ""
    # 1 would say that there is no torch; 120 is Python's own complaint.
    assert done.returncode in (0, 1)


def test_head():
    pipeline = f"set -o pipefail; {sys.executable} -m hpctk doctor | head -1"
    environ = clean_environment(PYTHONUNBUFFERED="")
    done = subprocess.run(["bash", "-c", pipeline], env=environ, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("hpctk ")
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""
    assert done.returncode == 0


@pytest.fixture
def script(tmp_path):
    (tmp_path / "show_arguments.py").write_text(SHOW)
    return tmp_path / "show_arguments.py"


#: Words that hpctk itself, its commands or `python -m mpi4py` would understand.
TRICKY = ["--help", "-m", "x", "--version", "-c", "doctor", "--", "run", "-h", "--json=1", ""]


@pytest.mark.parametrize("arguments", [[], ["--epochs", "3"], TRICKY], ids=["none", "plain", "tricky"])
def test_run_hands_all_words_to_the_script(script, arguments):
    by_path = hpctk("run", str(script), *arguments)
    assert by_path.stdout == f"{[str(script), *arguments]}\n", by_path.stderr
    as_module = hpctk("run", "-m", script.stem, *arguments, cwd=script.parent)
    assert as_module.stdout == f"{[str(script), *arguments]}\n", as_module.stderr
    as_text = hpctk("run", "-c", SHOW, *arguments)
    assert as_text.stdout == f"{['-c', *arguments]}\n", as_text.stderr


@pytest.mark.parametrize("words", [[], ["-m"], ["-c"]], ids=["nothing", "-m", "-c"])
def test_run_without_a_script(words):
    done = hpctk("run", *words)
    assert done.returncode == 2
    assert "which script?" in done.stderr


def test_run_keeps_the_scripts_exit_status():
    done = hpctk("run", "-c", "import sys; sys.exit(7)")
    assert done.returncode == 7
    assert "SystemExit: 7" in done.stderr
    assert hpctk("run", "-c", "import sys; sys.exit(0)").returncode == 0


def test_run_shows_the_scripts_error():
    done = hpctk("run", "-c", "def deep(): raise KeyError('lr')\ndeep()")
    assert done.returncode == 1
    assert "in deep" in done.stderr
    assert "KeyError: 'lr'" in done.stderr
