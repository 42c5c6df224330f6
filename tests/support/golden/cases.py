"""What is trained: one entry for each method and setting, and for each thing that may happen on the way.

See golden/__init__.py for when digests may change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import hpctk
from golden.problem import PROBE, numbers

#: All ways in; those with an optimizer of hpctk's; those that serve methods which want neither closure nor loss.
EVERY = ("mpi", "torch", "ddp", "horovod", "compression")
OWN = ("mpi", "torch", "horovod")
ATTACHED = (*OWN, "compression")
# The other ways share all that is below the optimizer: each kind of method goes by all of them, its variants by one.
MPI = ("mpi",)

# Why the bits of a case hold only for the machine they were recorded on; elsewhere it is compared by rounding.
BLAS = "inner products by BLAS, whose order of sums depends on the processor"
QR = "matrix products and a QR decomposition, whose order of sums depends on the processor"
FUSED = "torch multiplies and adds in one rounding or in two, depending on the processor"
LIBRARY = "the order of sums is that of the MPI library, or of gloo"


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes
    ----------
    name : str
    method : hpctk.methods.Method or None
    ways : tuple of str
        The ways in that can do it.
    inexact : str
        Why it may round otherwise on another processor; empty where it may not.
    model, dtype, base : str
        A key of problem.MODELS, a torch dtype, a key of problem.BASES.
    steps : int
    schedule : str
        "ring" where nothing else is said: "auto" would depend on the calibration of this machine.
    overlap : bool
    closure : bool
        Whether step() is given a closure.
    falling : bool
        Whether a scheduler halves the rate.
    synchronize : bool
        Whether gradients are exchanged, and clamped, before step().
    accumulate : int
        Backward passes of a step.
    uneven : str
        A key of UNEVEN: batches of each rank, inside join().
    skips : bool
        Whether the last rank has bad gradients, and all skip those steps.
    uses_all : bool
        Whether every parameter has a gradient in every step.
    resumes : str
        Whether training is saved half-way, and another model goes on from there: "by all", on as many ranks; "by more",
        saved by rank 0 alone; "by one", on each rank by itself.
    stock : str
        Of Horovod's own optimizer: "sum", or "unattached"; an attached mean where nothing is said.
    call : callable, optional
        Instead of training: a collective that is given the rank, the number of the step and a communicator.
    """

    name: str
    method: object
    ways: tuple[str, ...] = EVERY
    inexact: str = ""
    model: str = "small"
    dtype: str = "float64"
    base: str = "sgd"
    steps: int = 4
    schedule: str = "ring"
    overlap: bool = False
    closure: bool = False
    falling: bool = False
    synchronize: bool = False
    accumulate: int = 1
    uneven: str = ""
    skips: bool = False
    uses_all: bool = True
    resumes: str = ""
    stock: str = ""
    call: Callable[[int, int, Any], Any] | None = None


#: Batches of a rank.
UNEVEN = {
    "more on higher ranks": lambda rank, size: 3 + 2 * rank,
    "none on the last": lambda rank, size: 0 if rank == size - 1 else 4,
}

COMPRESSORS = {
    "Identity": hpctk.Identity(),
    "Half": hpctk.Half(),
    "Half bfloat16": hpctk.Half("bfloat16"),
    "TopK": hpctk.TopK(0.3),
    "TopK of few": hpctk.TopK(0.05),
    "TopK keep": hpctk.TopK(0.2, keep=True),
    "TopK sparing": hpctk.TopK(0.2, exclude=["bias"], min_elements=5),
    "RandomK": hpctk.RandomK(0.3, seed=4),
    "Sign": hpctk.Sign(),
    "Sign sparing": hpctk.Sign(exclude=["vector"], min_elements=2),
    "QSGD": hpctk.QSGD(4),
    "QSGD small buckets": hpctk.QSGD(6, bucket=8, seed=2),
    "PowerSGD": hpctk.PowerSGD(1),
    "PowerSGD rank 2": hpctk.PowerSGD(2),
}


def because(name: str) -> str:
    """Return why a case of this name is inexact."""
    return QR if "PowerSGD" in name else ""


