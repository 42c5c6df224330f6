"""The command line of launch/mpirun, as text, for each MPI."""

import shlex

import pytest

from hpctk.errors import SettingError
from hpctk.launch.facts import Facts, job_environment
from hpctk.launch.kinds import KINDS, kind_of
from hpctk.launch.mpirun import mpirun_line
from hpctk.launch.start import shown

OPEN_MPI = ("openmpi5", "openmpi4")
HYDRA = ("mpich", "intel")


def line(kind, typed, *, plain=True, root=False, cores=2, **environ):
    """Return what becomes of a typed line, as text; the program as it is unless asked otherwise."""
    facts = Facts("mpirun", root=root, cores=cores, environ=environ)
    return shlex.join(mpirun_line(kind, shlex.split(typed), facts, plain))


#: Ranks, root: what each MPI gets in front of `-n RANKS ./program`, on two cores.
FRONT = {
    ("openmpi5", 2, False): "--bind-to none ",
    ("openmpi5", 2, True): "--allow-run-as-root --bind-to none ",
    ("openmpi5", 3, False): "--bind-to none --map-by :OVERSUBSCRIBE ",
    ("openmpi5", 3, True): "--allow-run-as-root --bind-to none --map-by :OVERSUBSCRIBE ",
    ("openmpi4", 2, False): "--bind-to none ",
    ("openmpi4", 2, True): "--allow-run-as-root --bind-to none ",
    ("openmpi4", 3, False): "--bind-to none --map-by :OVERSUBSCRIBE ",
    ("openmpi4", 3, True): "--allow-run-as-root --bind-to none --map-by :OVERSUBSCRIBE ",
    ("mpich", 2, False): "",
    ("mpich", 2, True): "",
    ("mpich", 3, False): "",
    ("mpich", 3, True): "",
    ("intel", 2, False): "",
    ("intel", 2, True): "",
    ("intel", 3, False): "-genv I_MPI_PIN 0 ",
    ("intel", 3, True): "-genv I_MPI_PIN 0 ",
}


@pytest.mark.parametrize(("kind", "ranks", "root"), FRONT)
def test_what_each_mpi_needs(kind, ranks, root):
    front = FRONT[kind, ranks, root]
    assert line(kind, f"-n {ranks} ./program", root=root) == f"mpirun {front}-n {ranks} ./program"


@pytest.mark.parametrize("kind", OPEN_MPI)
@pytest.mark.parametrize(
    ("typed", "front"),
    [
        # What the user says about binding or mapping stands, and nothing is said beside it.
        ("-n 3 --bind-to core ./p", "--map-by :OVERSUBSCRIBE "),
        ("-n 3 --map-by ppr:3:node:pe=1 ./p", ""),
        ("-n 3 --map-by=slot ./p", ""),
        ("-n 3 -map-by slot ./p", ""),
        ("-n 3 --oversubscribe ./p", "--bind-to none "),
        ("-n 3 --nooversubscribe ./p", "--bind-to none "),
        ("-n 3 -N 3 ./p", "--bind-to none "),
        ("-n 3 --cpu-set 0,1 ./p", "--map-by :OVERSUBSCRIBE "),
        ("-n 3 -rf ranks ./p", ""),
        ("-n 3 --mca rmaps_base_mapping_policy slot ./p", "--bind-to none "),
        ("-n 3 --prtemca hwloc_default_binding_policy core ./p", "--map-by :OVERSUBSCRIBE "),
        # Who names hosts says how many ranks go there.
        ("-n 3 --hostfile hosts ./p", "--bind-to none "),
        ("-n 3 -H a:3 ./p", "--bind-to none "),
        ("-n 3 --host a:1,b:2 ./p", "--bind-to none "),
        # All ways to give a number of ranks; none means as many as there are slots.
        ("-np 3 ./p", "--bind-to none --map-by :OVERSUBSCRIBE "),
        ("--np 3 ./p", "--bind-to none --map-by :OVERSUBSCRIBE "),
        ("-c 3 ./p", "--bind-to none --map-by :OVERSUBSCRIBE "),
        ("--np=3 ./p", "--bind-to none --map-by :OVERSUBSCRIBE "),
        ("./p", "--bind-to none "),
        ("-n three ./p", "--bind-to none "),
        # Only what stands before the program is mpirun's.
        ("-n 3 ./p --bind-to core --map-by slot -H a", "--bind-to none --map-by :OVERSUBSCRIBE "),
        ("-n 2 ./p -n 64", "--bind-to none "),
        # Ranks of several programs add up.
        ("-n 2 ./p : -n 1 ./q", "--bind-to none --map-by :OVERSUBSCRIBE "),
        ("-n 1 ./p : -n 1 ./q", "--bind-to none "),
        # Options with two values, so that the program is found behind them.
        ("--mca btl tcp,self -n 3 --wdir /tmp ./p", "--bind-to none --map-by :OVERSUBSCRIBE "),
    ],
)
def test_what_the_user_says_stands(kind, typed, front):
    assert line(kind, typed) == f"mpirun {front}{typed}"


