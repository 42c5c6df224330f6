"""How `hpctk mpirun` and `hpctk horovodrun` find what they start; the programs are pretended ones."""

import os

import pytest

from hpctk.cli import launch
from hpctk.cli.launch import Own
from hpctk.errors import SettingError

OPEN_MPI = "mpirun (Open MPI) 5.0.11"


def program(folder, name, says=""):
    """Make a program that says one thing, and return where it is."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.write_text(f"#!/bin/sh\necho '{says}'\n")
    file.chmod(0o755)
    return str(file)


def venv(folder, says=OPEN_MPI, *more):
    """Make what passes for a virtual environment, and return where it is."""
    for name in ("python", "mpirun", *more):
        program(folder / "bin", name, says)
    return str(folder)


def prepare(name, words, own=None, venv=None, **environ):
    return launch.prepare(name, own or Own(), words, environ, venv)


def test_its_own_environment_comes_first(tmp_path):
    system, own = program(tmp_path / "bin", "mpirun", OPEN_MPI), venv(tmp_path / "v")
    added, line = prepare("mpirun", ["x"], PATH=f"{tmp_path}/bin")
    assert (line[0], added.get("VIRTUAL_ENV")) == (system, None)
    added, line = prepare("mpirun", ["x"], venv=own, PATH=f"{tmp_path}/bin")
    assert (line[0], added["VIRTUAL_ENV"]) == (f"{own}/bin/mpirun", own)


def test_an_environment_without_mpi_leaves_it_to_path(tmp_path):
    system = program(tmp_path / "bin", "mpirun", OPEN_MPI)
    program(tmp_path / "v" / "bin", "python")
    added, line = prepare("mpirun", ["x"], venv=str(tmp_path / "v"), PATH=str(tmp_path / "bin"))
    assert line[0] == system
    assert added["PATH"] == f"{tmp_path}/v/bin:{tmp_path}/bin"


def test_a_named_environment_that_is_not_there(tmp_path):
    with pytest.raises(SettingError, match="HPCTK_VENV='/nowhere'.*unset it"):
        prepare("mpirun", ["x"], PATH="", HPCTK_VENV="/nowhere")


def test_the_wrappers_do_not_find_themselves(tmp_path):
    for name in ("mpirun", "horovodrun"):
        program(tmp_path / "launch", name, "itself")
        program(tmp_path / "bin", name, OPEN_MPI)
    program(tmp_path / "launch", "quickstart")
    (tmp_path / "link").symlink_to(tmp_path / "launch")
    path = os.pathsep.join(str(tmp_path / each) for each in ("launch", "link", "bin"))
    for name in ("mpirun", "horovodrun"):
        added, line = prepare(name, ["x"], PATH=path)
        assert line[0] == str(tmp_path / "bin" / name)
        # horovodrun looks for mpirun once more.
        assert added["PATH"] == str(tmp_path / "bin")


@pytest.mark.parametrize(("name", "told"), [("mpirun", "no mpirun here"), ("horovodrun", "no mpirun here")])
def test_no_mpi(tmp_path, name, told):
    with pytest.raises(SettingError, match=f"{told}.*pip install .hpctk.mpi"):
        prepare(name, ["x"], PATH=str(tmp_path))


def test_no_horovod(tmp_path):
    with pytest.raises(SettingError, match="no Horovod here.*hpctk setup horovod"):
        prepare("horovodrun", ["x"], venv=venv(tmp_path / "v"), PATH="")


#: The Python of an environment whose `hpctk setup horovod` writes down that it was called, and makes a horovodrun.
PYTHON = """#!/bin/sh
echo "$*" >>"${{0%/bin/python}}/calls"
{made}
"""


def made_by_setup(folder, stamp, made):
    """Make an environment as launch/setup leaves it."""
    here = venv(folder)
    if stamp is not None:
        (folder / "hpctk-setup").write_text(stamp)
    (folder / "bin" / "python").write_text(PYTHON.format(made=made))
    return here


@pytest.mark.parametrize("mpi", ["openmpi", "openmpi4"])
def test_horovodrun_builds_horovod_when_it_is_first_needed(tmp_path, mpi):
    made = f"printf '#!/bin/sh' >{tmp_path}/v/bin/horovodrun; chmod +x {tmp_path}/v/bin/horovodrun"
    here = made_by_setup(tmp_path / "v", f"fingerprint\n{mpi}\n", made)
    environ = {"PATH": "/usr/bin:/bin", "venv": here}
    with pytest.raises(SettingError, match="no Horovod here"):
        prepare("horovodrun", ["x"], Own(show=True), **environ)
    for _ in range(2):
        _, line = prepare("horovodrun", ["x"], **environ)
        assert line[0] == f"{here}/bin/horovodrun"
    assert (tmp_path / "v" / "calls").read_text() == "-m hpctk setup horovod\n"


@pytest.mark.parametrize(
    ("stamp", "state"),
    [(None, None), ("fingerprint\nopenmpi\n", "left out\n"), ("fingerprint\nmpich\n", None)],
    ids=["not by launch/setup", "left out", "MPICH"],
)
def test_horovodrun_does_not_build_where_it_should_not(tmp_path, stamp, state):
    here = made_by_setup(tmp_path / "v", stamp, "")
    if state is not None:
        (tmp_path / "v" / "hpctk-horovod").write_text(state)
    with pytest.raises(SettingError, match="no Horovod here: hpctk setup horovod builds it"):
        prepare("horovodrun", ["x"], venv=here, PATH="/usr/bin:/bin")
    assert not (tmp_path / "v" / "calls").exists()


def test_a_horovod_that_cannot_be_built(tmp_path):
    here = made_by_setup(tmp_path / "v", "fingerprint\nopenmpi\n", "exit 2")
    with pytest.raises(SettingError, match="no Horovod here"):
        prepare("horovodrun", ["x"], venv=here, PATH="/usr/bin:/bin")


def test_horovod_and_mpich(tmp_path):
    environ = {"PATH": "", "venv": venv(tmp_path / "v", "HYDRA build details:", "horovodrun")}
    with pytest.raises(SettingError, match="v/bin/mpirun is MPICH"):
        prepare("horovodrun", ["-np", "2", "x"], **environ)
    _, line = prepare("horovodrun", ["-np", "2", "x"], Own(mpi="mpich"), **environ)
    assert line == [f"{tmp_path}/v/bin/horovodrun", "-np", "2", "x"]


def test_a_line_for_elsewhere_needs_no_mpi_here(tmp_path):
    _, line = prepare("mpirun", ["-n", "1", "x"], Own(show=True, mpi="openmpi4"), PATH=str(tmp_path))
    assert line[0] == "mpirun"
    here = venv(tmp_path / "v")
    _, line = prepare("mpirun", ["x"], Own(mpi="openmpi4"), venv=here, PATH="")
    assert line[0] == f"{here}/bin/mpirun"
    with pytest.raises(SettingError, match="--mpi 'openmpi'.*openmpi5, openmpi4, mpich, intel"):
        launch.take_own("mpirun", ["--mpi", "openmpi", "x"])


def test_an_mpirun_that_cannot_say_who_it_is(tmp_path):
    (tmp_path / "mpirun").write_text("neither program nor script")
    (tmp_path / "mpirun").chmod(0o755)
    with pytest.raises(SettingError, match="--mpi KIND"):
        prepare("horovodrun", ["x"], PATH=str(tmp_path))
