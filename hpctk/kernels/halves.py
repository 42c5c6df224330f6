"""float16 and bfloat16 as their bits: conversions from and to float32 and float64, alone and with error feedback.

Rounded to nearest even, from float64 by way of float32, as torch does. What is converted is cut off at a limit first,
so that nothing finite becomes infinite. To float16 by the processor's own instruction where it has one (x86's F16C,
every 64-bit ARM), which takes a third of the time; otherwise, and for bfloat16, by bit arithmetic on whole vectors, to
the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hpctk.kernels.compiled import compiled, intrinsic, ir, types
from hpctk.kernels.threads import WORTH_A_THREAD, share, spans

Array = NDArray[Any]
Halves = NDArray[np.uint16]


def write(values: Array, wire: str, limit: float, *, threads: int | None = None) -> Halves:
    """Return values, of float32 or float64, cut off at +-limit, as 16 bits each. Not in place.

    `wire` is float16 or bfloat16; the limit is at most the largest number it has.
    """
    halves = np.empty(len(values), np.uint16)
    _share(_write16 if wire == "float16" else _write_b16, threads, [values, halves], values.dtype.type(limit))
    return halves


def read(halves: Halves, wire: str, values: Array, *, threads: int | None = None) -> None:
    """Write the numbers that 16 bits each stand for into `values`, of float32 or float64."""
    _share(_read16 if wire == "float16" else _read_b16, threads, [halves, values])


def feed(residual: Array, gradient: Array, wire: str, limit: float, *, threads: int | None = None) -> Halves:
    """Return `write` of residual + gradient, and leave in the residual what that misses; in place.

    Arrays of one float dtype, flat, contiguous and of one length. The sum must be finite: not checked here.
    """
    halves = np.empty(len(residual), np.uint16)
    kernel = _feed16 if wire == "float16" else _feed_b16
    _share(kernel, threads, [residual, gradient, halves], residual.dtype.type(limit))
    return halves


def _share(kernel: Any, threads: int | None, given: list[Array], *more: Any) -> None:
    n = len(given[0])
    if any(len(array) != n for array in given):
        raise ValueError(f"arrays of {' and '.join(str(len(array)) for array in given)} elements")
    if n < WORTH_A_THREAD:
        kernel(*given, *more)
        return
    share(kernel, [(*(array[lo:hi] for array in given), *more) for lo, hi in spans(n, threads)])


if TYPE_CHECKING:

    def _bits(value: Any) -> Any: ...

    def _float(value: Any) -> Any: ...
    def _has_halves() -> bool: ...
    def _nearest16(value: Any) -> Any: ...
    def _exact16(half: Any) -> Any: ...

else:

    @intrinsic
    def _bits(typing, value):
        """Return the bits of a float32."""

        def build(context, builder, signature, arguments):
            return builder.bitcast(arguments[0], context.get_value_type(types.uint32))

        return types.uint32(types.float32), build

    @intrinsic
    def _float(typing, value):
        """Return the float32 of some bits."""

        def build(context, builder, signature, arguments):
            return builder.bitcast(arguments[0], context.get_value_type(types.float32))

        return types.float32(types.uint32), build

    @intrinsic
    def _has_halves(typing):
        """Return whether the processor that is compiled for converts float16 by itself: a constant."""

        def build(context, builder, signature, arguments):
            machine, _, features = context.codegen().magic_tuple()
            return ir.Constant(ir.IntType(1), machine.startswith(("aarch64", "arm64")) or "+f16c" in features)

        return types.boolean(), build

    @intrinsic
    def _nearest16(typing, value):
        """Return what `_to16` does, by the processor; only where it `_has_halves`, others would need a function."""

        def build(context, builder, signature, arguments):
            half = builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))
            return builder.zext(half, ir.IntType(32))

        return types.uint32(types.float32), build

    @intrinsic
    def _exact16(typing, half):
        """Return what `_from16` does of a finite half, by the processor; only where it `_has_halves`."""

        def build(context, builder, signature, arguments):
            bits = builder.trunc(arguments[0], ir.IntType(16))
            return builder.fpext(builder.bitcast(bits, ir.HalfType()), ir.FloatType())

        return types.float32(types.uint32), build


@compiled
def _cut(value: Any, limit: Any) -> Any:
    return np.float32(limit if value > limit else -limit if value < -limit else value)


@compiled
def _to16(value: Any) -> Any:
    """Return the bits, in a uint32, of the float16 nearest to a float32 of at most 65504."""
    bits = _bits(value)
    sign = bits & np.uint32(0x8000_0000)
    bits ^= sign
    # Below float16's normal numbers, adding 0.5 rounds to a multiple of 2^-24 and leaves it in the lowest bits.
    small = _bits(_float(bits) + np.float32(0.5)) - np.uint32(0x3F00_0000)
    # Above, the exponent's bias goes from 127 to 15, and half a unit in the last place, less for even ones, rounds.
    odd = (bits >> np.uint32(13)) & np.uint32(1)
    normal = (bits - np.uint32(0x3800_0000) + np.uint32(0xFFF) + odd) >> np.uint32(13)
    half = small if bits < np.uint32(0x3880_0000) else normal
    return half | (sign >> np.uint32(16))


@compiled
def _from16(half: Any) -> Any:
    """Return the float32 of float16's bits in a uint32."""
    bits = (half & np.uint32(0x7FFF)) << np.uint32(13)
    exponent = bits & np.uint32(0x0F80_0000)
    bits += np.uint32(0x3800_0000)
    # inf and NaN
    special = bits + np.uint32(0x3800_0000)
    # Below the normal numbers: as 2^-14 and a fraction, less 2^-14; no step passes through float32's denormals.
    small = _bits(_float(bits + np.uint32(0x0080_0000)) - np.float32(2.0**-14))
    bits = small if exponent == 0 else special if exponent == np.uint32(0x0F80_0000) else bits
    return _float(bits | ((half & np.uint32(0x8000)) << np.uint32(16)))


@compiled
def _to_b16(value: Any) -> Any:
    """Return the bits, in a uint32, of the bfloat16 nearest to a float32 that does not round to infinity."""
    bits = _bits(value)
    return (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)


@compiled
def _from_b16(half: Any) -> Any:
    return _float(half << np.uint32(16))


@compiled
def _write16(values: Array, halves: Halves, limit: Any) -> None:
    for i in range(len(values)):
        value = _cut(values[i], limit)
        halves[i] = _nearest16(value) if _has_halves() else _to16(value)


@compiled
def _write_b16(values: Array, halves: Halves, limit: Any) -> None:
    for i in range(len(values)):
        halves[i] = _to_b16(_cut(values[i], limit))


@compiled
def _read16(halves: Halves, values: Array) -> None:
    for i in range(len(values)):
        values[i] = _from16(np.uint32(halves[i]))


@compiled
def _read_b16(halves: Halves, values: Array) -> None:
    for i in range(len(values)):
        values[i] = _from_b16(np.uint32(halves[i]))


@compiled
def _feed16(residual: Array, gradient: Array, halves: Halves, limit: Any) -> None:
    for i in range(len(residual)):
        total = residual[i] + gradient[i]
        value = _cut(total, limit)
        half = _nearest16(value) if _has_halves() else _to16(value)
        halves[i] = half
        residual[i] = total - (_exact16(half) if _has_halves() else _from16(half))


@compiled
def _feed_b16(residual: Array, gradient: Array, halves: Halves, limit: Any) -> None:
    for i in range(len(residual)):
        total = residual[i] + gradient[i]
        half = _to_b16(_cut(total, limit))
        halves[i] = half
        residual[i] = total - _from_b16(half)
