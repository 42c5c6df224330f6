"""What kernels leave behind: compiled code on disk for the next process, and the random generators alone."""

import importlib
import json
import pkgutil
import random
import subprocess
import sys

import numpy as np
from jobs import clean_environment

import hpctk.kernels
from hpctk.kernels import compiled, merge, packing, select

#: A little of everything would compile for half a minute; these have all there is to go wrong: an
#: argument that may be None, a kernel that uses an intrinsic, another's module.
PROGRAM = """
import json
import numpy as np
from hpctk.kernels import magnitude, packing, select
residual = np.arange(100, dtype=np.float32)
select.feed_top_k(residual, None, 3, threads=1)
packing.pack_indices(np.arange(5, dtype=np.int32), 10)
used = [magnitude.largest, magnitude.histogram, magnitude.count, magnitude.write_indices, packing._split]
print(json.dumps([[sum(kernel.stats.cache_hits.values()), sum(kernel.stats.cache_misses.values())] for kernel in used]))
"""


def dispatchers():
    for module in pkgutil.iter_modules(hpctk.kernels.__path__, "hpctk.kernels."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if hasattr(value, "overloads") and value.py_func.__module__ == module.name:
                yield f"{module.name}.{name}", value


def test_every_kernel_is_cached_and_releases_the_interpreter():
    found = dict(dispatchers())
    assert len(found) > 15
    for name, kernel in found.items():
        assert kernel._cache.cache_path, name
        assert kernel.targetoptions["nogil"], name
        assert not kernel.targetoptions.get("parallel"), name


def run(cache):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        env=clean_environment(NUMBA_CACHE_DIR=str(cache)),
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_second_process_compiles_nothing(tmp_path):
    assert all(hits == 0 and misses == 1 for hits, misses in run(tmp_path))
    assert all(hits == 1 and misses == 0 for hits, misses in run(tmp_path))


def test_a_kernel_works_where_nothing_can_be_written(monkeypatch):
    def refuse(*, nogil, cache=False):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: ("compiled", function)

    monkeypatch.setattr(compiled.numba, "njit", refuse)
    assert compiled.compiled(len) == ("compiled", len)


def test_no_kernel_touches_a_global_random_generator():
    import torch

    from hpctk.kernels import device

    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    values = np.random.default_rng(0).standard_normal(400_000).astype(np.float32)
    chosen, taken = select.feed_top_k(values, values.copy(), 4000, threads=2)
    select.top_k(values.view(np.uint32), 4000)
    merge.scatter_add(values, *merge.merge(chosen, taken, chosen[::2].copy(), taken[::2].copy()))
    packing.unpack_indices(packing.pack_indices(chosen, len(values)), len(chosen), len(values))
    packing.unpack_signs(packing.pack_signs(values), len(values), 1.0, np.float32)
    packing.unpack(packing.pack(values > 0, 1), 1, np.empty(len(values), np.uint8))
    device.top_k(torch.from_numpy(values), 4000)
    after = random.getstate(), np.random.get_state(), torch.get_rng_state()
    assert before[0] == after[0]
    assert all(np.array_equal(a, b) for a, b in zip(before[1], after[1], strict=True))
    assert torch.equal(before[2], after[2])
