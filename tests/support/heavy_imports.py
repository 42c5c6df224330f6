"""Parts of programs that fail where something heavy is imported, or an MPI library is loaded."""

HEAVY = (
    "torch", "h5py", "horovod", "numba", "matplotlib", "mpi4py.MPI",
    "lightning", "accelerate", "tensorboard", "opentelemetry",
)  # fmt: skip

#: Raises what no `except ImportError` catches: even trying to import one of them is a failure.
BLOCKER = f"""
import runpy, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if any(name == heavy or name.startswith(heavy + ".") for heavy in {HEAVY}):
            raise RuntimeError(name + " must not be imported here")

sys.meta_path.insert(0, Blocker())
"""

INSPECTION = f"""
loaded = [name for name in {HEAVY} if name in sys.modules]
assert not loaded, loaded
assert "libmpi" not in open("/proc/self/maps").read(), "an MPI library is loaded"
print("light")
"""
