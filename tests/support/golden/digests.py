"""What is kept of a training: digests of bits, and two numbers for machines that round otherwise.

An entry of digests.json is a line of words: digests of

    parameters   parameters and buffers after every step
    evaluated    the model that the method wants evaluated, in the end
    state        what ranks alone know, and what the base optimizer keeps, in the end
    counts       how many rounds, uploads, skips, ... there were

of all ranks (the results of a collective are digested as parameters); and for inexact cases two sums of the final
parameters of all ranks, each times another number. See golden/__init__.py for when digests may change.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite.binding
import numpy as np
import torch

from golden.cases import Case
from golden.problem import Model, numbers

FILE = Path(__file__).with_name("digests.json")

#: Bytes of each digest, which are in this order.
PARTS = {"parameters": 6, "evaluated": 4, "state": 4, "counts": 3}
#: What the two numbers may be off by, in units of the largest rounding of one operation on the parameters.
ROUNDINGS = 2**8
#: The clock's.
NO_STATE = ("elapsed_s",)


@dataclass
class Seen:
    """What was seen of a training on one rank."""

    dtype: str
    digests: dict[str, Any] = field(default_factory=lambda: {part: hashlib.blake2b(digest_size=16) for part in PARTS})
    final: list[float] = field(default_factory=list)

    def take(self, part: str, thing: Any) -> None:
        """Take note of tensors, numbers, and lists and dicts of them."""
        _feed(self.digests[part], thing)

    def step(self, model: Model) -> None:
        """Take note of the model after a step."""
        self.take("parameters", _tensors(model))

    def evaluated(self, model: Model) -> None:
        """Take note of the model to be evaluated."""
        self.take("evaluated", _tensors(model))

    def end(self, model: Model, state: Any, stats: Any) -> None:
        """Take note of all that is there in the end."""
        self.take("state", state)
        counts = {name: int(count) for name, count in stats.counts.items() if count}
        self.take("counts", {"steps": stats.steps, **counts})
        self.last(list(model.parameters()))

    def last(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take note of the numbers that a training ends with; of some where there are many, for sums one by one."""
        for tensor in tensors:
            flat = tensor.detach().reshape(-1)
            self.final += flat[:: 1 + flat.numel() // 1000].tolist()


def _tensors(model: Model) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _feed(digest: Any, thing: Any) -> None:
    """Feed names, numbers and tensors to a digest; the same for the same bits, in whichever order they come."""
    if isinstance(thing, Mapping):
        for key in sorted(thing, key=str):
            if key not in NO_STATE:
                digest.update(f"{key}{{".encode())
                _feed(digest, thing[key])
                digest.update(b"}")
    elif isinstance(thing, list | tuple):
        _feed(digest, dict(enumerate(thing)))
    elif isinstance(thing, torch.Tensor | np.ndarray | np.generic):
        if isinstance(thing, torch.Tensor) and thing.dtype == torch.bfloat16:
            # numpy has no such dtype.
            thing = thing.detach().view(torch.int16)
        array = np.asarray(thing.detach().cpu() if isinstance(thing, torch.Tensor) else thing)
        digest.update(f"{array.dtype.char}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    elif thing is None or isinstance(thing, bool | int | float | str):
        digest.update(repr(thing).encode())
    else:
        raise TypeError(f"a {type(thing).__name__} in a state: no way to digest it")


def entry(seen: Seen, inexact: bool, allgather: Any) -> str:
    """Return the line of a training. Collective: `allgather` gives all ranks' objects."""
    # Numbers of all ranks only where they are needed.
    mine = {part: digest.digest() for part, digest in seen.digests.items()}
    everyone = allgather((mine, seen.final if inexact else []))
    words = []
    for part, nbytes in PARTS.items():
        together = b"".join(digests[part] for digests, _ in everyone)
        words.append(hashlib.blake2b(together, digest_size=nbytes).hexdigest())
    if inexact:
        words += [repr(number) for number in _sums([final for _, final in everyone])]
    return " ".join(words)


def _sums(finals: Sequence[Sequence[float]]) -> list[float]:
    """Return two sums of all numbers, exact but for one rounding each."""
    values = [value for final in finals for value in final]
    factors = [numbers(f"factors {i}", (len(values),)).tolist() for i in range(2)]
    # Of mean magnitude about 1, whatever the number of parameters.
    scale = 1 / math.sqrt(len(values))
    return [scale * math.fsum(a * b for a, b in zip(row, values, strict=True)) for row in factors]


@cache
def machine() -> str:
    """Return what decides on the order of sums that hpctk does not order itself."""
    from mpi4py import MPI

    library = MPI.Get_library_version().split(",")[0].split("\x00")[0].strip()
    processor = llvmlite.binding.get_host_cpu_features().flatten()
    features = hashlib.blake2b(processor.encode(), digest_size=3).hexdigest()
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{platform.machine()} {capability} {features}, torch {torch.__version__}, numpy {np.__version__}, {library}"


def difference(recorded: str, found: str, *, same_machine: bool, dtype: str) -> str:
    """Return what differs between two lines of a case, by name; empty where nothing does."""
    theirs, ours = recorded.split(), found.split()
    rows = zip(PARTS, theirs, ours, strict=False)
    parts = [part for part, was, now in rows if was != now]
    sums = [(float(was), float(now)) for was, now in zip(theirs[len(PARTS) :], ours[len(PARTS) :], strict=True)]
    if not sums or same_machine:
        return ", ".join(parts)
    limit = ROUNDINGS * torch.finfo(getattr(torch, dtype)).eps
    far = [part for part in parts if part == "counts"]
    if any(abs(was - now) > limit for was, now in sums):
        far.append(f"parameters, by {max(abs(was - now) for was, now in sums):.1e}")
    return ", ".join(far)


def check(way: str, case: Case, seen: Seen, comm: Any) -> None:
    """Raise AssertionError where a training has come to something else than is recorded. Collective."""
    found = entry(seen, bool(case.inexact), comm.allgather)
    kept = read().get(str(comm.size), {}).get(way, {"machine": "", "cases": {}})
    what = f"{case.name!r} by {way} at {comm.size} ranks"
    assert case.name in kept["cases"], (
        f"{what} is not recorded: run tests/support/golden/record.py at {comm.size} ranks"
    )
    recorded = kept["cases"][case.name]
    differs = difference(recorded, found, same_machine=machine() == kept["machine"], dtype=case.dtype)
    assert not differs, (
        f"{what} has come to something else than is recorded: {differs}.\n  recorded {recorded}\n  found    {found}\n"
        "If the same numbers are now added in another order on purpose, the commit must say so; see support/golden."
    )


@cache
def read() -> dict[str, dict[str, dict[str, Any]]]:
    """Return what is recorded: ranks -> way -> machine and cases, each a line."""
    found: dict[str, dict[str, dict[str, Any]]] = json.loads(FILE.read_text()) if FILE.exists() else {}
    return found


def write(recorded: Mapping[str, Any]) -> None:
    """Write what is recorded, beside and renamed."""
    beside = FILE.with_suffix(".new")
    beside.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")
    beside.rename(FILE)
    read.cache_clear()