#: One compressor of each kind.
KINDS = ("Identity", "Half", "TopK", "TopK keep", "RandomK", "Sign", "QSGD", "PowerSGD")


def mean_cases() -> list[Case]:
    """Return Mean with everything it can be given."""
    found = [
        Case(f"Mean {name}", hpctk.Mean(compressor), EVERY if name in KINDS else MPI, because(name))
        for name, compressor in COMPRESSORS.items()
    ]
    for name in KINDS:
        forgets = hpctk.Mean(COMPRESSORS[name], error_feedback=False)
        ways = EVERY if name == "TopK" else MPI
        found.append(Case(f"Mean {name} without feedback", forgets, ways, because(name)))
        method = hpctk.Mean(COMPRESSORS[name])
        found.append(Case(f"Mean {name} float32", method, ways, because(name), dtype="float32"))
    top_k = hpctk.TopK(0.3)
    return [
        *found,
        Case("Mean", hpctk.Mean(), steps=6),
        Case("Mean float32", hpctk.Mean(), dtype="float32"),
        Case("Mean unit norm", hpctk.Mean(unit_norm=True)),
        Case("Mean unit norm TopK", hpctk.Mean(top_k, unit_norm=True), MPI),
        Case("Mean clip", hpctk.Mean(clip=0.25), ATTACHED, FUSED),
        Case("Mean clip TopK, falling", hpctk.Mean(top_k, clip=0.125), MPI, FUSED, falling=True),
        Case("Mean clip far off", hpctk.Mean(clip=1000.0), MPI),
        Case("Mean falling", hpctk.Mean(), base="two groups", falling=True),
        Case("Mean Adam", hpctk.Mean(), inexact=FUSED, base="adam"),
        Case("Mean closure", hpctk.Mean(), OWN, closure=True),
        Case("Mean synchronize", hpctk.Mean(), OWN, synchronize=True),
        Case("Mean TopK synchronize", hpctk.Mean(top_k), MPI, synchronize=True),
    ]


def adacons_cases() -> list[Case]:
    """Return AdaCons."""
    found = []
    for scale in ("unit", "coefficients"):
        for layerwise in (False, True):
            name = f"AdaCons {scale}{' layerwise' if layerwise else ''}"
            found.append(Case(name, hpctk.AdaCons(0.75, scale, layerwise), MPI, BLAS))
    return [
        *found,
        Case("AdaCons", hpctk.AdaCons(), inexact=BLAS, steps=6),
        Case("AdaCons layerwise", hpctk.AdaCons(0.75, layerwise=True), inexact=BLAS),
        Case("AdaCons float32", hpctk.AdaCons(), MPI, BLAS, dtype="float32"),
        Case("AdaCons without momentum", hpctk.AdaCons(momentum=0.0), MPI, BLAS),
    ]


SASG_MEAN = hpctk.SASG(0.3, warmup=2, max_delay=3, reduce="mean")


def sasg_cases() -> list[Case]:
    """Return SASG."""
    plain = hpctk.SASG(0.3, warmup=2, max_delay=3)
    silent = hpctk.SASG(0.3, alpha=1e9, max_delay=100, warmup=1, reduce="mean")
    few = hpctk.SASG(0.2, alpha=4.0, max_delay=2, terms=2, warmup=1)
    return [
        Case("SASG", plain, OWN, steps=8, closure=True),
        Case("SASG mean", SASG_MEAN, OWN, steps=6, closure=True),
        Case("SASG alpha", few, MPI, steps=6, closure=True),
        Case("SASG alpha 0", hpctk.SASG(0.1, alpha=0.0, warmup=1), MPI, closure=True),
        Case("SASG sends all", hpctk.SASG(0.3, alpha=-1, warmup=0), MPI, closure=True),
        Case("SASG stays silent", silent, MPI, closure=True),
        Case("SASG float32", SASG_MEAN, MPI, dtype="float32", steps=6, closure=True),
        Case("SASG falling", plain, MPI, base="two groups", steps=6, closure=True, falling=True),
    ]


