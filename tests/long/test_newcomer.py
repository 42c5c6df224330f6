"""The first command as an ordinary user has it: stock pip, empty caches, everything downloaded, torch as it comes."""

import os
import shutil

import newcomer
import pytest

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("useradd") is None, reason="making a user needs root and useradd"
)


@pytest.fixture(scope="module")
def somebody():
    with newcomer.newcomer(made=True) as made:
        yield made


@pytest.mark.parametrize("folder", ["hpctk", "my hpc tools/hpctk"])
def test_quickstart(somebody, folder):
    project = somebody.copy_project(folder)
    ended = somebody.run(["./launch/quickstart"], project, 1700, PYTHON=newcomer.interpreter())
    assert ended.code == 0, ended.output
    assert "Horovod" not in ended.output
    table = [line.split()[0] for line in ended.output.splitlines() if line.strip()]
    for method in ("mean", "adacons", "sasg", "saef", "mgrawa", "lgrawa", "celgc"):
        assert method in table
    assert (project / "runs" / "quickstart" / "picture.png").exists()
    # What one process compiled before the ranks started was all they needed: none compiled anything beside the others.
    started = (project / "runs" / "quickstart" / "settings.toml").stat().st_mtime
    kernels = list((project / "hpctk" / "kernels" / "__pycache__").glob("*.nbc"))
    assert kernels
    assert [one.name for one in kernels if one.stat().st_mtime > started] == []
    assert somebody.left_behind() == []
    shutil.rmtree(project)