@pytest.mark.parametrize("kind", OPEN_MPI)
def test_root_is_not_allowed_twice(kind):
    typed = "--allow-run-as-root -n 1 ./p"
    assert line(kind, typed, root=True) == f"mpirun --bind-to none {typed}"


@pytest.mark.parametrize(
    ("variable", "front"),
    [
        ("OMPI_MCA_rmaps_base_mapping_policy", "--bind-to none "),
        ("PRTE_MCA_rmaps_default_mapping_policy", "--bind-to none "),
        ("OMPI_MCA_hwloc_base_binding_policy", "--map-by :OVERSUBSCRIBE "),
        ("PRTE_MCA_hwloc_default_binding_policy", "--map-by :OVERSUBSCRIBE "),
        ("OMPI_MCA_btl", "--bind-to none --map-by :OVERSUBSCRIBE "),
    ],
)
def test_parameters_in_the_environment_stand(variable, front):
    assert line("openmpi5", "-n 3 ./p", **{variable: "x"}) == f"mpirun {front}-n 3 ./p"


@pytest.mark.parametrize("variable", ["SLURM_JOB_ID", "PBS_NODEFILE", "PE_HOSTFILE", "LSB_JOBID"])
def test_an_allocation_says_how_many_ranks_fit(variable):
    assert line("openmpi5", "-n 3 ./p", **{variable: "7"}) == "mpirun --bind-to none -n 3 ./p"
    assert line("intel", "-n 3 ./p", **{variable: "7"}) == "mpirun -n 3 ./p"


SURROUNDINGS = {
    "PYTHONPATH": "lib", "PATH": "bin", "HPCTK_B": "2", "HPCTK_A": "1", "HOME": "h", "OMP_NUM_THREADS": "1",
}  # fmt: skip


@pytest.mark.parametrize("kind", OPEN_MPI)
def test_variables_are_forwarded_to_other_hosts(kind):
    forwarded = "-x PATH -x PYTHONPATH -x OMP_NUM_THREADS -x HPCTK_A -x HPCTK_B"
    typed = "-n 2 --hostfile hosts ./p"
    assert line(kind, typed, **SURROUNDINGS) == f"mpirun --bind-to none {forwarded} {typed}"
    in_slurm = line(kind, "-n 2 ./p", SLURM_JOB_ID="1", **SURROUNDINGS)
    assert in_slurm == f"mpirun --bind-to none {forwarded} -n 2 ./p"
    # Ranks on this machine inherit them all.
    assert "-x" not in line(kind, "-n 2 ./p", **SURROUNDINGS)


def test_what_the_user_forwards_is_not_forwarded_again():
    typed = "-x PATH=/else -x HPCTK_A -n 2 -H a,b ./p"
    rest = "-x PYTHONPATH -x OMP_NUM_THREADS -x HPCTK_B"
    assert line("openmpi5", typed, **SURROUNDINGS) == f"mpirun --bind-to none {rest} {typed}"


def test_the_other_way_to_forward_excludes_this_one():
    typed = "--mca mca_base_env_list A -n 2 -H a,b ./p"
    assert line("openmpi4", typed, **SURROUNDINGS) == f"mpirun --bind-to none {typed}"


@pytest.mark.parametrize("kind", HYDRA)
def test_hydra_forwards_by_itself(kind):
    typed = "-n 2 -hosts a,b ./p"
    assert line(kind, typed, **SURROUNDINGS) == f"mpirun {typed}"


@pytest.mark.parametrize(
    "typed",
    [
        "-genv I_MPI_PIN 1 -n 3 ./p",
        "-genv I_MPI_PIN_DOMAIN=core -n 3 ./p",
        "-bind-to core -n 3 ./p",
        "-n 3 -f hosts ./p",
    ],
)
def test_intel_pins_as_the_user_says(typed):
    assert line("intel", typed) == f"mpirun {typed}"
    assert line("intel", "-n 3 ./p", I_MPI_PIN_DOMAIN="omp") == "mpirun -n 3 ./p"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("typed", ["--version", "-V", "-n 3", "--app file", "-n 3 --bind-to none"])
