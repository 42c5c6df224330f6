"""launch/bind-gpu: which rank gets which GPU, and that nothing is hidden from any; nvidia-smi is a fake."""

import subprocess
from pathlib import Path

import pytest
from jobs import ROOT, clean_environment

SHOW = 'echo "$LOCAL_RANK $HPCTK_GPU ${CUDA_VISIBLE_DEVICES-unset} $*"'


@pytest.fixture
def bind(tmp_path):
    """Run the wrapper on a machine with so many GPUs; None is one without nvidia-smi."""

    def run(gpus, *words, **environ):
        if gpus is not None:
            lines = "".join(
                f"GPU {i}: NVIDIA H100 (UUID: GPU-{i})\n  MIG 1g.10gb Device 0: (UUID: MIG-{i})\n" for i in range(gpus)
            )
            fake = tmp_path / "nvidia-smi"
            fake.write_text(f'#!/bin/sh\ntest "$1" = -L || exit 9\ncat <<E\n{lines}E\n')
            fake.chmod(0o755)
        for program in ("bash", "env", "grep", "hostname", "sh", "cat", "printenv"):
            target = tmp_path / program
            if not target.exists():
                target.symlink_to(next(p for p in (Path("/bin") / program, Path("/usr/bin") / program) if p.exists()))
        env = {k: v for k, v in clean_environment().items() if k not in ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK")}
        env |= {"PATH": str(tmp_path), **environ}
        command = [ROOT / "launch" / "bind-gpu", *(words or ("sh", "-c", SHOW, "x", "a b"))]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=30)

    return run


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize(
    "variable", ["SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PALS_LOCAL_RANKID"]
)
def test_the_local_rank_says_which(bind, variable, rank):
    done = bind(4, **{variable: str(rank)})
    assert done.stdout == f"{rank} {rank} unset a b\n", done.stderr
    assert done.stderr == ""


def test_mpirun_within_slurm_counts_not_its_daemon(bind):
    assert bind(4, SLURM_LOCALID="0", OMPI_COMM_WORLD_LOCAL_RANK="3").stdout.startswith("3 3 ")


def test_what_slurm_made_visible_stays_whole(bind):
    # The count is that of the visible ones, the index among them: CUDA counts so, too.
    done = bind(8, SLURM_LOCALID="1", CUDA_VISIBLE_DEVICES="2,3,GPU-7")
    assert done.stdout == "1 1 2,3,GPU-7 a b\n"
    assert bind(8, SLURM_LOCALID="3", CUDA_VISIBLE_DEVICES="2,3,GPU-7").stdout.startswith("3 0 2,3,GPU-7")


def test_more_ranks_than_gpus_share_them_and_one_says_so(bind):
    said = [bind(2, SLURM_LOCALID=str(rank)) for rank in range(5)]
    assert [one.stdout.split()[1] for one in said] == ["0", "1", "0", "1", "0"]
    assert [bool(one.stderr) for one in said] == [False, False, True, False, False]
    assert "its 2 GPUs" in said[2].stderr


def test_alone_it_takes_the_first(bind):
    assert bind(4).stdout == "0 0 unset a b\n"


def test_it_becomes_the_command(bind):
    assert bind(1, "sh", "-c", "exit 85").returncode == 85
    assert bind(1, "printenv", "HPCTK_GPU", SLURM_LOCALID="0").stdout == "0\n"


def test_print_runs_nothing(bind):
    done = bind(4, "--print", SLURM_LOCALID="2", CUDA_VISIBLE_DEVICES="0,1,2,3")
    assert done.stdout == "LOCAL_RANK=2 HPCTK_GPU=2 CUDA_VISIBLE_DEVICES=0,1,2,3\n"


@pytest.mark.parametrize(
    ("gpus", "environ", "complaint"),
    [
        (None, {}, "no nvidia-smi here"),
        (0, {}, "shows no GPU"),
        (4, {"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES is empty"),
        (4, {"SLURM_LOCALID": "two"}, "SLURM_LOCALID='two'"),
    ],
    ids=["no nvidia-smi", "no GPU", "none given", "no number"],
)
def test_no_gpu_is_said(bind, gpus, environ, complaint):
    done = bind(gpus, **environ)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert done.stdout == ""


def test_wrong_words_are_named(bind):
    done = bind(1, "--pirnt")
    assert done.returncode == 2
    assert "unknown option '--pirnt'" in done.stderr
    assert "examples:" in bind(1, "--help").stdout
