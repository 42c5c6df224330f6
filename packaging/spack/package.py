"""Spack's recipe for hpctk: copy it to packages/py_hpctk/package.py of a repository of yours (spack repo create)."""

from spack.package import *


class PyHpctk(PythonPackage):
    """Data-parallel training that needs less network: published methods, own collective schedules over MPI."""

    # EDIT: where your copy of the project is; `spack develop py-hpctk@0.2.0` takes a checkout instead.
    git = "file:///path/to/hpctk"

    license("Apache-2.0")

    version("0.2.0", tag="v0.2.0")
    version("main", branch="main")

    variant("horovod", default=False, description="For jobs that use Horovod")
    variant("fast", default=True, description="Kernels compiled by numba; numpy does the same, slower")
    variant("plot", default=True, description="Pictures in reports")

    depends_on("python@3.11:", type=("build", "run"))
    depends_on("py-setuptools@64:80", type="build")
    depends_on("py-numpy@1.26:", type=("build", "run"))
    depends_on("py-mpi4py@4:", type=("build", "run"))
    depends_on("py-h5py@3.10: ~mpi", type=("build", "run"))
    depends_on("py-torch@2.3:", type=("build", "run"))
    depends_on("py-numba@0.60:", type="run", when="+fast")
    depends_on("py-horovod@0.28.1: controllers=mpi frameworks=pytorch", type="run", when="+horovod")
    depends_on("py-matplotlib@3.8:", type="run", when="+plot")

    # hpctk.horovod is left out: importing it starts MPI.
    import_modules = ["hpctk", "hpctk.cli", "hpctk.ddp", "hpctk.methods", "hpctk.compressors", "hpctk.schedules"]