def test_nothing_is_added_where_nothing_is_started(kind, typed):
    assert line(kind, typed, root=True) == f"mpirun {typed}"


@pytest.mark.parametrize("kind", KINDS)
def test_no_word_is_changed(kind):
    words = [
        "-n",
        "1",
        "./p",
        "a b",
        "'",
        '"',
        "*",
        "$HOME",
        "",
        "\\",
        "-n",
        ":",
        "-n",
        "1",
        "q",
        "--",
        "é\n",
    ]
    facts = Facts("mpirun", cores=8)
    made = mpirun_line(kind, words, facts)
    assert made[-len(words) :] == words
    # And a shell reads the printed line as the same words.
    assert shlex.split(shown({}, made, "")) == made


@pytest.mark.parametrize("kind", KINDS)
def test_python_programs_go_through_mpi4py(kind):
    made = line(kind, "-n 1 python a.py x : -n 1 ./b.py", plain=False, cores=8)
    assert made.endswith("-n 1 python -m mpi4py a.py x : -n 1 python -m mpi4py ./b.py")
    assert line(kind, "-n 1 python a.py", cores=8).endswith("-n 1 python a.py")


def test_hydra_reads_a_pair_as_one_word_or_two():
    for typed in ("-genv A=b -n 2 python", "-genv A b -n 2 python", "-env A=b -n 2 python"):
        assert line("mpich", f"{typed} x.py", plain=False) == f"mpirun {typed} -m mpi4py x.py"


@pytest.mark.parametrize(
    ("version", "kind"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/\n", "openmpi5"),
        ("mpirun (Open MPI) 4.1.8\n\nReport bugs to http://www.open-mpi.org/community/help/\n", "openmpi4"),
        ("mpirun (Open MPI) 3.1.6\n", "openmpi4"),
        ("mpirun (Open MPI) 10.0.0rc1\n", "openmpi5"),
        ("prterun (PRRTE) 3.0.7\n", "openmpi5"),
        ("HYDRA build details:\n    Version:                                 5.0.2\n", "mpich"),
        (
            "Intel(R) MPI Library for Linux* OS, Version 2021.12 Build 20240213\nCopyright 2003-2024, Intel\n",
            "intel",
        ),
    ],
)
def test_which_mpi_it_is(version, kind):
    assert kind_of(version) == kind


@pytest.mark.parametrize(
    ("version", "told"), [("", "nothing"), ("mpirun (IBM Spectrum MPI) 10.4\nx", "IBM Spectrum")]
)
def test_an_unknown_mpi(version, told):
    with pytest.raises(SettingError, match=told) as error:
        kind_of(version)
    for kind in KINDS:
        assert kind in str(error.value)


def test_the_environment_of_a_job():
    added = job_environment({"PATH": "/bin"}, "/v", 132, tagged=False)
    assert added == {
        "PATH": "/v/bin:/bin", "VIRTUAL_ENV": "/v", "OMP_NUM_THREADS": "1", "HPCTK_PROGRESS": "bar", "COLUMNS": "132",
    }  # fmt: skip


def test_the_environment_of_a_job_keeps_what_is_set():
    here = {
        "PATH": "/v/bin:/bin", "VIRTUAL_ENV": "/v", "OMP_NUM_THREADS": "4", "HPCTK_PROGRESS": "none", "COLUMNS": "9",
    }  # fmt: skip
    assert job_environment(here, "/v", 132, tagged=False) == {}


@pytest.mark.parametrize(("columns", "tagged"), [(None, False), (80, True)])
def test_no_bar_where_there_is_no_terminal_for_it(columns, tagged):
    assert job_environment({"PATH": "/bin"}, None, columns, tagged) == {"OMP_NUM_THREADS": "1"}


def test_the_printed_line_brings_its_environment():
    added = {"PATH": "/my env/bin:/bin:/usr/bin", "A": "b c"}
    text = shown(added, ["mpirun", "-n", "1", "a b"], "/bin:/usr/bin")
    assert text == "env PATH='/my env/bin:'\"$PATH\" A='b c' mpirun -n 1 'a b'"
    assert shown({"PATH": "/else"}, ["p"], "/bin") == "env PATH=/else p"
