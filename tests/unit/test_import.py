"""`import hpctk` and the command's help stay light: nothing heavy is imported and no MPI starts."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from heavy_imports import BLOCKER, INSPECTION
from jobs import clean_environment

import hpctk
from hpctk import __version__


def python(program, *arguments):
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, env=clean_environment(), timeout=60
    )


def test_import_is_light():
    done = python(BLOCKER + "import hpctk\nassert hpctk.__version__\ndir(hpctk)\n" + INSPECTION)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "light\n"


@pytest.mark.parametrize(("option", "shown"), [("--help", "usage: hpctk"), ("--version", f"hpctk {__version__}\n")])
def test_command_line_is_light(option, shown):
    program = f"""
try:
    runpy.run_module("hpctk", run_name="__main__", alter_sys=True)
except SystemExit as leaving:
    assert leaving.code == 0, leaving.code
{INSPECTION}"""
    done = python(BLOCKER + program, option)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(shown)
    assert done.stdout.endswith("light\n")


def test_public_names_are_where_they_are_said_to_be():
    done = python(
        "import mpi4py; mpi4py.rc.initialize = False\n"
        "import hpctk\n"
        "for name in hpctk.__all__: getattr(hpctk, name)\n"
        "assert not hasattr(hpctk, 'no_such_name')\n"
    )
    assert done.returncode == 0, done.stderr


def test_there_is_an_mpi_library_to_find_in_the_maps():
    # Else the inspection above would pass for the wrong reason.
    done = python(
        "import mpi4py; mpi4py.rc.initialize = False\n"
        "from mpi4py import MPI\n"
        "assert 'libmpi' in open('/proc/self/maps').read()\n"
    )
    assert done.returncode == 0, done.stderr


def test_training_without_statistics_needs_no_h5py():
    program = (
        "import sys; sys.modules['h5py'] = None\n"
        "import hpctk, hpctk.ddp; hpctk.DistributedOptimizer; hpctk.StatsSettings; print('trained')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], env=clean_environment(), capture_output=True, text=True, timeout=60
    )
    assert ended.stdout == "trained\n", ended.stderr


@pytest.mark.parametrize(
    "use", ["hpctk.DistributedOptimizer", "hpctk.ddp", "hpctk.metrics.TensorBoard", "hpctk.extend"]
)
def test_no_trainer_is_imported_unless_asked_for(use):
    program = (
        f"import sys, hpctk; {use}\n"
        "print([name for name in ('lightning', 'accelerate', 'tensorboard', 'opentelemetry') if name in sys.modules])"
    )
    done = python(program)
    assert done.stdout == "[]\n", done.stderr


def test_torch_distributed_is_imported_where_its_worlds_are_made():
    """import-linter sees torch as one package, so this is asked here."""
    package = Path(hpctk.__file__).parent
    allowed = (package / "comm" / "torch", package / "ddp", package / "testing")
    for module in package.rglob("*.py"):
        if module == package / "fsdp.py" or any(folder in module.parents for folder in allowed):
            continue
        for node in ast.walk(ast.parse(module.read_text())):
            named = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            named += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            hidden = isinstance(node, ast.ImportFrom) and node.module == "torch.distributed" and node.col_offset
            # Only a type checker reads an import inside `if TYPE_CHECKING:` of the module that chooses the world.
            if hidden and module == package / "comm" / "world.py":
                continue
            assert not any(name.startswith("torch.distributed") for name in named), f"{module}: {named}"
