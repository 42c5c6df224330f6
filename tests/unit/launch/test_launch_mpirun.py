"""What `hpctk mpirun` adds to a job: variables for each MPI, and `-m mpi4py`."""

import shlex

import pytest

from hpctk.cli.launch import shown
from hpctk.launch.mpirun import FORWARDING, OVERSUBSCRIBED, ROOT, UNBOUND, job_environment, mpirun_job

PIN = {"I_MPI_PIN": "0"}
BOTH = UNBOUND | OVERSUBSCRIBED


def job(typed, *, plain=True, root=False, cores=2, **environ):
    """Return the variables that a typed line gets, and what becomes of it; the program as it is."""
    added, words = mpirun_job(shlex.split(typed), environ, root=root, cores=cores, plain=plain)
    return added, shlex.join(words)


@pytest.mark.parametrize("root", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_what_a_job_on_this_machine_needs(ranks, root):
    typed = f"-n {ranks} ./program"
    wanted = (ROOT if root else {}) | BOTH | (PIN if ranks > 2 else {})
    assert job(typed, root=root) == (wanted, typed)


@pytest.mark.parametrize(
    ("typed", "added"),
    [
        # What the user says about binding or mapping stands, and nothing is said beside it.
        ("-n 2 --bind-to core ./p", OVERSUBSCRIBED),
        ("-n 2 --map-by ppr:3:node:pe=1 ./p", {}),
        ("-n 2 --map-by=slot ./p", {}),
        ("-n 2 -map-by slot ./p", {}),
        ("-n 2 --oversubscribe ./p", UNBOUND),
        ("-n 2 --nooversubscribe ./p", UNBOUND),
        ("-n 2 -N 3 ./p", UNBOUND),
        ("-n 2 --cpu-set 0,1 ./p", OVERSUBSCRIBED),
        ("-n 2 -rf ranks ./p", {}),
        ("-n 2 --mca rmaps_base_mapping_policy slot ./p", UNBOUND),
        ("-n 2 --prtemca hwloc_default_binding_policy core ./p", OVERSUBSCRIBED),
        # Who names hosts says how many ranks go there.
        ("-n 3 --hostfile hosts ./p", UNBOUND),
        ("-n 3 -H a:3 ./p", UNBOUND),
        ("-n 3 --host a:1,b:2 ./p", UNBOUND),
        ("-n 3 -f hosts ./p", UNBOUND),
        # All ways to give a number of ranks; none means as many as there are slots.
        ("-np 3 ./p", BOTH | PIN),
        ("--np 3 ./p", BOTH | PIN),
        ("-c 3 ./p", BOTH | PIN),
        ("--np=3 ./p", BOTH | PIN),
        ("./p", BOTH),
        ("-n three ./p", BOTH),
        # Only what stands before the program is mpirun's.
        ("-n 2 ./p --bind-to core --map-by slot -H a", BOTH),
        ("-n 2 ./p -n 64", BOTH),
        # Ranks of several programs add up.
        ("-n 2 ./p : -n 1 ./q", BOTH | PIN),
        ("-n 1 ./p : -n 1 ./q", BOTH),
        # Options with two values, so that the program is found behind them.
        ("--mca btl tcp,self -n 3 --wdir /tmp ./p", BOTH | PIN),
        # Intel pins as the user says.
        ("-genv I_MPI_PIN 1 -n 3 ./p", BOTH),
        ("-genv I_MPI_PIN_DOMAIN=core -n 3 ./p", BOTH),
        ("-bind-to core -n 3 ./p", OVERSUBSCRIBED),
    ],
)
def test_what_the_user_says_stands(typed, added):
    assert job(typed) == (added, typed)


@pytest.mark.parametrize(
    ("variable", "added"),
    [
        ("OMPI_MCA_rmaps_base_mapping_policy", UNBOUND),
        ("PRTE_MCA_rmaps_default_mapping_policy", UNBOUND),
        ("OMPI_MCA_hwloc_base_binding_policy", OVERSUBSCRIBED),
        ("PRTE_MCA_hwloc_default_binding_policy", OVERSUBSCRIBED),
        ("OMPI_MCA_btl", BOTH),
    ],
)
def test_parameters_in_the_environment_stand(variable, added):
    assert job("-n 2 ./p", **{variable: "x"}) == (added, "-n 2 ./p")
    assert job("-n 3 ./p", I_MPI_PIN_DOMAIN="omp")[0] == BOTH


@pytest.mark.parametrize("variable", ["SLURM_JOB_ID", "PBS_NODEFILE", "PE_HOSTFILE", "LSB_JOBID"])
def test_an_allocation_says_how_many_ranks_fit(variable):
    assert job("-n 3 ./p", **{variable: "7"}) == (UNBOUND, "-n 3 ./p")


SURROUNDINGS = {
    "PYTHONPATH": "lib", "PATH": "bin", "HPCTK_B": "2", "HPCTK_A": "1", "HOME": "h", "OMP_NUM_THREADS": "1",
}  # fmt: skip


def test_variables_are_forwarded_to_other_hosts():
    forwarded = {FORWARDING: "PATH;PYTHONPATH;OMP_NUM_THREADS;HPCTK_A;HPCTK_B"}
    typed = "-n 2 --hostfile hosts ./p"
    assert job(typed, **SURROUNDINGS) == (UNBOUND | forwarded, typed)
    assert job("-n 2 ./p", SLURM_JOB_ID="1", **SURROUNDINGS) == (UNBOUND | forwarded, "-n 2 ./p")
    # Ranks on this machine inherit them all.
    assert FORWARDING not in job("-n 2 ./p", **SURROUNDINGS)[0]


def test_what_the_user_forwards_is_not_forwarded_again_nor_in_another_way():
    typed = "-x PATH=/else -x HPCTK_A -n 2 -H a,b ./p"
    rest = "-x PYTHONPATH -x OMP_NUM_THREADS -x HPCTK_B"
    assert job(typed, **SURROUNDINGS) == (UNBOUND, f"{rest} {typed}")
    typed = "--mca mca_base_env_list A -n 2 -H a,b ./p"
    assert job(typed, **SURROUNDINGS) == (UNBOUND, typed)
    typed = "-n 2 -H a,b ./p"
    assert job(typed, **SURROUNDINGS, **{FORWARDING: "A"}) == (UNBOUND, typed)


@pytest.mark.parametrize("typed", ["--version", "-V", "-n 3", "--app file", "-n 3 --bind-to none"])
def test_nothing_is_added_where_nothing_is_started(typed):
    assert job(typed, root=True) == ({}, typed)


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("--with-ft -n 2 ./p", "--with-ft ulfm -n 2 ./p"),
        ("-n 2 --with-ft ./p", "-n 2 --with-ft ulfm ./p"),
        ("--with-ft ulfm -n 2 ./p", "--with-ft ulfm -n 2 ./p"),
        ("--with-ft mpi -n 2 ./p", "--with-ft mpi -n 2 ./p"),
        ("-n 2 ./p --with-ft", "-n 2 ./p --with-ft"),
    ],
)
def test_fault_tolerance_is_of_the_kind_that_open_mpi_has(typed, words):
    assert job(typed)[1] == words


def test_no_word_is_changed():
    words = [
        "-n", "1", "./p", "a b", "'", '"', "*", "$HOME", "", "\\", "-n", ":", "-n", "1", "q", "--", "é\n",
    ]  # fmt: skip
    _, made = mpirun_job(words, {}, root=False, cores=8)
    assert made == words
    # And a shell reads the printed line as the same words.
    assert shlex.split(shown({}, made, "")) == made


def test_python_programs_go_through_mpi4py():
    typed = "-n 1 python a.py x : -n 1 ./b.py"
    assert job(typed, plain=False)[1] == "-n 1 python -m mpi4py a.py x : -n 1 python -m mpi4py ./b.py"
    assert job(typed)[1] == typed


def test_hydra_reads_a_pair_as_one_word_or_two():
    for typed in ("-genv A=b -n 2 python", "-genv A b -n 2 python", "-env A=b -n 2 python"):
        assert job(f"{typed} x.py", plain=False)[1] == f"{typed} -m mpi4py x.py"


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
