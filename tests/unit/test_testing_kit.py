"""The test-kit for other packages passes what is right, and says what is wrong."""

from dataclasses import dataclass, replace

import pytest
import torch

from hpctk.compressors import Half, Identity, RandomK, Sign
from hpctk.schedules import SCHEDULES, Schedule, ring
from hpctk.testing import check_compressor, check_method, check_schedule


@pytest.mark.parametrize("make", [Identity, lambda: RandomK(0.3)], ids=["Identity", "RandomK"])
def test_our_compressors_pass(make):
    check_compressor(make)


def test_sasg_passes_at_its_defaults_which_are_for_sgd_without_momentum():
    check_method("sasg", momentum=0)


@dataclass(eq=False, repr=False)
class Forgetful(Half):
    """Loses what does not fit into 16 bits."""

    def feed(self, tensor, residual, name=""):
        packet = super().feed(tensor, residual, name)
        residual.zero_()
        return packet


@dataclass(eq=False, repr=False)
class Greedy(Sign):
    """Says that nothing is lost."""

    lossless = True


@dataclass(eq=False, repr=False)
class Careless(Identity):
    """Reads whatever comes."""

    def _decode(self, packet):
        return packet.data.clone().resize_(packet.n)


@dataclass(eq=False, repr=False)
class Spoiling(Identity):
    """Changes the gradient that it is given."""

    def _encode(self, flat, shape, name, stamp):
        return flat.add_(0.5)


class Random(Identity):
    """Writes something else each time."""

    def _encode(self, flat, shape, name, stamp):
        return flat + torch.rand(1).to(flat.dtype)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Forgetful, "what was sent and what is left miss the sum by"),
        (Greedy, "it says that it is lossless, and changes"),
        (Careless, "is read as if it were whole"),
        (Spoiling, "compress changes"),
        (Random, "miss the sum by|two of the same|lossless"),
    ],
)
def test_a_wrong_compressor_is_found(kind, words):
    with pytest.raises(AssertionError, match=words):
        check_compressor(kind)


@pytest.mark.parametrize("name", SCHEDULES)
def test_our_schedules_pass(name):
    check_schedule(SCHEDULES[name], range(1, 9))


def boastful(size, nodes, root):
    plan = ring.allreduce(size)
    return replace(plan, volume=replace(plan.volume, sent=plan.volume.sent // 2))


def lazy(size, nodes, root):
    return replace(ring.allreduce(size), steps=lambda rank: iter(()))


@pytest.mark.parametrize(
    ("builders", "words"),
    [
        ({"allreduce": boastful}, "volume.sent is stated as"),
        ({"allreduce": lazy}, "missing is rank"),
        ({"allreduce": lambda size, nodes, root: ring.allreduce(size + 1)}, "a plan for 2 ranks where 1 were asked"),
        ({"everything": boastful}, "no kind of collective"),
        ({}, "does nothing"),
    ],
)
def test_a_wrong_schedule_is_found(builders, words):
    with pytest.raises(AssertionError, match=words):
        check_schedule(Schedule("wrong", builders), range(1, 5))
