"""Two models, x and the parameters p, and what is sent of x - p: nothing of the size of the model is written but them.

What SAEF does after the base optimizer's step (methods/core/step_ahead.py): it reads the difference, sends some of it,
and moves both. p is one array for each parameter, x lies in one piece; so all functions are about one tensor, which
begins at element `start` of the whole. Signs are packed as in packing.py, of the whole: a tensor may begin inside of a
byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hpctk.kernels.compiled import compiled, intrinsic, ir, types
from hpctk.kernels.threads import WORTH_A_THREAD, share, spans

Array = NDArray[Any]
Bytes = NDArray[np.uint8]

#: Elements of one vector: four bytes of signs.
LANES = 32
#: Elements that are summed in one go: the order of a sum does not depend on how threads share it.
BLOCK = 1 << 16


def move_at(x: Array, p: Array, start: int, sent: Array, indices: Array, values: Array) -> None:
    """Let p be x at the indices that were sent; then subtract values at indices from both. In place.

    Indices count from the beginning of the whole, ascend, and lie inside of this tensor.
    """
    _move_at(x, p, start, sent, indices, values)


def pack_signs(x: Array, p: Array, start: int, packed: Bytes, *, threads: int | None = None) -> float:
    """Return ||x - p||_1, summed in float64, and set the bits of `packed` where x - p is below zero, in place.

    One pass. The bits of this tensor must be zero before. The sum is the same for any number of threads; it is not
    finite where an element of x - p is not.
    """
    head = min(-start % 8, len(x))
    sums = np.zeros(-(-(len(x) - head) // BLOCK) + 1)
    sums[0] = _pack_bits(x, p, start, 0, head, packed)
    body = packed[(start + head) // 8 :]
    calls = [
        (x[head:], p[head:], body, sums[1:], lo // BLOCK, -(-hi // BLOCK))
        for lo, hi in spans(len(x) - head, threads, align=BLOCK)
    ]
    share(_pack_blocks, calls)
    return float(sums.sum())


def move_by_signs(
    x: Array,
    p: Array,
    start: int,
    own: Bytes,
    scale: float,
    rows: Array,
    scales: Sequence[float],
    *,
    threads: int | None = None,
) -> None:
    """Subtract the sum of all rows' signs from x, and from p, to which this rank's own are added first. In place.

        o = sum_r scales[r] * sign of rows[r];   x <- x - o;   p <- p + scale * sign of own - o

    One pass, in the arrays' dtype; rows are added up from 0 in their order.
    """
    head = min(-start % 8, len(x))
    kinds = x.dtype.type(scale), np.asarray(scales, x.dtype)
    _move_bits(x, p, start, 0, head, own, kinds[0], rows, kinds[1])
    x, p, first = x[head:], p[head:], (start + head) // 8
    own, rows = own[first:], rows[:, first:]
    whole = len(x) // LANES * LANES
    if whole < WORTH_A_THREAD:
        _move_blocks(x, p, 0, whole, own, kinds[0], rows, kinds[1])
    else:
        calls = [(x, p, lo, hi, own, kinds[0], rows, kinds[1]) for lo, hi in spans(whole, threads, align=LANES)]
        share(_move_blocks, calls)
    _move_bits(x, p, 0, whole, len(x), own, kinds[0], rows, kinds[1])


def add_and_pack(
    target: Array, rows: Array, scales: Sequence[float], packed: Bytes, *, threads: int | None = None
) -> float:
    """Add all rows' signs to the target, write its own signs into `packed`, both in place, and return its 1-norm.

        target <- target + sum_r scales[r] * sign of rows[r], one after the other

    One pass. Rows and `packed` are as long as the target's signs. The norm, in float64, is the same for any number of
    threads.
    """
    sums = np.zeros(-(-len(target) // BLOCK))
    packed[:] = 0
    kinds = np.asarray(scales, target.dtype)
    calls = [
        (target, rows, kinds, packed, sums, lo // BLOCK, -(-hi // BLOCK))
        for lo, hi in spans(len(target), threads, align=BLOCK)
    ]
    share(_add_and_pack, calls)
    return float(sums.sum())


if TYPE_CHECKING:

    def below_zero(x: Any, p: Any, base: int, sums: Any) -> Any: ...
    def add_signed(out: Any, base: int, mask: Any, scale: Any) -> None: ...

else:

    def _lanes(context, builder, kind, array, base):
        """Return a pointer to a vector of an array's elements."""
        start = builder.gep(context.make_array(kind)(context, builder, array).data, [base])
        return builder.bitcast(start, ir.VectorType(context.get_data_type(kind.dtype), LANES).as_pointer())

    @intrinsic
    def below_zero(typing, x, p, base, sums):
        """Return a mask, from `base` on, of what is below zero in x - p, and add the magnitudes to LANES sums.

        In x alone where p is None.
        """
        nbytes = x.dtype.bitwidth // 8

        def build(context, builder, signature, arguments):
            apart = builder.load(_lanes(context, builder, x, arguments[0], arguments[2]), align=nbytes)
            if p is not types.none:
                other = builder.load(_lanes(context, builder, p, arguments[1], arguments[2]), align=nbytes)
                apart = builder.fsub(apart, other)
            zeros = ir.Constant(apart.type, [0.0] * LANES)
            mask = builder.bitcast(builder.fcmp_ordered("<", apart, zeros), ir.IntType(LANES))
            bits = ir.VectorType(ir.IntType(8 * nbytes), LANES)
            unsigned = ir.Constant(bits, [2 ** (8 * nbytes - 1) - 1] * LANES)
            magnitudes = builder.bitcast(builder.and_(builder.bitcast(apart, bits), unsigned), apart.type)
            wide = ir.VectorType(ir.DoubleType(), LANES)
            if magnitudes.type != wide:
                magnitudes = builder.fpext(magnitudes, wide)
            sums_at = _lanes(context, builder, sums, arguments[3], context.get_constant(types.intp, 0))
            builder.store(builder.fadd(builder.load(sums_at, align=8), magnitudes), sums_at, align=8)
            return mask

        return types.uint32(x, p, types.intp, sums), build

    @intrinsic
    def add_signed(typing, out, base, mask, scale):
        """Add scale, or -scale where the mask's bit is 1, to a vector of `out` from `base` on."""
        nbytes = out.dtype.bitwidth // 8

        def build(context, builder, signature, arguments):
            at = _lanes(context, builder, out, arguments[0], arguments[1])
            vector, number = ir.VectorType(arguments[3].type, LANES), ir.IntType(32)

            def everywhere(scalar):
                nothing = ir.Constant(vector, ir.Undefined)
                one = builder.insert_element(nothing, scalar, number(0))
                return builder.shuffle_vector(one, nothing, ir.Constant(ir.VectorType(number, LANES), [0] * LANES))

            bits = builder.bitcast(arguments[2], ir.VectorType(ir.IntType(1), LANES))
            plus, minus = everywhere(arguments[3]), everywhere(builder.fneg(arguments[3]))
            moved = builder.fadd(builder.load(at, align=nbytes), builder.select(bits, minus, plus))
            builder.store(moved, at, align=nbytes)
            return context.get_dummy_value()

        return types.void(out, types.intp, types.uint32, scale), build


