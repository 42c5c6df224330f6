"""Kernels on two models, x and p, against plain numpy: the difference of both is never written down."""

from itertools import pairwise

import numpy as np
import pytest

from hpctk.kernels import lean, packing

#: Lengths of tensors: inside of a byte, across bytes and vectors, and shared by threads.
LENGTHS = {"one": [1], "bytes": [5, 1, 1, 9, 64, 31], "vectors": [100, 3, 37, 70_001], "threads": [3, 400_009, 12]}


@pytest.fixture(params=LENGTHS.values(), ids=LENGTHS)
def lengths(request):
    return request.param


@pytest.fixture(params=[np.float32, np.float64])
def dtype(request):
    return request.param


class Models:
    """x in one piece, p in as many as there are tensors; equal at every seventh element."""

    def __init__(self, lengths, dtype):
        rng = np.random.default_rng(len(lengths))
        self.edges = np.cumsum([0, *lengths])
        self.n = int(self.edges[-1])
        self.x, whole = (rng.standard_normal(self.n).astype(dtype) for _ in range(2))
        whole[::7] = self.x[::7]
        self.parts = [part.copy() for part in np.split(whole, self.edges[1:-1])]

    @property
    def p(self):
        return np.concatenate(self.parts)

    def tensors(self):
        for (lo, hi), part in zip(pairwise(self.edges), self.parts, strict=True):
            yield self.x[lo:hi], part, int(lo)


def test_signs_and_one_norm_of_the_difference(lengths, dtype):
    models = Models(lengths, dtype)
    apart = models.x - models.p
    norms = set()
    for threads in (1, 2, 3):
        packed = np.zeros(packing.packed_length(models.n, 1), np.uint8)
        norms.add(sum(lean.pack_signs(*tensor, packed, threads=threads) for tensor in models.tensors()))
        assert packed.tolist() == packing.pack_signs(apart).tolist()
    assert len(norms) == 1, "the order of the sum depends on the number of threads"
    assert norms.pop() == pytest.approx(np.abs(apart).sum(dtype=np.float64), rel=1e-13)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 40, 69_000, 70_140])
def test_the_norm_tells_what_is_not_finite(value, at):
    models = Models(LENGTHS["vectors"], np.float32)
    models.x[at] = value
    packed = np.zeros(packing.packed_length(models.n, 1), np.uint8)
    assert not np.isfinite(sum(lean.pack_signs(*tensor, packed) for tensor in models.tensors()))


@pytest.mark.parametrize("ranks", [1, 3])
def test_both_models_move_by_signs(lengths, dtype, ranks):
    models = Models(lengths, dtype)
    rng = np.random.default_rng(ranks)
    packed = [packing.pack_signs(rng.standard_normal(models.n)) for _ in range(ranks + 1)]
    own, rows, scales = packed[0], np.stack(packed[1:]), [0.1, 0.25, 0.3][:ranks]
    moved = np.zeros(models.n, dtype)
    for row, scale in zip(rows, scales, strict=True):
        packing.add_signs(row, models.n, scale, moved)
    p = models.p
    packing.add_signs(own, models.n, 0.7, p)
    wanted = models.x - moved, p - moved
    for tensor in models.tensors():
        lean.move_by_signs(*tensor, own, 0.7, rows, scales, threads=3)
    assert models.x.tobytes() == wanted[0].tobytes()
    assert models.p.tobytes() == wanted[1].tobytes()


def test_both_models_move_at_some_elements(lengths, dtype):
    models = Models(lengths, dtype)
    rng = np.random.default_rng(0)
    sent, indices = (np.flatnonzero(rng.random(models.n) < part).astype(np.int32) for part in (0.1, 0.3))
    values = rng.standard_normal(len(indices)).astype(dtype)
    x, p = models.x.copy(), models.p
    p[sent] = x[sent]
    x[indices] -= values
    p[indices] -= values
    for tensor in models.tensors():
        (a, b), (lo, hi) = (np.searchsorted(each, [tensor[2], tensor[2] + len(tensor[1])]) for each in (sent, indices))
        lean.move_at(*tensor, sent[a:b], indices[lo:hi], values[lo:hi])
    assert models.x.tobytes() == x.tobytes()
    assert models.p.tobytes() == p.tobytes()


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("n", [0, 1, 31, 32, 70_001, 400_009])
def test_adding_rows_packing_and_summing_at_once(dtype, n, ranks):
    rng = np.random.default_rng(n)
    target = rng.standard_normal(n).astype(dtype)
    target[::7] = 0.25
    rows = np.stack([packing.pack_signs(rng.standard_normal(n)) for _ in range(ranks)])
    scales = [0.25, 0.5, 0.3][:ranks]
    wanted = target.copy()
    for row, scale in zip(rows, scales, strict=True):
        packing.add_signs(row, n, scale, wanted)
    norms = set()
    for threads in (1, 3):
        got, packed = target.copy(), np.full(packing.packed_length(n, 1), 255, np.uint8)
        norms.add(lean.add_and_pack(got, rows, scales, packed, threads=threads))
        assert got.tobytes() == wanted.tobytes()
        assert packed.tolist() == packing.pack_signs(wanted).tolist()
    assert len(norms) == 1
    assert norms.pop() == pytest.approx(np.abs(wanted).sum(dtype=np.float64), rel=1e-13)