def saef_cases() -> list[Case]:
    """Return SAEF."""
    found = [
        Case(f"SAEF {name}", hpctk.SAEF(compressor), ATTACHED if name in ("TopK", "Sign") else MPI, because(name))
        for name, compressor in COMPRESSORS.items()
    ]  # fmt: skip
    servers = {
        "Sign both ways sparing": (COMPRESSORS["Sign sparing"], COMPRESSORS["Sign sparing"]),
        "TopK both ways": (hpctk.TopK(0.3), hpctk.TopK(0.5)),
        "Sign, server TopK": (hpctk.Sign(), hpctk.TopK(0.2)),
        "TopK, server Sign": (hpctk.TopK(0.2), hpctk.Sign()),
        "QSGD, server TopK": (hpctk.QSGD(4), hpctk.TopK(0.3)),
        "RandomK, server QSGD": (hpctk.RandomK(0.3, seed=4), hpctk.QSGD(6, bucket=8)),
        "TopK, server RandomK": (hpctk.TopK(0.3), hpctk.RandomK(0.5)),
        "Half, server Half": (hpctk.Half(), hpctk.Half("bfloat16")),
        "Identity both ways": (hpctk.Identity(), hpctk.Identity()),
        "PowerSGD, server Sign": (hpctk.PowerSGD(1), hpctk.Sign()),
    }
    for name, (compressor, server) in servers.items():
        found.append(Case(f"SAEF {name}", hpctk.SAEF(compressor, server), MPI, because(name)))
    top_k, averaging = hpctk.TopK(0.2), hpctk.SAEF(hpctk.TopK(0.2), average_every=3)
    both = hpctk.SAEF(hpctk.Sign(), hpctk.Sign(), average_every=3)
    return [
        *found,
        Case("SAEF Sign both ways", hpctk.SAEF(hpctk.Sign(), hpctk.Sign()), ATTACHED),
        Case("SAEF TopK averaging", averaging, ATTACHED, steps=6),
        Case("SAEF TopK averaging always", hpctk.SAEF(top_k, average_every=1), MPI),
        Case("SAEF Sign both ways averaging", both, MPI),
        Case("SAEF TopK not ahead", hpctk.SAEF(top_k, step_ahead=False), ATTACHED),
        Case("SAEF Sign not ahead", hpctk.SAEF(hpctk.Sign(), step_ahead=False), MPI),
        Case("SAEF PowerSGD not ahead", hpctk.SAEF(hpctk.PowerSGD(1), step_ahead=False), MPI, QR),
        Case("SAEF TopK float32", averaging, MPI, dtype="float32"),
        Case("SAEF Sign both ways float32", both, MPI, dtype="float32"),
        Case("SAEF TopK Adam", hpctk.SAEF(top_k), ATTACHED, FUSED, base="adam"),
        Case("SAEF TopK falling", hpctk.SAEF(top_k), MPI, base="two groups", falling=True),
    ]


#: Shares that are powers of two: torch's lerp is the same with them on every processor. One with the usual settings.
#: Asynchronous GRAWA is not here: who does how many steps depends on the clock.
MODEL_METHODS = {
    "MGRAWA": hpctk.MGRAWA(2, pull=0.5, prox=0.125, ema=0.5),
    "LGRAWA": hpctk.LGRAWA(2, pull=0.25, prox=0.125, ema=0.5),
    "LocalSGD": hpctk.LocalSGD(2),
    "EASGD": hpctk.EASGD(2),
    "LSGD": hpctk.LSGD(2, pull=0.25, prox=0.125),
    "CELGC": hpctk.CELGC(0.25, 2),
}
MODEL_WAYS = {name: OWN if name == "LSGD" else ATTACHED for name in MODEL_METHODS}
MODEL_INEXACT = {"EASGD": FUSED, "CELGC": FUSED}


