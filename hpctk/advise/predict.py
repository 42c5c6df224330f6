"""Seconds of a step by every way: computing, what the method computes, and what is waited for of the network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hpctk.advise.local_work import Passes
from hpctk.advise.network import Network, Transfer
from hpctk.advise.question import Question
from hpctk.advise.ways import Way, ways
from hpctk.collectives.tuning.calibration import Calibration

#: What DDP, and hpctk with overlap=True, exchange at once: the last of these cannot hide behind backward.
BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True)
class Prediction:
    """A step by one way and one schedule; bytes are what the busiest rank sends in a step, on average."""

    name: str
    schedule: str
    period: int
    change: int
    seconds: float
    compute_s: float
    local_s: float
    communication_s: float
    exposed_s: float
    sent_bytes: float
    memory_bytes: float
    code: str
    caveat: str


def predict(question: Question, calibration: Calibration, local: Mapping[str, Passes]) -> list[Prediction]:
    """Return a step by every way and schedule, in the order of the ways, each way's fastest schedule first."""
    network = Network(calibration, question.nodes)
    opening_s = network.opening_s()
    made: list[Prediction] = []
    for way in ways(question):
        made += _priced(question, way, way.transfers(network), opening_s if way.opens else 0.0, local[way.local])
    return made


def _priced(
    question: Question, way: Way, transfers: Sequence[Transfer], opening_s: float, passes: Passes
) -> Iterator[Prediction]:
    compute_s = question.step_s * way.gradients
    local_s = passes.seconds(question.params, way.period)
    for place, transfer in enumerate(transfers):
        communication_s = transfer.seconds / way.period + opening_s
        waited_s = exposed(question, communication_s) if way.overlaps else communication_s
        code = way.code
        if place and "schedule" not in code and code.startswith("opt = "):
            code = code.removesuffix(")") + f', schedule="{transfer.schedule}")'
        yield Prediction(
            way.name, transfer.schedule, way.period, way.change, compute_s + local_s + waited_s, compute_s, local_s,
            communication_s, waited_s, transfer.sent_bytes / way.period, way.memory_bytes, code, way.caveat,
        )  # fmt: skip


def exposed(question: Question, communication_s: float) -> float:
    """Return what of a communication that begins with backward is waited for: what is longer, and the last bucket."""
    last = min(1.0, BUCKET_BYTES / question.dense_bytes)
    return max(communication_s - question.overlap_share * question.step_s, last * communication_s)


def fastest(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Return each way by its fastest schedule, in the order of the ways."""
    found: dict[str, Prediction] = {}
    for entry in predictions:
        if entry.name not in found or entry.seconds < found[entry.name].seconds:
            found[entry.name] = entry
    return list(found.values())


def at_scales(
    question: Question, calibration: Calibration, local: Mapping[str, Passes], scales: Sequence[int]
) -> dict[int, list[Prediction]]:
    """Return the fastest schedule of each way for other numbers of ranks, each with the same work to do."""
    return {ranks: fastest(predict(replace(question, ranks=ranks), calibration, local)) for ranks in scales}
