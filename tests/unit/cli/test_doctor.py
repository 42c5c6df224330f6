"""`hpctk doctor`: advice from facts, and facts from installations that lack something."""

import copy
import json
import subprocess
import sys

import pytest
from jobs import clean_environment

from hpctk.cli import doctor
from hpctk.cli.doctor import render

#: An installation that lacks nothing.
COMPLETE = {
    "hpctk": "0.1.0",
    "python": "3.11.7",
    "system": "Linux",
    "packages": dict.fromkeys(doctor.PACKAGES, "1.0"),
    "torch": {"cuda": None, "devices": 0, "backends": ["gloo"]},
    "kernels": {"compiled": True, "because": ""},
    "mpi": {
        "library": "Open MPI 5.0.11",
        "standard": "3.1",
        "gpu_aware": False,
        "gpu_aware_because": "nothing says so",
        "started": False,
        "mpirun": "bin/mpirun",
    },
    "launcher": {},
    "torchrun": False,
    "horovod": {"mpi": True, "gloo": False},
    "slurm": {"found": True, "version": "slurm 22.05", "mpi_types": ["pmix"]},
    "hdf5": {"library": "1.14", "parallel": False},
    "compiler": {"g++": True, "cmake": True, "make": True},
    "environment": {},
    "unknown_variables": [],
    "bad_settings": [],
}


def changed(section, **values):
    """COMPLETE, with some values of one section changed."""
    facts = copy.deepcopy(COMPLETE)
    facts[section].update(values)
    return facts


def test_nothing_to_advise():
    assert doctor.advise(COMPLETE) == []
    assert not doctor.essential_missing(COMPLETE)


CASES = {
    "no MPI": ({**COMPLETE, "mpi": {"error": "ImportError: no libmpi"}}, ["no libmpi", "pip install 'hpctk[mpi]'"]),
    "no mpirun": (changed("mpi", mpirun=None), ["no mpirun on PATH", "hpctk mpirun"]),
    "threads": (changed("mpi", thread_level="SERIALIZED"), ["THREAD_MULTIPLE"]),
    "no torch": (changed("packages", torch=None), ["no torch", "pip install torch"]),
    "no numba": (
        changed("kernels", compiled=False, because="No module named 'numba'"),
        ["No module named 'numba'", "same bits", "pip install 'hpctk[fast]'"],
    ),
    "GPUs are staged": (changed("torch", devices=2), ["not GPU-aware", "HPCTK_GPU_AWARE=1"]),
    "no Horovod": ({**COMPLETE, "horovod": {"error": "No module"}}, ["no Horovod", "`hpctk setup horovod` builds it"]),
    "Horovod without MPI": (changed("horovod", mpi=False), ["HOROVOD_WITH_MPI=1"]),
    "no h5py": ({**COMPLETE, "hdf5": {"error": "No module"}}, ["no h5py", "pip install h5py"]),
    "no Slurm": ({**COMPLETE, "slurm": {"found": False}}, ["no Slurm", "mpirun"]),
    "Slurm without configuration": (changed("slurm", version=None, mpi_types=[]), ["SLURM_CONF"]),
    "no matplotlib": (changed("packages", matplotlib=None), ["pip install 'hpctk[plot]'"]),
    "misspelt": ({**COMPLETE, "unknown_variables": ["HPCTK_TIMEOUT"]}, ["HPCTK_TIMEOUT,", "HPCTK_TIMEOUT_S"]),
    "bad value": ({**COMPLETE, "bad_settings": ["HPCTK_GPU_AWARE='x': need 0"]}, ["HPCTK_GPU_AWARE='x'"]),
}
ESSENTIAL = {"no MPI", "no torch", "bad value"}


@pytest.mark.parametrize("case", CASES)
def test_one_thing_missing_is_one_piece_of_advice(case):
    facts, words = CASES[case]
    advice = doctor.advise(facts)
    assert len(advice) == 1
    for word in words:
        assert word.rstrip(",") in advice[0]
    assert doctor.essential_missing(facts) == (case in ESSENTIAL)
    # And whatever is missing, there is something to print.
    assert render({**facts, "advice": advice, "next": doctor.next_command(facts)}).startswith("hpctk ")


NO_MPI = {"error": "ModuleNotFoundError: No module named 'mpi4py'"}
NO_HOROVOD = {"error": "No module named 'mpi4py'"}


