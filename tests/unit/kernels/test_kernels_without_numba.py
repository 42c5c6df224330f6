"""Without numba: every kernel has its form in numpy, with the same bits; hpctk trains and says what is slower."""

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from jobs import ROOT, clean_environment

from hpctk.kernels import (
    cells,
    compiled,
    consensus,
    halves,
    lean,
    levels,
    many,
    merge,
    packing,
    select,
    signs,
    thin,
    updates,
)
from hpctk.kernels.lean import BLOCK

HIDDEN = str(ROOT / "tests" / "support" / "without_numba")
KERNELS = ROOT / "hpctk" / "kernels"
MODULES = sorted(path.stem for path in KERNELS.glob("*.py") if "@compiled" in path.read_text())


def without_numba(*words, timeout=300):
    """Return what Python says where numba cannot be imported."""
    path = f"{HIDDEN}:{ROOT}:{ROOT}/tests/support"
    done = subprocess.run(
        [sys.executable, *words], env=clean_environment(PYTHONPATH=path), capture_output=True, text=True, cwd=ROOT,
        timeout=timeout,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def entered(module):
    """Return the kernels of a module that others than kernels call."""
    tree = ast.parse((KERNELS / f"{module}.py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    made = {one.name for one in functions if any(ast.unparse(mark) == "compiled" for mark in one.decorator_list)}
    inner = {
        call.func.id
        for one in functions if one.name in made
        for call in ast.walk(one) if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    }  # fmt: skip
    outer = {
        node.id for one in functions if one.name not in made for node in ast.walk(one) if isinstance(node, ast.Name)
    }
    return {name for name in made if name not in inner or name in outer}


@pytest.mark.parametrize("module", MODULES)
def test_every_kernel_that_is_called_has_a_form_in_numpy(module):
    plain = importlib.import_module(f"hpctk.kernels.plain.{module}")
    assert [name for name in sorted(entered(module)) if not callable(getattr(plain, name, None))] == []


def results():
    """Return what all kernels make of arrays that end nowhere even, and are long enough for several blocks."""
    found = []

    def take(*things):
        found.extend(thing.tobytes().hex() if isinstance(thing, np.ndarray) else repr(thing) for thing in things)

    for dtype in (np.float32, np.float64):
        for n in (1, 7, 33, 1000, BLOCK + 41, 3 * BLOCK + 5):
            random = np.random.default_rng(n)
            a, b, c = ((random.standard_normal(n) * 10.0 ** random.integers(-12, 6, n)).astype(dtype) for _ in "abc")
            a[:: max(1, n // 3)] = -0.0
            k, copy = max(1, n // 50), a.copy()
            indices, values = select.feed_top_k(copy, b, k)
            take(
                indices,
                values,
                copy,
                select.top_k(a.view(f"u{a.itemsize}"), k),
                *select.pick_top_k(a, b, k, minus=True),
            )
            take(*select.pick_chunks(a, b, 3, 100), *select.pick_chunks(a, None, 5, 33))
            for rule, width in (("sigma", 2), ("signed", 3)):
                take(*cells.cut(a, width, rule), *cells.cut(values, width, rule))
            others, more = select.feed_top_k(copy, c, k)
            take(*merge.merge(indices, values, others, more), merge.not_in(indices, others))
            merge.scatter_add(copy, indices, values)
            packed = packing.pack_indices(indices, n)
            take(copy, packed, packing.unpack_indices(packed, k, n))
            bits = packing.pack_signs(a)
            take(signs.sum_of_magnitudes(a, b), updates.sum_of_magnitudes(a), updates.squared_distance(a, b))
            copy = a.copy()
            signs.take_signs(copy, b, 0.3, bits)
            packing.add_signs(bits, n, 0.7, copy)
            take(copy, bits, packing.unpack_signs(bits, n, 0.1, np.dtype(dtype)))
            for wire, limit in (("float16", 65504.0), ("bfloat16", 3e38)):
                copy, read = a.copy(), np.empty_like(a)
                halves.read(halves.feed(copy, b, wire, limit), wire, read)
                take(copy, read, halves.write(b * dtype(1e-7), wire, limit))
            for codes in (2, 4, 7):
                copy, key, counter = a.copy(), np.arange(2, dtype=np.uint64), np.arange(4, dtype=np.uint64)
                data = levels.write(copy, b, codes, 136, 136 * 12, 1e30, key, counter)
                norms = -(-n // 136) * a.itemsize
                levels.read(data[:norms].copy().view(dtype), data[norms:], codes, 136, read)
                take(copy, data, read)
            x, p, q = a.copy(), b.copy(), c.copy()
            updates.move_ahead(x, p, q)
            updates.take_back(x, p, q)
            take(x, p, q)
            start = 3
            own = np.zeros((n + start + 7) // 8, np.uint8)
            take(lean.pack_signs(a, b, start, own))
            x, p = a.copy(), b.copy()
            lean.move_by_signs(x, p, start, own, 0.2, np.stack([own, own[::-1]]), [0.5, 0.25])
            matrix = a[: n // 7 * 7].reshape(-1, 7).astype(np.float32)
            weights = random.standard_normal((2, max(7, len(matrix)), 2 + n % 3)).astype(np.float32)
            take(
                thin.times(matrix, weights[0, :7], threads=2),
                thin.transposed_times(matrix, weights[1, : len(matrix)], threads=2),
            )
            parts, inner, squared = np.stack([a, b, c]), np.ones(3), np.zeros(3)
            consensus.add_products(parts, n // 5, n, inner, squared, x, 1)
            consensus.weighted_sum(parts, n // 5, n, np.array([0.3, 0.1, -0.7], dtype), read, 2)
            take(inner, squared, read)
            target, written = c.copy(), np.empty((n + 7) // 8, np.uint8)
            take(
                own, x, p, lean.add_and_pack(target, np.stack([bits, bits[::-1]]), [0.1, 0.7], written), target, written
            )
            lean.move_at(x, p, 0, indices, others, more)
            take(x, p)
            rows, kept = [part.copy() for part in np.array_split(a, 3)], [part.copy() for part in np.array_split(b, 3)]
            edges = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
            at, held = (np.array([row.ctypes.data for row in some]) for some in (rows, kept))
            sizes = np.minimum(np.diff(edges), k)
            places = np.cumsum(sizes) - sizes
            into, taken = np.empty(sizes.sum(), np.int64), np.empty(sizes.sum(), dtype)
            inf = select.INFINITY[a.dtype.char]
            take(*(int(one) for one in many.largest(at, edges, inf, a)), many.first_bad_sum(held, at, edges, inf, a))
            many.take_largest(held, at, edges, np.arange(3), sizes, places, into, taken)
            many.write_sparse(at, edges, into, taken, True)
            take(into, taken, *rows, *kept)
    return found


def test_the_bits_are_the_same():
    assert compiled.missing is None
    program = (
        f"import sys, json; sys.path.insert(0, {str(Path(__file__).parent)!r}); import {Path(__file__).stem} as test\n"
    )
    program += "assert test.compiled.missing is not None; print(json.dumps(test.results()))"
    told = json.loads(without_numba("-c", program))
    wanted = results()
    assert len(told) == len(wanted)
    assert [number for number, pair in enumerate(zip(told, wanted, strict=True)) if pair[0] != pair[1]] == []


@pytest.mark.full
def test_the_kernels_pass_their_own_tests():
    files = [str(path) for path in sorted(Path(__file__).parent.glob("test_kernels_*.py")) if path != Path(__file__)]
    # Without numba there is nothing compiled, no function inside of a kernel, and more memory is taken.
    left_out = "not kernels_cache and not numpys_order and not philoxs and not test_memory"
    assert " passed" in without_numba("-m", "pytest", "-q", "-k", left_out, *files)


def test_numba_is_not_needed_to_train(tmp_path):
    words = ["digits", "--method", "saef", "--compressor", "topk:0.1", "--epochs", "1", "--run", str(tmp_path / "run")]
    assert "accuracy" in without_numba("-m", "hpctk", "train", *words)


def test_the_doctor_says_so():
    facts = json.loads(without_numba("-m", "hpctk", "doctor", "--json"))
    assert facts["kernels"] == {"compiled": False, "because": "No module named 'numba'"}
    assert any("hpctk[fast]" in sentence for sentence in facts["advice"])
