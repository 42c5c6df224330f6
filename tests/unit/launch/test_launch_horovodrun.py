"""What `hpctk horovodrun` adds to a job, for each MPI, and which MPI there is."""

import argparse
import shlex

import pytest

from hpctk.cli.launch import take_own
from hpctk.errors import SettingError
from hpctk.launch.command_line import HOROVODRUN
from hpctk.launch.horovodrun import KINDS, horovodrun_job, kind_of

OPEN_MPI_5 = "--binding-args=--bind-to none --map-by slot"


def line(kind, typed):
    return horovodrun_job(kind, shlex.split(typed), {}, cores=2, plain=True)[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_what_each_mpi_needs(kind, ranks):
    front = [OPEN_MPI_5] if kind == "openmpi5" else []
    words = ["-np", str(ranks), "./program"]
    assert line(kind, shlex.join(words)) == [*front, *words]


@pytest.mark.parametrize(
    "typed", ["--binding-args='--bind-to core' -np 2 ./p", "-np 2 --binding-args '--bind-to core' ./p"]
)
def test_the_users_binding_stands(typed):
    assert line("openmpi5", typed) == shlex.split(typed)


def test_options_of_the_program_are_not_horovodruns():
    typed = "-np 2 -H a:1,b:1 ./p --binding-args x --gloo : y"
    assert line("openmpi5", typed) == [OPEN_MPI_5, *shlex.split(typed)]


@pytest.mark.parametrize("typed", ["--check-build", "-cb", "--version", "-np 2", "--mpi -np 2"])
def test_nothing_is_added_where_nothing_is_started(typed):
    assert line("openmpi5", typed) == shlex.split(typed)


@pytest.mark.parametrize(
    "typed", ["--gloo -np 2 ./p", "-np 2 --min-np 1 ./p", "-np 2 --host-discovery-script find ./p", "--gloo"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_gloo_is_refused(kind, typed):
    with pytest.raises(SettingError, match="gloo.*MPI"):
        line(kind, typed)


def test_python_goes_through_mpi4py():
    words = shlex.split("-np 2 --verbose --mpi -p 22 --mpi-args='--timeout 9' python train.py 'a b'")
    _, made = horovodrun_job("openmpi4", words, {}, cores=2)
    assert made == [*words[:-2], "-m", "mpi4py", "train.py", "a b"]


def test_intel_pins_by_the_environment():
    def added(typed, kind="intel", **environ):
        return horovodrun_job(kind, shlex.split(typed), environ, cores=2)[0]

    assert added("-np 3 ./p") == {"I_MPI_PIN": "0"}
    assert added("--num-proc=3 ./p") == {"I_MPI_PIN": "0"}
    assert added("-np 2 ./p") == {}
    assert added("-np 3 -H a:3 ./p") == {}
    assert added("-np 3 ./p", SLURM_JOB_ID="1") == {}
    assert added("-np 3 ./p", I_MPI_PIN_DOMAIN="omp") == {}
    assert added("-np 3 ./p", kind="openmpi5") == {}


@pytest.mark.parametrize(
    ("version", "kind"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/\n", "openmpi5"),
        ("mpirun (Open MPI) 4.1.8\n\nReport bugs to http://www.open-mpi.org/community/help/\n", "openmpi4"),
        ("mpirun (Open MPI) 3.1.6\n", "openmpi4"),
        ("mpirun (Open MPI) 10.0.0rc1\n", "openmpi5"),
        ("prterun (PRRTE) 3.0.7\n", "openmpi5"),
        ("HYDRA build details:\n    Version:                                 5.0.2\n", "mpich"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.12 Build 20240213\nCopyright 2003-2024, Intel\n", "intel"),
    ],
)
def test_which_mpi_it_is(version, kind):
    assert kind_of(version) == kind


@pytest.mark.parametrize(("version", "told"), [("", "nothing"), ("mpirun (IBM Spectrum MPI) 10.4\nx", "IBM Spectrum")])
def test_an_unknown_mpi(version, told):
    with pytest.raises(SettingError, match=told) as error:
        kind_of(version)
    for kind in KINDS:
        assert kind in str(error.value)


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
    own, left = take_own("horovodrun", words)
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
    assert takes[1] == HOROVODRUN.one
    assert takes[2] == HOROVODRUN.two
    assert "check-build" in takes[0]
