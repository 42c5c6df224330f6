"""The command line of launch/horovodrun, as text, for each MPI."""

import argparse
import shlex

import pytest

from hpctk.errors import SettingError
from hpctk.launch import typed as typed_words
from hpctk.launch.facts import Facts
from hpctk.launch.horovodrun import PAIRS, VALUES, check_mpi, horovodrun_environment, horovodrun_line
from hpctk.launch.kinds import KINDS

OPEN_MPI_5 = "--binding-args=--bind-to none --map-by slot"


def line(kind, typed, **facts):
    return horovodrun_line(kind, shlex.split(typed), Facts("horovodrun", **facts), plain=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("root", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_what_each_mpi_needs(kind, root, ranks):
    front = [OPEN_MPI_5] if kind == "openmpi5" else []
    words = ["-np", str(ranks), "./program"]
    assert line(kind, shlex.join(words), root=root, cores=2) == ["horovodrun", *front, *words]


@pytest.mark.parametrize(
    "typed", ["--binding-args='--bind-to core' -np 2 ./p", "-np 2 --binding-args '--bind-to core' ./p"]
)
def test_the_users_binding_stands(typed):
    assert line("openmpi5", typed) == ["horovodrun", *shlex.split(typed)]


def test_options_of_the_program_are_not_horovodruns():
    typed = "-np 2 -H a:1,b:1 ./p --binding-args x --gloo : y"
    assert line("openmpi5", typed) == ["horovodrun", OPEN_MPI_5, *shlex.split(typed)]


@pytest.mark.parametrize("typed", ["--check-build", "-cb", "--version", "-np 2", "--mpi -np 2"])
def test_nothing_is_added_where_nothing_is_started(typed):
    assert line("openmpi5", typed) == ["horovodrun", *shlex.split(typed)]


@pytest.mark.parametrize(
    "typed",
    ["--gloo -np 2 ./p", "-np 2 --min-np 1 ./p", "-np 2 --host-discovery-script find ./p", "--gloo"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_gloo_is_refused(kind, typed):
    with pytest.raises(SettingError, match="gloo.*MPI"):
        line(kind, typed)


def test_python_goes_through_mpi4py():
    words = shlex.split("-np 2 --verbose --mpi -p 22 --mpi-args='--timeout 9' python train.py 'a b'")
    made = horovodrun_line("openmpi4", words, Facts("horovodrun"))
    assert made == ["horovodrun", *words[:-2], "-m", "mpi4py", "train.py", "a b"]


def test_intel_pins_by_the_environment():
    def added(typed, kind="intel", **environ):
        return horovodrun_environment(kind, shlex.split(typed), Facts("horovodrun", cores=2, environ=environ))

    assert added("-np 3 ./p") == {"I_MPI_PIN": "0"}
    assert added("--num-proc=3 ./p") == {"I_MPI_PIN": "0"}
    assert added("-np 2 ./p") == {}
    assert added("-np 3 -H a:3 ./p") == {}
    assert added("-np 3 ./p", SLURM_JOB_ID="1") == {}
    assert added("-np 3 ./p", I_MPI_PIN_DOMAIN="omp") == {}
    assert added("-np 3 ./p", kind="openmpi5") == {}


def test_mpich_is_refused_by_name():
    with pytest.raises(SettingError, match="/x/mpirun is MPICH.*launch/setup.*--mpi mpich"):
        check_mpi("mpich", "/x/mpirun")
    for kind in set(KINDS) - {"mpich"}:
        check_mpi(kind, "/x/mpirun")


@pytest.mark.parametrize(
    ("words", "kind", "rest"),
    [
        (["--mpi", "openmpi4", "-np", "2"], "openmpi4", ["-np", "2"]),
        (["--mpi=intel", "-np", "2"], "intel", ["-np", "2"]),
        (["--mpi", "-np", "2"], None, ["--mpi", "-np", "2"]),
        (["-np", "2", "--mpi", "openmpi4"], None, ["-np", "2", "--mpi", "openmpi4"]),
    ],
)
def test_horovodruns_own_option_of_the_same_name(words, kind, rest):
    own, left = typed_words.take_own(words, KINDS, flag_too=True)
    assert (own.mpi, left) == (kind, rest)


def test_which_options_take_values_as_horovod_itself_says(monkeypatch):
    launch = pytest.importorskip(
        "horovod.runner.launch", reason="not installed: Horovod (./launch/setup --with-horovod)"
    )
    parsers = []
    make = argparse.ArgumentParser.parse_known_args
    monkeypatch.setattr(
        argparse.ArgumentParser,
        "parse_known_args",
        lambda self, *given, **named: parsers.append(self) or make(self, *given, **named),
    )
    monkeypatch.setattr("sys.argv", ["horovodrun", "-np", "1", "true"])
    launch.parse_args()
    takes = {0: set(), 1: set(), 2: set()}
    for action in parsers[0]._actions:
        n = 1 if action.nargs is None else action.nargs
        if action.option_strings:
            takes[n].update(name.lstrip("-") for name in action.option_strings)
    assert takes[1] == VALUES
    assert takes[2] == PAIRS
    assert "check-build" in takes[0]