def model_cases() -> list[Case]:
    """Return the methods whose parameters travel."""
    found = [
        Case(name, method, MODEL_WAYS[name], MODEL_INEXACT.get(name, "")) for name, method in MODEL_METHODS.items()
    ]
    found += [
        Case(f"{name} float32", MODEL_METHODS[name], MPI, dtype="float32")
        for name in ("MGRAWA", "LGRAWA", "LSGD", "LocalSGD")
    ]
    probes = hpctk.MGRAWA(2, prox=0.125, ema=0.5, norms="probe", probe=PROBE)
    return [
        *found,
        Case("MGRAWA as usual", hpctk.MGRAWA(period=3), MPI, FUSED, steps=7),
        Case("LGRAWA as usual", hpctk.LGRAWA(period=3), MPI, FUSED, steps=7),
        Case("MGRAWA probing", probes, OWN),
        Case("EASGD pull", hpctk.EASGD(period=1, pull=0.3), MPI, FUSED),
        Case("LSGD as usual", hpctk.LSGD(period=3), MPI, FUSED, steps=7, closure=True),
        Case("CELGC far off", hpctk.CELGC(1000.0, 3), MPI),
        Case("CELGC falling", hpctk.CELGC(0.25, 3), MPI, FUSED, base="two groups", falling=True),
        Case("CELGC Adam", hpctk.CELGC(0.25, 2), MPI, FUSED, base="adam"),
        Case("LocalSGD every step", hpctk.LocalSGD(1), MPI),
    ]


#: Powers of two again; EPISODE is not to clip, for then the rate of a step would be none.
SUCCESSORS = {
    "DiLoCo": (hpctk.DiLoCo(2, outer_lr=0.5, outer_momentum=0.5), ATTACHED),
    "DiLoCo streaming": (
        hpctk.DiLoCo(4, 0.5, 0.5, compressor=hpctk.TopK(0.3), fragments=2, delay=1, mixing=0.5), ATTACHED,
    ),
    "SparseLoCo": (hpctk.SparseLoCo(2, k=2, chunk=8), ATTACHED),
    "EPISODE": (hpctk.EPISODE(1000.0, 2), ATTACHED),
    "EF21": (hpctk.EF21(hpctk.TopK(0.3), momentum=0.75), EVERY),
    "SA-PEF": (hpctk.SAEF(hpctk.TopK(0.3), step_ahead=0.5, period=2), ATTACHED),
    "Mean ChunkTopK": (hpctk.Mean(hpctk.ChunkTopK(2, 8)), EVERY),
    "LocalSGD TopK": (hpctk.LocalSGD(2, compressor=hpctk.TopK(0.3)), ATTACHED),
}  # fmt: skip


def successor_cases() -> list[Case]:
    """Return the methods that came after, each by every way in, and from a checkpoint in the middle of a period."""
    found = [Case(name, method, ways, steps=6) for name, (method, ways) in SUCCESSORS.items()]
    found += [
        Case(f"{name}, resumed", SUCCESSORS[name][0], MPI, steps=6, resumes="by all")
        for name in ("DiLoCo streaming", "SparseLoCo", "EPISODE", "EF21", "SA-PEF")
    ]
    return [*found, Case("SparseLoCo float32", SUCCESSORS["SparseLoCo"][0], MPI, dtype="float32")]


SCHEDULES = ("rotation", "recursive_doubling", "halving_doubling", "binomial", "hierarchical", "library", "auto")


def schedule_cases() -> list[Case]:
    """Return dense means by every schedule; "library" is "mpi", or "torch" on a process group."""
    found = []
    for name in SCHEDULES:
        why = LIBRARY if name in ("library", "auto") else ""
        ways = EVERY if name in ("rotation", "library", "auto") else ("mpi", "torch")
        found.append(Case(f"Mean by {name}", hpctk.Mean(), ways, why, steps=3, schedule=name))
        found.append(Case(f"Mean large by {name}", hpctk.Mean(), MPI, why, model="large", steps=2, schedule=name))
    both, averaging = hpctk.SAEF(hpctk.Sign(), hpctk.Sign()), hpctk.SAEF(hpctk.TopK(0.2), average_every=2)
    return [
        *found,
        Case("Mean large", hpctk.Mean(), model="large", steps=2),
        Case("Mean TopK large", hpctk.Mean(hpctk.TopK(0.02)), MPI, model="large", steps=2),
        Case("Mean TopK keep large", hpctk.Mean(hpctk.TopK(0.02, keep=True)), MPI, model="large", steps=2),
        Case("SAEF Sign both ways large", both, MPI, model="large", steps=2),
        # Contiguous parameters and few elements: the sum of messages stays a list.
        Case("SASG large", hpctk.SASG(0.02, warmup=1, max_delay=3), MPI, model="large", closure=True),
        Case("Mean RandomK large", hpctk.Mean(hpctk.RandomK(0.02)), MPI, model="large", steps=2),
        Case("Mean huge", hpctk.Mean(), MPI, model="huge", steps=1),
        Case("AdaCons large", hpctk.AdaCons(), inexact=BLAS, model="large", steps=2),
        Case("LocalSGD by rotation", hpctk.LocalSGD(2), MPI, schedule="rotation"),
        Case("SAEF TopK by rotation", averaging, MPI, schedule="rotation"),
    ]


