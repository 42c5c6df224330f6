"""All ways to train that are compared: what each moves, computes, keeps, and how it is written down in a script.

A new method is an entry here. `change` says how much a way changes training: 0 nothing, 1 rounding, 2 what travels in
a step is compressed, 3 ranks train apart between rounds, 4 and little of what they came to travels.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hpctk.advise.network import Network, Transfer
from hpctk.advise.question import Question

DDP = "model = torch.nn.parallel.DistributedDataParallel(model)"
FP16 = "model.register_comm_hook(None, torch.distributed.algorithms.ddp_comm_hooks.default_hooks.fp16_compress_hook)"
#: PowerSGD's matrices, where nobody has said what they are: so many rows and columns.
SIDE = 1024
#: What ChunkTopK, and so SparseLoCo, sends of 4096 elements: indices and two bits each.
CHUNK_BYTES = 80
SLOW_UNDER_ADAM = "slow to converge under Adam and clipping"
SLOW_AT_EQUAL_STEPS = "lost to SAEF(TopK) at equal steps where that was measured"
LATER_THAN_LOCAL_SGD = "was later at the target than LocalSGD where that was measured"
CONTROL = "a baseline of another method"
COMPRESSOR = re.compile(r"\b(ChunkTopK|TopK|RandomK|Half|Sign|QSGD|PowerSGD)\(")


@dataclass(frozen=True)
class Way:
    """One way to train.

    Attributes
    ----------
    name : str
        As it would be written in a script.
    code : str
        The line to paste.
    change : int
        How much it changes training, 0 to 4.
    transfers : callable
        Network -> ways to move what a round moves, the fastest first.
    local : str
        Key of its local work.
    memory_bytes : float
        Beside model, gradients and the base optimizer's state.
    period : int
        Steps between rounds.
    overlaps : bool
        Whether communication hides behind backward.
    opens : bool
        Whether ranks agree at the start of each step.
    gradients : float
        How many gradients a step computes.
    caveat : str
        Why it is not recommended, where it is not.
    """

    name: str
    code: str
    change: int
    transfers: Callable[[Network], list[Transfer]]
    local: str
    memory_bytes: float
    period: int = 1
    overlaps: bool = False
    opens: bool = True
    gradients: float = 1.0
    caveat: str = ""


def ways(question: Question) -> Iterator[Way]:
    """Yield every way, those that change training least first; of equals the preferred first."""
    yield from _dense(question)
    yield from _compressed(question)
    for period in question.periods:
        yield from _periodic(question, period)


def _line(method: str, *, overlap: bool = False) -> str:
    spelled = COMPRESSOR.sub(r"hpctk.\1(", method)
    early = ", overlap=True" if overlap else ""
    return f"opt = hpctk.DistributedOptimizer(opt, hpctk.{spelled}, model=model{early})"


def _dense(q: Question) -> Iterator[Way]:
    n, dense = q.params, q.dense_bytes
    # Within a node buckets would be messages; what is exchanged at step() goes through the memory that ranks share.
    early = len(q.nodes) > 1
    yield Way("DDP, 32 bit", DDP, 0, lambda net: net.rings(dense), "ddp", dense, overlaps=True, opens=False)
    yield Way("Mean()", _line("Mean()", overlap=early), 0, lambda net: net.sums(dense), "mean", 0.0, overlaps=early)
    yield Way(
        "DDP, fp16 hook", f"{DDP}; {FP16}", 1, lambda net: net.rings(2 * n), "ddp fp16", 1.5 * dense,
        overlaps=True, opens=False,
    )  # fmt: skip
    yield Way("Mean(Half())", _line("Mean(Half())"), 1, lambda net: net.sums(2 * n), "half", 1.5 * dense)
    # What travels is what Mean sends, but the weights are others: it is no way to save time.
    yield Way(
        "AdaCons()", _line("AdaCons()", overlap=early), 2, lambda net: net.parts(dense), "adacons", 2.0 * dense,
        overlaps=early, caveat="it weighs gradients; it saves no bytes",
    )  # fmt: skip


def _compressed(q: Question) -> Iterator[Way]:
    n, dense, adam = q.params, q.dense_bytes, q.optimizer == "adam"
    thin = 4 * min(n, math.ceil(4 * 2 * n / SIDE))
    for density in q.densities:
        k, d = max(1, int(density * n)), f"{density:g}"

        def lists(net: Network, k: int = k) -> list[Transfer]:
            return net.lists(n, k)

        def uploads(net: Network, k: int = k) -> list[Transfer]:
            return [way for way in net.lists(n, k) if way.schedule == "allgather"]

        def values(net: Network, k: int = k) -> list[Transfer]:
            return net.sums(4 * k)

        yield _gradient(f"SAEF(TopK({d}))", lists, "saef top_k", dense)
        slow = SLOW_UNDER_ADAM if adam else SLOW_AT_EQUAL_STEPS
        yield _gradient(f"Mean(TopK({d}))", lists, "top_k", dense, caveat=slow)
        yield _gradient(f"EF21(TopK({d}))", lists, "ef21", 3.0 * dense, caveat=SLOW_UNDER_ADAM if adam else "")
        yield _gradient(f"Mean(RandomK({d}))", values, "random_k", dense, caveat="worse elements than TopK")
        name = f"SASG(density={d})"
        yield Way(
            name, _line(name), 2, uploads, "sasg", 3.0 * dense + 8.0 * k * q.ranks, gradients=2.0,
            caveat="needs step(closure); a second gradient in most steps",
        )  # fmt: skip
    yield _gradient(
        "SAEF(Sign(), server=Sign())",
        lambda net: net.one_bit(n),
        "saef sign",
        dense * (2 + 1 / q.ranks),
        caveat=SLOW_AT_EQUAL_STEPS,
    )
    yield _gradient("Mean(PowerSGD(4))", lambda net: net.sums(thin), "power_sgd", dense)
    yield _gradient(
        "Mean(Sign())", lambda net: net.gathered(-(-n // 8)), "sign", dense + n / 8 * q.ranks, caveat=CONTROL
    )
    yield _gradient(
        "Mean(QSGD(4))", lambda net: net.gathered(n // 2), "qsgd", dense + n / 2 * q.ranks,
        caveat="every rank decodes every rank's message",
    )  # fmt: skip


def _gradient(
    name: str, transfers: Callable[[Network], list[Transfer]], local: str, memory: float, caveat: str = ""
) -> Way:
    return Way(name, _line(name), 2, transfers, local, memory, caveat=caveat)


def _periodic(q: Question, period: int) -> Iterator[Way]:
    dense = q.dense_bytes

    def way(method: str, local: str, memory: float, *, rounds: int = 1, caveat: str = "") -> Way:
        name = method.replace("PERIOD", f"period={period}")

        def transfers(net: Network) -> list[Transfer]:
            return [Transfer(t.schedule, rounds * t.seconds, rounds * t.sent_bytes) for t in net.sums(dense)]

        return Way(name, _line(name), 3, transfers, local, memory, period, opens=False, caveat=caveat)

    clip = "needs a clip that fits your gradients"
    yield way("MGRAWA(PERIOD)", "mgrawa", dense)
    yield way("LGRAWA(PERIOD)", "lgrawa", dense)
    yield way("LocalSGD(PERIOD)", "local_sgd", 0.0)
    yield way("DiLoCo(PERIOD)", "diloco", 2.0 * dense, caveat=LATER_THAN_LOCAL_SGD)
    nbytes = -(-q.params * CHUNK_BYTES // 4096)
    chunked = f"MGRAWA(period={period}, compressor=ChunkTopK())"
    yield Way(
        chunked, _line(chunked), 4, lambda net: net.gathered(nbytes), "mgrawa chunk", 3.0 * dense, period, opens=False
    )
    sparse = f"SparseLoCo(period={period})"
    yield Way(
        sparse, _line(sparse), 4, lambda net: net.gathered(nbytes), "sparse_loco", 2.0 * dense, period, opens=False
    )
    yield way("CELGC(clip=1.0, PERIOD)", "celgc", 0.0, caveat=clip)
    yield way("EPISODE(clip=1.0, PERIOD)", "episode", 2.0 * dense, rounds=2, caveat=clip)
    yield way("EASGD(PERIOD)", "easgd", 2.0 * dense, caveat=CONTROL)
    yield Way(
        f"LSGD(period={period})", _line(f"LSGD(period={period})"), 3, lambda net: net.broadcasts(dense), "lsgd",
        dense, period, opens=False, caveat=CONTROL,
    )  # fmt: skip