@pytest.mark.parametrize("way", ["by torchrun", "mpi4py left out"])
def test_without_mpi_a_torchrun_user_lacks_nothing(way):
    facts = {**copy.deepcopy(COMPLETE), "mpi": NO_MPI, "horovod": NO_HOROVOD}
    if way == "by torchrun":
        facts["torchrun"] = True
    else:
        facts["packages"]["mpi4py"] = None
    assert doctor.advise(facts) == []
    assert not doctor.essential_missing(facts)
    assert doctor.next_command(facts).startswith("torchrun ")
    assert ("hpctk[mpi]" in doctor.next_command(facts)) == (way != "by torchrun")
    shown = render({**facts, "advice": [], "next": doctor.next_command(facts)})
    assert "ModuleNotFoundError" not in shown
    assert "next           torchrun " in shown


def test_the_next_command():
    assert doctor.next_command({**COMPLETE, "slurm": {"found": False}}) == "hpctk quickstart"
    assert "hpctk slurm render mpi" in doctor.next_command(COMPLETE)
    assert doctor.next_command(changed("packages", torch=None)) == "pip install torch"
    assert doctor.next_command({**COMPLETE, "mpi": NO_MPI}).startswith("hpctk doctor, once")


def test_a_torch_that_cannot_be_imported_is_essential():
    assert doctor.essential_missing(changed("torch", torch_error="OSError: libcudart"))


def test_gpus_with_an_mpi_that_takes_them():
    facts = changed("torch", devices=2)
    facts["mpi"]["gpu_aware"] = True
    assert doctor.advise(facts) == []


@pytest.mark.parametrize(
    ("torch", "words"),
    [
        ({"devices": 0, "backends": ["gloo"]}, "no device here"),
        ({"devices": 2, "backends": ["gloo"]}, "through host memory, for torch has no NCCL"),
        ({"devices": 2, "backends": ["gloo", "nccl"]}, "by NCCL itself after init_process_group('cpu:gloo,cuda:nccl')"),
        ({"devices": 2, "backends": []}, "hpctk.ddp needs"),
    ],
)
def test_it_tells_how_tensors_travel_in_process_groups(torch, words):
    shown = " ".join(render({**changed("torch", **torch), "advice": [], "next": ""}).split())
    assert words in shown


def test_full_thread_support():
    assert doctor.advise(changed("mpi", thread_level="MULTIPLE")) == []


def test_horovod_needs_a_compiler_first():
    facts = {**COMPLETE, "horovod": {"error": "x"}, "compiler": {"g++": True, "cmake": False, "make": True}}
    assert "install g++, cmake and make first" in doctor.advise(facts)[0]


# The real thing, in installations that lack something.


def run_doctor(*options, **environ):
    """Return the ended `hpctk doctor`, started as from a shell of its own."""
    return subprocess.run(
        [sys.executable, "-m", "hpctk", "doctor", *options],
        capture_output=True,
        text=True,
        env=clean_environment(**environ),
        timeout=120,
    )


def facts_of(done):
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout)


SECRET = "hunter2-do-not-show"
SECRETS = dict.fromkeys(["AWS_SECRET_ACCESS_KEY", "HPCTK_TOKEN", "SLURM_JWT", "OMPI_MCA_x", "PMIX_MCA_x"], SECRET)


@pytest.fixture(scope="module")
def bare_path(tmp_path_factory):
    """A PATH with nothing on it, as in a shell where no environment is activated."""
    return str(tmp_path_factory.mktemp("bin"))


@pytest.fixture(scope="module")
def as_json(bare_path):
    return run_doctor("--json", PATH=bare_path, HPCTK_TIMEOUT_S="7", **SECRETS)


@pytest.mark.parametrize(
    ("text", "types"),
    [
        ("MPI plugin types are...\n\tpmix\n\tnone\n\tcray_shasta\n", ["pmix", "none", "cray_shasta"]),
        ("\tpmi2\nspecific pmix plugin versions available: pmix_v3,pmix_v4\n", ["pmi2", "pmix_v3", "pmix_v4"]),
        ("srun: MPI types are...\nsrun: none\nsrun: openmpi\n", ["none", "openmpi"]),
        ("srun: error: fetch_config: DNS SRV lookup failed\nsrun: fatal: no configuration\n", []),
        ("", []),
    ],
    ids=["22.05", "versions", "old", "no configuration", "nothing"],
)
def test_what_srun_can_start_mpi_with(text, types):
    assert doctor.mpi_types(text) == types


