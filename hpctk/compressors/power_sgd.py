"""PowerSGD: a matrix as the product of two thin ones, found by power iteration.

Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization", NeurIPS 2019, arXiv 1905.13727. For M_i, rank i's gradient as a matrix (its first
dimension times all others):

    P = mean_i M_i Q;  P^ = orthonormal basis of P's columns;  Q = mean_i M_i^T P^;  result = P^ Q^T

What travels: P and Q, r * (rows + columns) elements instead of rows * columns; half precision tensors
in float32, in which they are computed. Q is kept and is the next step's start, so that repeated steps
converge to the leading directions. Vectors, and matrices that P and Q would not make smaller, travel
as they are. Each matrix is orthonormalised alone.

Q's columns are scaled to a largest magnitude of 1 before they are used. P^ depends on their directions
only, and M Q would otherwise go like the square of the gradient, out of floating point's range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from hpctk.comm import buffers
from hpctk.compressors.core import arrays, draws, finite
from hpctk.compressors.core.compressor import (
    Compressor,
    Shape,
    State,
    checked_flat,
    checked_pair,
    expect_length,
    is_plain,
    refuse,
)
from hpctk.compressors.core.packet import Packet
from hpctk.errors import HpctkError, TensorError
from hpctk.settings import documented, setting

Tensors = dict[str, torch.Tensor]
AllReduce = Callable[[torch.Tensor], torch.Tensor]

#: Elements of a product that are formed together, to be subtracted.
ROWS = 1 << 20


@documented
@dataclass(eq=False, repr=False)
class PowerSGD(Compressor):
    """Send low-rank factors."""

    combines = "own"

    rank: int = setting(2, "columns of P and Q; not the number of a process", at_least=1)
    seed: int = setting(0, "of the first Q; the same on every rank", at_least=0, at_most=draws.MAX_SEED)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._starts: Tensors = {}

    def aggregate(self, tensors: Mapping[str, torch.Tensor], allreduce: AllReduce) -> Tensors:
        """Return the mean approximations, and leave in each tensor, in place, what this rank did not send.

        Collective if `allreduce` is: it is called twice, or twice for float64 and twice for the rest
        where a model has both. Nothing is changed when this raises. A gradient that is not finite is
        refused before the first call, on the rank that has it: those who call share the verdict first.

        Parameters
        ----------
        tensors : mapping of str to torch.Tensor
            By parameter name, in the same order on every rank. Those that are spared travel as they are.
        allreduce : callable
            Gives the mean over all ranks of a flat tensor; may write into it.

        Returns
        -------
        dict of str to torch.Tensor
            New tensors, the same on every rank. Their mean and the mean of what was left add up to the
            mean of what was given.
        """
        for name, tensor in tensors.items():
            buffers.writable(tensor)
            refuse(finite.first_bad(checked_flat(tensor, name)), tensor.numel(), name)
        rounds = [
            _Round(self, {name: t for name, t in tensors.items() if arrays.working_dtype(t.dtype) == wide}, wide)
            for wide in (torch.float32, torch.float64)
        ]
        for each in rounds:
            each.exchange(allreduce)
        out: Tensors = {}
        for each in rounds:
            out |= each.finish(self._starts)
        return {name: out[name] for name in tensors}

    def low_rank(self, shape: Shape) -> bool:
        """Return whether a tensor of this shape travels as two factors."""
        if len(shape) < 2:
            return False
        rows, columns = shape[0], math.prod(shape[1:])
        return self.rank * (rows + columns) < rows * columns

    def start(self, name: str, matrix: torch.Tensor) -> torch.Tensor:
        """Return Q to start from: the last one of this parameter, random numbers at first."""
        shape = (matrix.shape[1], self.rank)
        kept = self._starts.get(name)
        if kept is None:
            stream = draws.stream(self.seed, draws.stamp(name, 0))
            kept = torch.from_numpy(draws.uniform(stream, math.prod(shape), np.float64) - 0.5).reshape(shape)
        if kept.shape != shape:
            raise TensorError(f"parameter {name!r} needs a start of shape {shape}, but has {tuple(kept.shape)}")
        return kept.to(matrix)

    def feed(self, tensor: torch.Tensor, residual: torch.Tensor, name: str = "") -> Packet:
        """Add tensor to residual in place, compress the sum, leave in residual what the packet does not carry.

        See `Compressor.feed`. Where numbers are so large that only the factors tell whether they, and what they leave,
        are within floating point's range, the sum is formed beside the residual.
        """
        flat, memory = checked_pair(tensor, residual, name)
        shape = tuple(tensor.shape)
        if is_plain(tensor) and is_plain(residual):
            from hpctk.kernels import sums

            total, given = memory.numpy(), flat.numpy()
            if sums.all_below(total, given, self._safe_magnitude(memory, shape, name)):
                sums.add(total, given)
                packet = Packet(self._factors(memory, shape, name, checked=True), shape, tensor.dtype)
                self._withdraw(memory, packet)
                return packet
        beside = memory + flat
        refuse(finite.first_bad(beside), flat.numel(), name)
        packet = self._pack(beside, shape, name, 0)
        self._withdraw(beside, packet)
        memory.copy_(beside)
        buffers.write_back(residual, memory)
        return packet

    def state_dict(self) -> State:
        """Return the start of each parameter's next step, as {name: {"q": tensor}}."""
        return {name: {"q": q.clone()} for name, q in self._starts.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor | int]]) -> None:
        """Replace the starts, by copies."""
        starts = {}
        for name, entry in state.items():
            if set(entry) != {"q"}:
                raise HpctkError(f"the state of {name!r} has {', '.join(sorted(entry))}: need q and nothing else")
            q = entry["q"]
            if not isinstance(q, torch.Tensor) or q.dtype not in (torch.float32, torch.float64):
                raise TensorError(f"q of {name!r}: need a tensor of float32 or float64")
            if q.dim() != 2 or q.shape[1] != self.rank or not finite.all_finite(q):
                raise TensorError(
                    f"q of {name!r} has shape {tuple(q.shape)}: need finite numbers in {self.rank} columns"
                )
            starts[name] = q.detach().clone()
        self._starts = starts

    def _encode(self, flat: torch.Tensor, shape: Shape, name: str, stamp: int) -> torch.Tensor:
        return self._factors(flat, shape, name)

    def _safe_magnitude(self, flat: torch.Tensor, shape: Shape, name: str) -> float:
        """Return a magnitude: where all elements are smaller, factors and what they leave are in range."""
        if not self.low_rank(shape):
            return math.inf
        matrix = flat.reshape(shape[0], -1)
        # A sum of as many products as there are columns; and what `fits` says, of rows.
        largest = max(1.0, float(self.start(name, matrix).abs().max()))
        return torch.finfo(flat.dtype).max / (4.0 * max(matrix.shape) * largest)

    def _factors(self, flat: torch.Tensor, shape: Shape, name: str, *, checked: bool = False) -> torch.Tensor:
        """Return the data of a packet; `checked` says that all elements are below `_safe_magnitude`."""
        if not self.low_rank(shape):
            return flat.clone()
        matrix = flat.reshape(shape[0], -1).to(arrays.working_dtype(flat.dtype))
        before = self.start(name, matrix)
        product = times(matrix, before)
        _in_range(checked or finite.all_finite(product))
        basis = orthonormal(product)
        q = transposed_times(matrix, basis)
        _in_range(checked or fits(matrix, basis, q, flat.dtype))
        self._starts[name] = next_start(q, before)
        return torch.cat([basis.reshape(-1), q.reshape(-1)])

    def _decode(self, packet: Packet) -> torch.Tensor:
        if not self.low_rank(packet.shape):
            expect_length(packet, packet.n, packet.dtype, "a tensor")
            return packet.data.clone()
        basis, q = self._read(packet)
        if buffers.on_device(packet.data) or packet.dtype.itemsize == 2:
            return (basis @ q.T).to(packet.dtype).reshape(-1)
        product = arrays.new_flat(packet.n, packet.dtype)
        torch.mm(basis, q.T, out=product.view(len(basis), len(q)))
        return product

    def _withdraw(self, memory: torch.Tensor, packet: Packet) -> None:
        if not self.low_rank(packet.shape):
            memory.zero_()
            return
        basis, q = self._read(packet)
        left = memory.view(len(basis), len(q))
        # A few rows at a time: their products are subtracted while they are in the cache.
        for rows, part in zip(*(each.tensor_split(-(-memory.numel() // ROWS)) for each in (left, basis)), strict=True):
            rows -= (part @ q.T).to(memory.dtype)

    def _read(self, packet: Packet) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the basis and Q of a packet, views; HpctkError for wrong data."""
        rows, columns = packet.shape[0], math.prod(packet.shape[1:])
        length = self.rank * (rows + columns)
        expect_length(packet, length, arrays.working_dtype(packet.dtype), f"rank {self.rank}")
        basis, q = packet.data.split([self.rank * rows, self.rank * columns])
        return basis.reshape(rows, self.rank), q.reshape(columns, self.rank)


class _Round:
    """One step of the tensors that are computed in one dtype."""

    def __init__(self, settings: PowerSGD, tensors: Tensors, wide: torch.dtype) -> None:
        self.tensors, self.wide = tensors, wide
        self.matrices = {
            name: tensor.detach().reshape(tensor.shape[0], -1).to(wide)
            for name, tensor in tensors.items()
            if settings.low_rank(tuple(tensor.shape)) and not settings.is_excluded(name, tensor)
        }
        self.starts = {name: settings.start(name, matrix) for name, matrix in self.matrices.items()}

    def exchange(self, allreduce: AllReduce) -> None:
        """Find the factors; nothing of the caller's is changed yet."""
        sent = {
            name: times(self.matrices[name], self.starts[name])
            if name in self.matrices
            else tensor.detach().to(self.wide)
            for name, tensor in self.tensors.items()
        }
        self.means = _mean(sent, allreduce)
        self.bases = {name: orthonormal(self.means[name]) for name in self.matrices}
        self.own = {name: transposed_times(matrix, self.bases[name]) for name, matrix in self.matrices.items()}
        for name, matrix in self.matrices.items():
            if not fits(matrix, self.bases[name], self.own[name], self.tensors[name].dtype):
                # Makes the mean NaN, so that all ranks refuse it together.
                self.own[name].fill_(math.nan)
        self.factors = _mean(self.own, allreduce)

    def finish(self, starts: Tensors) -> Tensors:
        """Return the mean approximations; leave the rest in the tensors and the next starts in `starts`."""
        out = {}
        for name, tensor in self.tensors.items():
            if name in self.matrices:
                basis, q = self.bases[name], self.factors[name]
                out[name] = (basis @ q.T).to(tensor.dtype).reshape(tensor.shape)
                # The matrix is the tensor itself where that is contiguous and of the dtype that is computed in.
                left = self.matrices[name].addmm_(basis, self.own[name].T, alpha=-1)
                if left.data_ptr() != tensor.data_ptr():
                    tensor.detach().copy_(left.reshape(tensor.shape))
                starts[name] = next_start(q, self.starts[name])
            else:
                out[name] = self.means[name].to(tensor.dtype)
                tensor.detach().zero_()
        return out


def _mean(sent: Tensors, allreduce: AllReduce) -> Tensors:
    """Return the means of all tensors, by one all-reduce of all of them."""
    flat = torch.cat([tensor.reshape(-1) for tensor in sent.values()]) if sent else torch.empty(0)
    if not flat.numel():
        return {name: tensor.clone() for name, tensor in sent.items()}
    mean = allreduce(flat)
    _in_range(finite.all_finite(mean))
    parts = mean.split([tensor.numel() for tensor in sent.values()])
    # Copies, not parts of one buffer: where memory is aligned differently, products may round differently.
    return {name: part.clone().reshape(tensor.shape) for (name, tensor), part in zip(sent.items(), parts, strict=True)}


def _in_range(answer: bool) -> None:
    if not answer:
        raise TensorError(
            "PowerSGD: the factors of a matrix, or what they leave of it, are beyond floating point's range; "
            "scale the loss down"
        )


def times(matrix: torch.Tensor, thin: torch.Tensor) -> torch.Tensor:
    """Return matrix @ thin. Not in place."""
    if not _for_kernels(matrix, thin):
        return matrix @ thin
    from hpctk.kernels import thin as kernels

    return torch.from_numpy(kernels.times(matrix.numpy(), thin.numpy(), threads=torch.get_num_threads()))


def transposed_times(matrix: torch.Tensor, thin: torch.Tensor) -> torch.Tensor:
    """Return matrix.T @ thin. Not in place."""
    if not _for_kernels(matrix, thin):
        return matrix.T @ thin
    from hpctk.kernels import thin as kernels

    return torch.from_numpy(kernels.transposed_times(matrix.numpy(), thin.numpy(), threads=torch.get_num_threads()))


def _for_kernels(matrix: torch.Tensor, thin: torch.Tensor) -> bool:
    """Return whether `kernels.thin` serves these; one column and many are what BLAS does well."""
    return is_plain(matrix) and matrix.dtype == torch.float32 and 2 <= thin.shape[1] <= 4


def orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Return an orthonormal basis that spans at least the columns; of any kind where those are zero."""
    basis: torch.Tensor = torch.linalg.qr(matrix).Q
    return basis


def fits(matrix: torch.Tensor, basis: torch.Tensor, q: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether basis * q^T, and what it leaves of the matrix, are finite numbers of a dtype."""
    # A projection lengthens no column, so no element grows by more than the root of their number.
    peak = max(abs(extreme.item()) for extreme in torch.aminmax(matrix))
    if peak * (1 + math.sqrt(len(matrix))) <= torch.finfo(dtype).max:
        return True
    part = basis @ q.T
    return finite.all_finite(part.to(dtype)) and finite.all_finite((matrix - part).to(dtype))


def next_start(q: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Return Q for the next step: its columns scaled to a largest magnitude of 1.

    A column of zeros, as a gradient of zeros makes it, would never find a direction again: the one
    before stays.
    """
    peaks = q.abs().amax(0)
    return torch.where(peaks > 0, q / torch.where(peaks > 0, peaks, 1), before)
