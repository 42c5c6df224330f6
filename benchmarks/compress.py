"""What compressing a tensor costs: every compressor in one run, interleaved, beside one read of the memory.

Start it with `./launch/bench compress`; it is a single process without MPI.

- `memory:read`: one read of the tensor, below which nothing goes;
- `torch:topk`: torch.topk of the magnitudes alone, with neither residual nor packing;
- `kernel:topk`: adding the gradient to the residual, selecting, taking out;
- `compress:*`: gradient and residual into a packet, what it does not carry left in the residual, and back.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import isqrt
from statistics import median

import _rig
import torch

from hpctk.cli.core.table import bytes_text, seconds_text, table
from hpctk.compressors import COMPRESSORS, by_name
from hpctk.kernels import select


@dataclass
class Contender:
    """One thing to measure: `encode` once, `decode` what it returned, and how large that is."""

    encode: Callable[[], object]
    decode: Callable[[object], object] | None = None
    nbytes: Callable[[object], int] | None = None
    prepare: Callable[[], object] = lambda: None
    encode_seconds: list[float] = field(default_factory=list)
    decode_seconds: list[float] = field(default_factory=list)
    bytes: int | None = None

    def run(self, keep: bool) -> None:
        self.prepare()
        spent, packet = timed(self.encode)
        back = timed(lambda: self.decode(packet))[0] if self.decode else None
        self.bytes = self.nbytes(packet) if self.nbytes else None
        if keep:
            self.encode_seconds.append(spent)
            if back is not None:
                self.decode_seconds.append(back)


def timed(work):
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def matrix(n):
    """Return the shape of n elements that is nearest to a square: PowerSGD wants a matrix."""
    rows = next(rows for rows in range(isqrt(n), 0, -1) if n % rows == 0)
    return rows, n // rows


def contenders(n, density, threads):
    source = torch.Generator().manual_seed(1)
    gradient = torch.randn(matrix(n), generator=source)
    start = torch.randn(matrix(n), generator=source)
    residual = start.clone()
    k = max(1, int(density * n))

    def again():
        residual.copy_(start)

    def kernel():
        flat = residual.view(-1).numpy(), gradient.view(-1).numpy()
        return select.feed_top_k(*flat, k, threads=threads)

    found = {
        "memory:read": Contender(lambda: gradient.sum()),
        "torch:topk": Contender(lambda: torch.topk(gradient.view(-1).abs(), k)),
        "kernel:topk": Contender(kernel, prepare=again),
    }
    for name in COMPRESSORS:
        found[f"compress:{name}"] = compressing(name, density, gradient, residual, again)
    return found


def compressing(name, density, gradient, residual, again):
    compressor = by_name(
        {"topk": f"topk:{density}", "randomk": f"randomk:{density}", "powersgd": "powersgd:4"}.get(name, name)
    )
    return Contender(
        lambda: compressor.feed(gradient, residual, "benchmark"),
        compressor.decompress,
        lambda packet: packet.nbytes,
        again,
    )


def entries(found, n):
    """Return one dictionary per contender, with medians and ratios where both sides were measured."""
    seconds = {name: median(one.encode_seconds) for name, one in found.items()}
    read, topk = seconds.get("memory:read"), seconds.get("torch:topk")
    rows = []
    for name, one in found.items():
        entry = {"name": name, "seconds": seconds[name]}
        if one.decode_seconds:
            entry["decode_seconds"] = median(one.decode_seconds)
            entry["bytes"] = one.bytes
            entry["bits_per_element"] = 8 * one.bytes / n
        if read:
            entry["ratio_to_memory_read"] = seconds[name] / read
        if "compress:topk" in seconds and name.startswith("compress:"):
            entry["ratio_to_topk"] = seconds[name] / seconds["compress:topk"]
        if topk and name in ("kernel:topk", "compress:topk"):
            entry["times_faster_than_torch_topk"] = topk / seconds[name]
        rows.append(entry)
    return rows


def show(rows):
    def cell(entry, key, text):
        return text(entry[key]) if key in entry else ""

    head = [
        "contender",
        "encode",
        "decode",
        "bytes",
        "bits / element",
        "x memory read",
        "x topk",
        "x faster than torch",
    ]
    print(
        table(
            head,
            [
                [
                    entry["name"],
                    seconds_text(entry["seconds"]),
                    cell(entry, "decode_seconds", seconds_text),
                    cell(entry, "bytes", bytes_text),
                    cell(entry, "bits_per_element", "{:.3g}".format),
                    cell(entry, "ratio_to_memory_read", "{:.1f}".format),
                    cell(entry, "ratio_to_topk", "{:.2f}".format),
                    cell(entry, "times_faster_than_torch_topk", "{:.1f}".format),
                ]
                for entry in rows
            ],
        ),
        flush=True,
    )


def main() -> None:
    parser = _rig.parser(only=True)
    parser.add_argument("--elements", type=float, default=25e6)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    n = int(options.elements)
    if n < 1 or options.repeats < 1 or options.threads < 1:
        sys.exit("bench: --elements, --repeats and --threads: at least 1")
    torch.set_num_threads(options.threads)
    found = _rig.only(contenders(n, options.density, options.threads), options.only)
    for repeat in range(options.repeats + 1):
        doing = f"repeat {repeat} of {options.repeats}" if repeat else "warming up"
        print(f"bench: {doing}", file=sys.stderr, flush=True)
        for one in found.values():
            one.run(keep=repeat > 0)
    rows = entries(found, n)
    print(f"{n} elements of float32, density {options.density:g}, {options.threads} threads")
    show(rows)
    _rig.write(options.json, rows)


if __name__ == "__main__":
    main()
