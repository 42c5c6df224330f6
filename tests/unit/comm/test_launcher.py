"""Reading the launcher from the environment, above all srun that started N jobs of one rank each."""

import pytest

from hpctk.comm import launcher


def step(tasks, **more):
    return {"SLURM_STEP_NUM_TASKS": str(tasks), **{name: str(value) for name, value in more.items()}}


@pytest.mark.parametrize("size", [1, 2, 64])
def test_no_complaint_when_the_counts_are_equal(size):
    assert launcher.slurm_complaint(step(size), size, "Open MPI") is None


@pytest.mark.parametrize("environ", [{}, {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}])
def test_no_complaint_outside_a_step(environ):
    # A batch script's own environment has SLURM_NTASKS; only srun sets SLURM_STEP_NUM_TASKS.
    assert launcher.slurm_complaint(environ, 1, "Open MPI") is None


@pytest.mark.parametrize("text", ["", "four", "-4", "4.0", "4(x2)", " ", "²", "0x4"])
def test_what_is_no_number_is_no_complaint(text):
    assert launcher.slurm_complaint({"SLURM_STEP_NUM_TASKS": text}, 1, "Open MPI") is None


@pytest.mark.parametrize(
    ("vendor", "plugin"),
    [
        ("Open MPI", "pmix"),
        ("MPICH", "pmi2"),
        ("Intel MPI", "pmi2"),
        ("MVAPICH", "pmi2"),
        ("Cray MPICH", "cray_shasta"),
        ("Cray MPI", "cray_shasta"),
    ],
)
def test_complaint_says_what_to_try(vendor, plugin):
    text = launcher.slurm_complaint(step(4), 1, vendor)
    assert f"srun --mpi={plugin}`" in text
    assert "4 tasks" in text
    assert "1 rank:" in text
    assert vendor in text


def test_fewer_tasks_than_ranks_is_wrong_too():
    assert "has 4 ranks:" in launcher.slurm_complaint(step(2), 4, "MPICH")


@pytest.mark.parametrize("mark", ["OMPI_COMM_WORLD_SIZE", "HYDI_CONTROL_FD"])
def test_daemons_of_mpirun_are_exempt(mark):
    # mpirun in an allocation starts one daemon per node by srun; the ranks inherit that step's variables.
    assert launcher.slurm_complaint(step(2, SLURM_STEP_NUM_NODES=2, **{mark: 8}), 8, "Open MPI") is None


def test_one_task_per_node_without_mpirun_is_not_exempt():
    assert launcher.slurm_complaint(step(2, SLURM_STEP_NUM_NODES=2), 1, "Open MPI")


def test_several_tasks_per_node_are_no_daemons():
    assert launcher.slurm_complaint(step(4, SLURM_STEP_NUM_NODES=2, OMPI_COMM_WORLD_SIZE=1), 1, "Open MPI")


def test_only_the_launchers_own_variables_are_shown():
    shown = {"OMPI_COMM_WORLD_RANK": "0", "PMI_RANK": "0", "PMIX_RANK": "0", "SLURM_JOB_ID": "5"}
    hidden = {"OMPI_MCA_secret": "x", "SLURM_JWT": "x", "PMIX_SECURITY_MODE": "x", "HOME": "x", "SLURM_JOB_NAME": "x"}
    assert launcher.variables({**hidden, **shown}) == shown


def test_torchrun_around_mpi():
    """Every process of torchrun would be a COMM_WORLD of its own."""
    said = launcher.complaint({"WORLD_SIZE": "2", "RANK": "1"}, 1, "Open MPI")
    assert "torchrun started 2 processes (WORLD_SIZE), but MPI's COMM_WORLD has 1 rank" in said
    assert "hpctk.ddp.DistributedOptimizer" in said
    assert "mpirun -n 2 python -m mpi4py" in said


@pytest.mark.parametrize(
    ("name", "who"), [("OMPI_COMM_WORLD_SIZE", "Open MPI's mpirun"), ("PMI_SIZE", "mpiexec or srun, by PMI,")]
)
def test_the_mpirun_of_another_mpi(name, who):
    said = launcher.complaint({name: "4"}, 1, "MPICH")
    assert said.startswith(f"{who} started 4 processes ({name})")
    assert "another MPI than MPICH" in said


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"WORLD_SIZE": "4"},  # what some clusters set for a whole job: without RANK it is nobody's
        {"WORLD_SIZE": "2", "RANK": "0"},
        {"WORLD_SIZE": "1", "RANK": "0"},
        {"OMPI_COMM_WORLD_SIZE": "2"},
        {"OMPI_COMM_WORLD_SIZE": "2", "PMI_SIZE": "8"},  # mpirun's own daemons were started by srun
        {"WORLD_SIZE": "many", "RANK": "0", "PMI_SIZE": ""},
    ],
)
def test_no_complaint_where_a_launcher_agrees(environ):
    assert launcher.complaint(environ, 2, "Open MPI") is None


def test_srun_is_still_asked():
    assert launcher.complaint(step(4), 1, "Open MPI").startswith("Slurm started 4 tasks")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, False),
        ({"SLURM_STEP_ID": "0"}, True),
        ({"SLURM_STEP_ID": "0", "OMPI_COMM_WORLD_SIZE": "4"}, False),
        ({"SLURM_JOB_ID": "7"}, False),
    ],
)
def test_who_started_a_rank(environ, expected):
    assert launcher.by_srun(environ) is expected