#: Gradient methods, each of another kind inside.
GRADIENT_METHODS = {
    "Mean": hpctk.Mean(),
    "Mean TopK": hpctk.Mean(hpctk.TopK(0.3)),
    "Mean PowerSGD": hpctk.Mean(hpctk.PowerSGD(1)),
    "AdaCons": hpctk.AdaCons(0.75),
    "AdaCons layerwise": hpctk.AdaCons(0.75, layerwise=True),
}
GRADIENT_INEXACT = {"Mean PowerSGD": QR, "AdaCons": BLAS, "AdaCons layerwise": BLAS}
UPDATE_METHODS = {
    "SAEF TopK": hpctk.SAEF(hpctk.TopK(0.3), average_every=3),
    "SAEF Sign both ways": hpctk.SAEF(hpctk.Sign(), hpctk.Sign()),
    "SAEF Sign, server TopK": hpctk.SAEF(hpctk.Sign(), hpctk.TopK(0.3)),
    "SASG": hpctk.SASG(0.3, warmup=2, max_delay=3),
}
UPDATE_WAYS = {name: OWN if name == "SASG" else ATTACHED for name in UPDATE_METHODS}


#: Those that go by all ways through everything that happens.
FIRST = ("Mean", "AdaCons", "SAEF TopK", "SASG", "LocalSGD")
#: Those that go on with another number of ranks.
RESIZED = ("Mean TopK", "AdaCons", "SAEF TopK", "SAEF Sign both ways", "SASG", "MGRAWA", "LSGD")


def overlap_cases() -> list[Case]:
    """Return gradient methods with communication during backward."""
    found = []
    for name, method in GRADIENT_METHODS.items():
        why = GRADIENT_INEXACT.get(name, "")
        found.append(Case(f"{name} overlapping", method, OWN, why, overlap=True))
        if name in ("Mean TopK", "Mean PowerSGD"):
            # Their gradients go as one message all the same.
            continue
        ways = ("mpi", "torch") if name in FIRST else MPI
        uneven = "more on higher ranks"
        found += [
            Case(f"{name} overlapping, accumulating", method, ways, why, steps=3, overlap=True, accumulate=2),
            Case(f"{name} overlapping, some unused", method, ways, why, overlap=True, uses_all=False),
            Case(f"{name} overlapping, {uneven}", method, ways, why, overlap=True, uneven=uneven),
            Case(f"{name} overlapping, skipping", method, ways, why, overlap=True, skips=True),
        ]
    for name in ("Mean", "AdaCons"):
        method, why = GRADIENT_METHODS[name], GRADIENT_INEXACT.get(name, "")
        found.append(Case(f"{name} huge, overlapping", method, MPI, why, model="huge", steps=2, overlap=True))
    return [
        *found,
        Case("Mean overlapping, float32", hpctk.Mean(), MPI, dtype="float32", overlap=True),
        Case("Mean clip overlapping", hpctk.Mean(clip=0.25), MPI, FUSED, overlap=True),
        Case("Mean overlapping, synchronize", hpctk.Mean(), OWN, overlap=True, synchronize=True),
        Case("Mean overlapping by rotation", hpctk.Mean(), MPI, schedule="rotation", overlap=True),
        Case("Mean overlapping by library", hpctk.Mean(), MPI, LIBRARY, schedule="library", overlap=True),
    ]