def test_json(as_json):
    facts = facts_of(as_json)
    assert as_json.returncode == 0
    assert facts["hpctk"]
    assert facts["python"].startswith("3.")
    assert all(facts["packages"][name] for name in ("torch", "numpy", "mpi4py", "h5py"))
    assert facts["mpi"]["started"] is False
    assert facts["mpi"]["library"].startswith(("Open MPI", "MPICH"))
    assert "rank" not in facts["mpi"]
    assert facts["torch"].keys() == {"cuda", "devices", "backends"}
    assert facts["environment"]["HPCTK_TIMEOUT_S"] == "7"


def test_nothing_on_the_path_is_advice_not_an_error(as_json):
    facts = facts_of(as_json)
    assert facts["mpi"]["mpirun"] is None
    assert facts["slurm"] == {"found": False}
    assert facts["compiler"] == {"g++": False, "cmake": False, "make": False}
    assert any("no mpirun on PATH" in advice for advice in facts["advice"])


def test_secrets_are_not_shown(as_json, bare_path):
    # The names of misspelt variables are: their values may be anything.
    assert "HPCTK_TOKEN" in as_json.stdout
    as_text = run_doctor(PATH=bare_path, **SECRETS)
    assert as_text.stdout.startswith("hpctk ")
    for text in (as_json.stdout, as_json.stderr, as_text.stdout, as_text.stderr):
        assert SECRET not in text


def shadow(folder, package, program):
    """Put a package of this name before the installed one."""
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text(program)
    return {"PYTHONPATH": str(folder)}


def test_without_mpi4py(tmp_path):
    done = run_doctor("--json", **shadow(tmp_path, "mpi4py", "raise ImportError('mpi4py is not here')"))
    facts = facts_of(done)
    assert done.returncode == 1
    assert facts["mpi"] == {"error": "ImportError: mpi4py is not here"}
    assert "pip install 'hpctk[mpi]'" in facts["advice"][0]
    assert facts["torch"].keys() == {"cuda", "devices", "backends"}


def test_mpi4py_without_an_mpi_library():
    # mpi4py raises RuntimeError then, over several lines.
    done = run_doctor(MPI4PY_LIBMPI="/no/such/libmpi.so")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("MPI "))
    assert "RuntimeError: cannot load MPI library /no/such/libmpi.so" in line
    assert "pip install 'hpctk[mpi]'" in done.stdout.partition("advice")[2]


def test_under_torchrun_a_missing_mpi_is_no_problem():
    done = run_doctor(MPI4PY_LIBMPI="/no/such/libmpi.so", RANK="0", WORLD_SIZE="2")
    assert done.returncode == 0, done.stdout
    assert "cannot be loaded" not in done.stdout
    assert "libmpi" not in done.stdout.partition("Horovod")[0]


def test_a_horovod_that_crashes_takes_only_itself(tmp_path):
    done = run_doctor("--json", **shadow(tmp_path, "horovod", "import os; os.abort()"))
    facts = facts_of(done)
    assert done.returncode == 0
    assert "status -6" in facts["horovod"]["error"]
    assert facts["torch"].keys() == {"cuda", "devices", "backends"}


def test_a_torch_that_crashes_is_said_to(tmp_path):
    done = run_doctor("--json", **shadow(tmp_path, "torch", "import os; os.abort()"))
    assert done.returncode == 1
    assert "status -6" in facts_of(done)["torch"]["torch_error"]


def test_a_bad_setting_is_not_taken_for_a_bad_mpi(tmp_path):
    blocked = shadow(tmp_path, "torch", "raise ImportError('not needed here: a second faster')")
    done = run_doctor("--json", HPCTK_GPU_AWARE="maybe", HPCTK_TIMEOUT_S="soon", **blocked)
    facts = facts_of(done)
    assert done.returncode == 1
    assert facts["mpi"]["gpu_aware"] is False
    assert [advice.partition(":")[0] for advice in facts["advice"][:2]] == [
        "HPCTK_TIMEOUT_S='soon'",
        "HPCTK_GPU_AWARE='maybe'",
    ]
    assert not any("cannot be loaded" in advice for advice in facts["advice"])
