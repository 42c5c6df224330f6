"""What must hold of a compressor: nothing is lost, nothing is changed that is not its own, claims are true."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial

import torch

from hpctk.compressors import Compressor, Packet, Residuals
from hpctk.errors import HpctkError, TensorError

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
#: Tensors that make trouble.
EDGES = {
    "an empty tensor": torch.zeros(0),
    "an empty matrix": torch.zeros(3, 0, 2),
    "a scalar": torch.tensor(-1.5),
    "one element": torch.tensor([0.25]),
    "zeros": torch.zeros(4, 33),
    "minus zeros": torch.full((17,), -0.0),
    "equal elements": torch.full((6, 50), 0.1),
    "ties": torch.tensor([1.0, -1.0, 1.0, 0.5, -1.0, 0.5, -0.5, 0.5, 0.0]),
    "denormals": torch.tensor([6e-8, -1.2e-7, 0.0, 6e-8, 1.8e-7] * 8).reshape(8, 5),
    "many elements": torch.linspace(-3, 3, 2**16 + 13),
    "a wide range": torch.logspace(-30, 4, 60).reshape(6, 10),
    "a matrix of rank one": torch.outer(torch.arange(1.0, 21), torch.arange(-7.0, 13)),
}


def check_compressor(make: Callable[[], Compressor]) -> None:
    """Hold a compressor to what hpctk's own are held to. Raise AssertionError with what does not hold.

    Parameters
    ----------
    make : callable
        Returns a new compressor, always with the same settings: some remember, and checks must not depend on each
        other.
    """
    _check_settings(make)
    for name, tensor in _tensors():
        _check_packets(make(), name, tensor)
        _check_conservation(make(), name, tensor)
    for dtype in DTYPES:
        _check_refusals(make, dtype)
    _check_everything_is_sent(make())
    _check_memory(make)


def _tensors() -> Iterator[tuple[str, torch.Tensor]]:
    drawn = torch.randn(7, 8, 5, generator=torch.Generator().manual_seed(5))
    for dtype in DTYPES:
        for name, tensor in EDGES.items():
            yield f"{name} of {dtype}", tensor.to(dtype)
        for scale in (1e-3, 1.0, 100.0):
            yield f"normal numbers times {scale} of {dtype}", (drawn * scale).to(dtype)
        yield f"a transposed tensor of {dtype}", drawn.to(dtype).permute(2, 0, 1)
        yield f"every other element of {dtype}", drawn.to(dtype)[..., ::2]


def _bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().clone(memory_format=torch.contiguous_format)
    return bytes(plain.reshape(-1).view(torch.uint8).numpy())


def _check_settings(make: Callable[[], Compressor]) -> None:
    one, two = make(), make()
    assert isinstance(one, Compressor), f"{one!r} is no hpctk.extend.Compressor"
    settings = one.settings()
    assert settings == two.settings(), f"two of the same have different settings: {settings} and {two.settings()}"
    read = json.loads(json.dumps(settings))
    assert read.pop("compressor") == type(one).__name__
    again = type(one)(**read)
    assert again.settings() == settings, f"made from its settings {settings} it has {again.settings()}"
    assert not one.is_excluded("w", torch.ones(max(1, one.min_elements))) or one.exclude, "it spares a plain tensor"
    assert one.is_excluded("w", torch.ones(3, dtype=torch.int32)), "it does not spare integers"


def _check_packets(compressor: Compressor, name: str, tensor: torch.Tensor) -> None:
    """A packet is read back the same however often, and neither writing nor reading changes anything."""
    before = _bits(tensor)
    packet = compressor.compress(tensor, "w")
    assert _bits(tensor) == before, f"compress changes {name}"
    assert packet.shape == tuple(tensor.shape), f"the packet of {name} has another shape or dtype"
    assert packet.dtype == tensor.dtype, f"the packet of {name} has another shape or dtype"
    assert packet.data.dim() == 1, f"the data of {name} are not one row"
    assert packet.data.is_contiguous(), f"the data of {name} are not one row"
    wire = _bits(packet.data)
    decoded = compressor.decompress(packet)
    assert decoded.shape == tensor.shape, f"{name} comes back with another shape or dtype"
    assert decoded.dtype == tensor.dtype, f"{name} comes back with another shape or dtype"
    assert bool(decoded.isfinite().all()), f"{name} comes back with NaN or infinity"
    kept = _bits(decoded)
    decoded.fill_(7)
    assert _bits(packet.data) == wire, f"what decompress returns of {name} is the packet's own memory"
    assert _bits(compressor.decompress(packet)) == kept, f"{name} is read back as something else the second time"
    again = compressor.decompress(packet)
    if compressor.lossless:
        assert torch.equal(again, tensor), f"it says that it is lossless, and changes {name}"
    whole = float(tensor.double().norm())
    if compressor.contracts and whole > 1e-3:
        left = float((tensor.double() - again.double()).norm())
        assert left < whole * (1 + 1e-3), f"it says that it contracts, and leaves {left} of {whole} of {name}"
    _check_damaged(compressor, packet, name)


def _check_damaged(compressor: Compressor, packet: Packet, name: str) -> None:
    """A packet that is too short or too long is an HpctkError, and no crash."""
    if not packet.data.numel():
        return
    for data in (packet.data[:-1].clone(), torch.cat([packet.data, packet.data[:1]])):
        damaged = Packet(data, packet.shape, packet.dtype, packet.stamp)
        try:
            compressor.decompress(damaged)
        except HpctkError:
            continue
        wrong = f"{data.numel()} instead of {packet.data.numel()} elements"
        raise AssertionError(f"a packet of {name} with {wrong} is read as if it were whole")


def _check_conservation(compressor: Compressor, name: str, tensor: torch.Tensor) -> None:
    """What is sent and what is left add up to what was there, within one rounding."""
    residual = torch.zeros_like(tensor, memory_format=torch.contiguous_format)
    given = _bits(tensor)
    for _ in range(3):
        total, before = residual + tensor, _bits(residual)
        try:
            packet = compressor.feed(tensor, residual, "w")
        except TensorError:
            assert _bits(residual) == before, f"feed refuses {name}, and has changed the residual"
            return
        assert _bits(tensor) == given, f"feed changes {name}"
        decoded, wide = compressor.decompress(packet).double(), residual.double()
        unit = torch.finfo(tensor.dtype).eps * torch.maximum(decoded.abs(), wide.abs())
        # Denormal numbers have no relative precision, and float64 is judged in float64.
        slack = 2 * unit + 2 * torch.finfo(tensor.dtype).tiny
        missed = (decoded + wide - total.double()).abs()
        worst = float((missed - slack).max()) if missed.numel() else 0.0
        assert worst <= 0, f"{name}: what was sent and what is left miss the sum by {float(missed.max())}"
        if compressor.shrinks and total.numel():
            left, was = float(wide.abs().max()), float(total.double().abs().max())
            assert left <= was * (1 + 1e-6), f"it says that it shrinks, and leaves {left} of {was} of {name}"


def _check_refusals(make: Callable[[], Compressor], dtype: torch.dtype) -> None:
    """NaN and infinity are refused, by index, with nothing changed."""
    for bad in (float("nan"), float("inf"), -float("inf")):
        tensor = torch.ones(4, 7, 10, dtype=dtype)
        tensor[2, 3, 1] = bad
        compressor, residual = make(), torch.ones_like(tensor)
        before = _bits(residual)
        for refuse in (partial(compressor.compress, tensor, "w"), partial(compressor.feed, tensor, residual, "w")):
            refusal = ""
            try:
                refuse()
            except TensorError as error:
                refusal = str(error)
            assert refusal, f"{bad} in a tensor of {dtype} is not refused"
            assert "element 171 of 280" in refusal, f"the error does not name the element: {refusal}"
        assert _bits(residual) == before, "a refused tensor has changed the residual"


def _check_everything_is_sent(compressor: Compressor) -> None:
    """The sum of all that was sent is the sum of all that was given, but for the residual."""
    generator = torch.Generator().manual_seed(1)
    kept, given = Residuals(), torch.zeros(8, 30, dtype=torch.float64)
    sent = torch.zeros_like(given)
    for _ in range(20):
        tensor = torch.randn(8, 30, generator=generator, dtype=torch.float64)
        given += tensor
        sent += compressor.decompress(kept.feed(compressor, "w", tensor))
    missed = float((sent + kept.of("w", given) - given).abs().max())
    assert missed < 1e-9, f"after 20 steps {missed} is neither sent nor left"


def _check_memory(make: Callable[[], Compressor]) -> None:
    """Two of the same write the same bits, and one that goes on from the other's state does, too."""
    generator = torch.Generator().manual_seed(2)
    given = [torch.randn(6, 20, generator=generator) for _ in range(6)]
    one, two, later = make(), make(), make()
    for compressor in (one, two, later):
        compressor.set_rank(1)
    for tensor in given[:3]:
        first, second = one.compress(tensor, "w"), two.compress(tensor, "w")
        assert _bits(first.data) == _bits(second.data), "two of the same write different packets"
    later.load_state_dict(one.state_dict())
    for tensor in given[3:]:
        first, second = one.compress(tensor, "w"), later.compress(tensor, "w")
        assert _bits(first.data) == _bits(second.data), "it does not go on from its state_dict() as before"