def event_cases() -> list[Case]:
    """Return what happens on the way: data that run out, accumulation, bad gradients, unused parameters, restarts."""
    found = []
    everything = [
        *((n, m, EVERY, GRADIENT_INEXACT.get(n, "")) for n, m in GRADIENT_METHODS.items()),
        *((n, m, UPDATE_WAYS[n], "") for n, m in UPDATE_METHODS.items()),
        *((n, m, MODEL_WAYS[n], MODEL_INEXACT.get(n, "")) for n, m in MODEL_METHODS.items()),
    ]
    for name, method, able, why in everything:
        first, closure = name in FIRST, name == "SASG"
        ways = able if first else MPI
        # Horovod's optimizer has no join(), and DDP's is another.
        uneven, none = UNEVEN
        found += [
            Case(f"{name}, {uneven}", method, OWN if first else MPI, why, closure=closure, uneven=uneven),
            Case(f"{name}, skipping", method, ways, why, steps=5, closure=closure, skips=True),
            Case(f"{name}, some unused", method, ways, why, closure=closure, uses_all=False),
        ]
        # In the middle of a period, where there are any. TopK by all: its residuals are in nobody's state_dict().
        some = able if "TopK" in name else ways
        resumed = {"closure": closure, "steps": 6, "resumes": "by all"}
        found.append(Case(f"{name}, resumed", method, some, why, **resumed))
        if first:
            found.append(Case(f"{name}, {none}", method, MPI, why, closure=closure, uneven=none))
        if first and not closure:
            found.append(Case(f"{name} accumulating", method, ways, why, steps=3, accumulate=2))
        if name in RESIZED:
            found += [
                Case(f"{name}, resumed {by}", method, MPI, why, closure=closure, resumes=by)
                for by in ("by more", "by one")
            ]
    for name in ("RandomK", "Sign", "QSGD"):
        found.append(Case(f"Mean {name}, resumed", hpctk.Mean(COMPRESSORS[name]), MPI, resumes="by all"))
    served = hpctk.SAEF(hpctk.RandomK(0.3), hpctk.QSGD(6, bucket=8))
    probing = hpctk.MGRAWA(2, prox=0.125, ema=0.5, norms="probe", probe=PROBE)
    skipping = {"steps": 6, "skips": True, "resumes": "by all"}
    return [
        *found,
        # Saved when the others have not heard of a bad gradient yet.
        Case("LocalSGD, skipping, resumed", MODEL_METHODS["LocalSGD"], MPI, **skipping),
        Case("MGRAWA, skipping, resumed", MODEL_METHODS["MGRAWA"], MPI, **skipping),
        Case("MGRAWA probing, resumed", probing, MPI, resumes="by all"),
        # Saved by ranks that have been silent for as long as they may.
        Case("SASG silent, resumed", hpctk.SASG(0.3, 1e9, 2, warmup=1), MPI, steps=6, closure=True, resumes="by all"),
        Case("SASG mean, resumed by one", SASG_MEAN, MPI, closure=True, resumes="by one"),
        Case("Mean summed", hpctk.Mean(), ("compression",), stock="sum"),
        Case("Mean TopK summed", hpctk.Mean(hpctk.TopK(0.3)), ("compression",), stock="sum"),
        Case("Mean unattached", hpctk.Mean(), ("compression",), stock="unattached"),
        Case("AdaCons unattached", hpctk.AdaCons(0.75), ("compression",), BLAS, stock="unattached"),
        Case("Mean under DDP's join", hpctk.Mean(), ("ddp",), uneven="more on higher ranks"),
        Case("Mean clip, resumed", hpctk.Mean(clip=0.25), ATTACHED, FUSED, falling=True, resumes="by all"),
        Case("SAEF RandomK, server QSGD, resumed", served, MPI, resumes="by all"),
        Case("SAEF TopK Adam, resumed", hpctk.SAEF(hpctk.TopK(0.3)), MPI, FUSED, base="adam", resumes="by all"),
    ]


