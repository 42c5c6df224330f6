"""Reading the launcher from the environment, above all srun that started N jobs of one rank each."""

import pytest

from hpctk import launcher


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
    hidden = {
        "OMPI_MCA_secret": "x",
        "SLURM_JWT": "x",
        "PMIX_SECURITY_MODE": "x",
        "HOME": "x",
        "SLURM_JOB_NAME": "x",
    }
    assert launcher.variables({**hidden, **shown}) == shown
