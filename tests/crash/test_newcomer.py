"""Set-up and quickstart by somebody else: another user, an empty home, stock pip, a path with spaces.

All that is installed comes from a folder of small wheels (newcomer.py); everything else is real. tests/long does the
same without them.
"""

import time

import newcomer
import pytest

QUICKSTART = ["./launch/quickstart", "--ranks", "2"]
SHORT = ["--method", "mean,celgc", "--epochs", "2"]


@pytest.fixture(scope="module")
def somebody():
    """A user made for the purpose where that can be; oneself, with another home, where it cannot."""
    with newcomer.newcomer(made=newcomer.packages_can_be_lent()) as made:
        yield made


@pytest.fixture(scope="module")
def project(somebody):
    """The project in a path with spaces, set up by nobody yet."""
    newcomer.lend_packages(somebody.home / "my wheels", "2.13.0+cpu")
    return somebody.copy_project("my hpc tools/hpctk", compiled=True)


def environ(somebody):
    return {"PYTHON": newcomer.interpreter(), "PIP_NO_INDEX": "1", "HPCTK_WHEELS": str(somebody.home / "my wheels")}


def test_quickstart_and_a_second_one_beside_it(somebody, project):
    lock = project / "runs" / "quickstart.lock"
    # Of one that was killed: nobody holds it.
    lock.parent.mkdir()
    lock.write_text("999999\n")
    somebody.own(lock.parent)
    first = somebody.start([*QUICKSTART, *SHORT], project, **environ(somebody))
    deadline = time.monotonic() + 60
    while lock.read_text() != f"{first.pid}\n":
        assert time.monotonic() < deadline
        assert first.poll() is None, first.communicate()[0]
        time.sleep(0.05)
    second = somebody.run(QUICKSTART, project, 60, **environ(somebody))
    ended = somebody.finish(first, 300)
    assert second.code == 2, second.output
    assert second.output.count("\n") == 1
    assert f"another quickstart (process {first.pid})" in second.output
    assert ended.code == 0, ended.output
    assert "Horovod" not in ended.output
    assert "no CPU build" not in ended.output
    assert "sent per rank" in ended.output
    assert "\ncelgc " in ended.output
    assert somebody.left_behind() == []
    # What was installed is in the project, whose name has spaces.
    assert (project / ".venv" / "bin" / "hpctk").exists()
    shown = somebody.run([".venv/bin/hpctk", "--version"], project, 60)
    assert shown.code == 0, shown.output


def test_a_typing_error_costs_nothing(somebody, project):
    """After the test above: the run that is there stays, and no rank is started."""
    before = (project / "runs" / "quickstart" / "result.json").read_text()
    ended = somebody.run([*QUICKSTART, "--fresh", "--method", "saeff"], project, 60, **environ(somebody))
    assert ended.code == 2, ended.output
    assert ended.output.count("did you mean saef?") == 1
    assert "prterun" not in ended.output
    assert (project / "runs" / "quickstart" / "result.json").read_text() == before


def test_without_the_wheels_nothing_is_left_behind(somebody):
    project = somebody.copy_project("another place")
    ended = somebody.run(["./launch/setup"], project, 120, PYTHON=newcomer.interpreter(), PIP_NO_INDEX="1")
    assert ended.code == 2, ended.output
    log = project / ".venv" / "hpctk-setup.log"
    assert f"the whole log is in {log}" in ended.output
    assert "ERROR: " in log.read_text()
    assert somebody.left_behind() == []