def half_cases() -> list[Case]:
    """Return parameters in half precision: float32 masters where the optimizer is hpctk's to ask."""
    top_k, saef = hpctk.Mean(hpctk.TopK(0.3)), hpctk.SAEF(hpctk.TopK(0.3))
    return [
        Case("Mean bfloat16", hpctk.Mean(), dtype="bfloat16", steps=6),
        Case("Mean TopK bfloat16", top_k, dtype="bfloat16"),
        Case("Mean TopK bfloat16, resumed", top_k, MPI, dtype="bfloat16", steps=6, resumes="by all"),
        Case("Mean overlapping, bfloat16", hpctk.Mean(), MPI, dtype="bfloat16", overlap=True),
        Case("SAEF TopK bfloat16", saef, ATTACHED, dtype="bfloat16"),
        Case("LocalSGD bfloat16", MODEL_METHODS["LocalSGD"], ATTACHED, dtype="bfloat16"),
        Case("Mean TopK float16", top_k, MPI, dtype="float16"),
    ]


def _vector(rank: int, t: int, n: int = 200) -> torch.Tensor:
    return numbers(f"vector {rank} {t}", (n,))


def _sparse(schedule: str, keep: int | None) -> Callable[[int, int, Any], Any]:
    def call(rank: int, t: int, comm: Any) -> Any:
        # Each rank lists other elements, and some that others list, too.
        indices = torch.arange(rank, 200, 3 + rank)
        values = _vector(rank, t)[indices]
        # Never "auto" and "dense": there the library adds.
        return hpctk.ops.sparse_allreduce(indices, values, 200, keep=keep, schedule=schedule, comm=comm)

    return call


def _opposed(rank: int, t: int, comm: Any) -> Any:
    """Return AdaCons's aggregate of gradients that cancel: where its weights make no sense."""
    vector, state = _vector(0, t) * (-1) ** rank, hpctk.ops.ConsensusState()
    found = hpctk.ops.adacons_aggregate([vector], state, comm=comm)
    return [*found, state.fallbacks]


def collective_cases() -> list[Case]:
    """Return collectives that users call themselves, where no method comes by."""
    ways = ("mpi", "torch")
    found = [
        Case(f"sparse_allreduce by {schedule}{kept}", None, ways, steps=2, call=_sparse(schedule, keep))
        for schedule in ("allgather", "recursive_doubling", "split")
        for keep, kept in ((None, ""), (20, " keep"))
    ]
    calls: dict[str, Callable[[int, int, Any], Any]] = {
        "allreduce sum": lambda rank, t, comm: [
            hpctk.allreduce(_vector(rank, t).float(), op="sum", schedule="ring", comm=comm)
        ],
        "allreduce bfloat16": lambda rank, t, comm: [
            hpctk.allreduce(_vector(rank, t).bfloat16(), schedule="ring", comm=comm).float()
        ],
        "allgather": lambda rank, t, comm: [hpctk.ops.allgather(_vector(rank, t), schedule="ring", comm=comm)],
        "broadcast": lambda rank, t, comm: [hpctk.ops.broadcast(_vector(rank, t), comm=comm)],
        "reduce_scatter": lambda rank, t, comm: [
            hpctk.ops.reduce_scatter(_vector(rank, t), schedule="rotation", comm=comm)
        ],
        "weighted_mean": lambda rank, t, comm: hpctk.ops.weighted_mean(
            [_vector(rank, t), _vector(rank, t + 1)], [1.0 + rank, 3.0], schedule="ring", comm=comm
        ),
    }
    found += [Case(name, None, ways, steps=2, call=call) for name, call in calls.items()]
    return [*found, Case("consensus, opposed", None, ways, BLAS, steps=1, call=_opposed)]


def by_name(cases: list[Case]) -> dict[str, Case]:
    """Return cases by their names, which must all differ."""
    found = {case.name: case for case in cases}
    assert len(found) == len(cases)
    return found


CASES = by_name(
    [
        *mean_cases(),
        *adacons_cases(),
        *sasg_cases(),
        *saef_cases(),
        *model_cases(),
        *successor_cases(),
        *schedule_cases(),
        *overlap_cases(),
        *event_cases(),
        *half_cases(),
        *collective_cases(),
    ]
)


def pairs(*ways: str) -> dict[str, tuple[str, Case]]:
    """Return every way in with each case that it can do, under a name for both."""
    return {f"{way}: {case.name}": (way, case) for way in ways for case in CASES.values() if way in case.ways}