@compiled
def _move_at(x: Array, p: Array, start: int, sent: Array, indices: Array, values: Array) -> None:
    for i in range(len(sent)):
        p[sent[i] - start] = x[sent[i] - start]
    for i in range(len(indices)):
        at = indices[i] - start
        x[at] -= values[i]
        p[at] -= values[i]


@compiled
def _pack_bits(x: Array, p: Array | None, start: int, first: int, last: int, packed: Bytes) -> float:
    total = 0.0
    for i in range(first, last):
        apart = x[i] if p is None else x[i] - p[i]
        total += abs(np.float64(apart))
        if apart < 0:
            packed[(start + i) >> 3] |= np.uint8(1 << ((start + i) & 7))
    return total


@compiled
def _pack_blocks(x: Array, p: Array, packed: Bytes, sums: Array, first: int, last: int) -> None:
    lanes = np.empty(LANES, np.float64)
    for block in range(first, last):
        lanes[:] = 0
        stop = min((block + 1) * BLOCK, len(x))
        whole = stop - (stop - block * BLOCK) % LANES
        for base in range(block * BLOCK, whole, LANES):
            mask = below_zero(x, p, base, lanes)
            for byte in range(4):
                packed[(base >> 3) + byte] = (mask >> np.uint32(8 * byte)) & np.uint32(255)
        total = _pack_bits(x, p, 0, whole, stop, packed)
        for i in range(LANES):
            total += lanes[i]
        sums[block] = total


@compiled
def _add_and_pack(target: Array, rows: Array, scales: Array, packed: Bytes, sums: Array, first: int, last: int) -> None:
    lanes = np.empty(LANES, np.float64)
    for block in range(first, last):
        lanes[:] = 0
        stop = min((block + 1) * BLOCK, len(target))
        whole = stop - (stop - block * BLOCK) % LANES
        for base in range(block * BLOCK, whole, LANES):
            for r in range(len(rows)):
                add_signed(target, base, np.uint32(_mask_at(rows[r], base >> 3)), scales[r])
            mask = below_zero(target, None, base, lanes)
            for byte in range(4):
                packed[(base >> 3) + byte] = (mask >> np.uint32(8 * byte)) & np.uint32(255)
        for i in range(whole, stop):
            for r in range(len(rows)):
                target[i] += -scales[r] if rows[r, i >> 3] >> (i & 7) & 1 else scales[r]
        total = _pack_bits(target, None, 0, whole, stop, packed)
        for i in range(LANES):
            total += lanes[i]
        sums[block] = total


@compiled
def _mask_at(data: Bytes, first: int) -> Any:
    mask = np.uint32(data[first]) | np.uint32(data[first + 1]) << np.uint32(8)
    return mask | np.uint32(data[first + 2]) << np.uint32(16) | np.uint32(data[first + 3]) << np.uint32(24)


@compiled
def _move_blocks(x: Array, p: Array, first: int, last: int, own: Bytes, scale: Any, rows: Array, scales: Array) -> None:
    moved = np.empty(LANES, x.dtype)
    for base in range(first, last, LANES):
        moved[:] = 0
        for r in range(len(rows)):
            add_signed(moved, 0, np.uint32(_mask_at(rows[r], base >> 3)), scales[r])
        add_signed(p, base, np.uint32(_mask_at(own, base >> 3)), scale)
        x_part, p_part = x[base : base + LANES], p[base : base + LANES]
        for i in range(len(x_part)):
            x_part[i] -= moved[i]
            p_part[i] -= moved[i]


@compiled
def _move_bits(
    x: Array, p: Array, start: int, first: int, last: int, own: Bytes, scale: Any, rows: Array, scales: Array
) -> None:
    for i in range(first, last):
        byte, bit = (start + i) >> 3, (start + i) & 7
        moved = x.dtype.type(0)
        for r in range(len(rows)):
            moved += -scales[r] if rows[r, byte] >> bit & 1 else scales[r]
        p[i] += -scale if own[byte] >> bit & 1 else scale
        x[i] -= moved
        p[i] -= moved
