"""What is told of calls that belong together: labels, seconds, and what is carried counted once."""

import pytest

from hpctk.collectives.engine.call_recording import emit
from hpctk.collectives.engine.engine import Engine
from hpctk.telemetry.recorder import Call, Recorders, dense_sent


class Nowhere:
    """A transport of four ranks on which nothing is sent."""

    rank, size, tag_limit, waits = 0, 4, 32767, False


class Noted:
    traffic, flags = None, True

    def __init__(self):
        self.calls = []

    def record(self, call):
        self.calls.append(call)


@pytest.fixture
def noted():
    return Noted()


@pytest.fixture
def engine(noted):
    recorders = Recorders("mpi")
    recorders.append(noted)
    return Engine(Nowhere(), recorders)


def do(engine, nbytes, **more):
    call = engine.opened("allgather", "ring", nbytes, **more)
    engine.report(call)
    return call


def test_without_a_span_calls_are_told_at_once(engine, noted):
    do(engine, 5)
    assert [(call.payload_bytes, call.tensor, call.dense_bytes) for call in noted.calls] == [(5, "", 0)]


def test_labels_are_those_of_the_innermost_span_that_has_some(engine, noted):
    with engine.span("gradients", "TopK"), engine.span():
        do(engine, 1)
        with engine.span("fc.weight"):
            do(engine, 2)
    do(engine, 3)
    told = [(call.payload_bytes, call.tensor, call.compressor) for call in noted.calls]
    assert told == [(1, "gradients", "TopK"), (2, "fc.weight", "TopK"), (3, "", "")]


def test_what_is_carried_is_told_once_and_not_by_overhead(engine, noted):
    with engine.span(elements=1000, dense_bytes=4000):
        do(engine, 8, overhead=True)
        with engine.span("inner"):
            do(engine, 40)
        do(engine, 30)
    told = [(call.elements, call.dense_bytes, call.dense_sent_bytes, call.payload_bytes) for call in noted.calls]
    assert told == [(0, 0, 0, 8), (1000, 4000, 6000, 40), (0, 0, 0, 30)]


def test_an_array_carries_itself(engine, noted):
    engine.report(engine.opened_array("allreduce", "ring", 100, 4, own=100))
    engine.report(engine.opened_array("allgather", "ring", 100, 4, own=25))
    engine.report(engine.opened_array("allreduce", "ring", 100, 4, own=100, overhead=True))
    told = [(call.elements, call.dense_bytes, call.dense_sent_bytes, call.payload_bytes) for call in noted.calls]
    assert told == [(100, 400, 600, 400), (25, 100, 300, 100), (0, 0, 0, 400)]


def test_seconds_belong_to_the_next_call_or_to_the_last(engine, noted, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    with engine.span() as span:
        with span.staging():
            now[0] += 1
        with span.compressing():
            now[0] += 2
        with engine.span("inner"):
            do(engine, 1)
        with span.compressing():
            now[0] += 4
        do(engine, 2)
        with span.decompressing():
            now[0] += 8
        with engine.staging():
            now[0] += 16
        assert noted.calls == []
    seconds = [(c.staging_s, c.compressing_s, c.decompressing_s) for c in noted.calls]
    assert seconds == [(1, 2, 0), (16, 4, 8)]


def test_a_failure_inside_does_not_lose_calls(engine, noted):
    with pytest.raises(ValueError, match="of the user"), engine.span("a"), engine.span("b"):
        do(engine, 1)
        raise ValueError("of the user")
    assert [call.tensor for call in noted.calls] == ["b"]
    do(engine, 2)
    assert noted.calls[-1].tensor == ""


def test_agreements_are_told_to_those_who_want_to_know(engine, noted):
    engine.recorders.record_control("flags", "opening a step", 40, 0.0)
    assert engine.counter.calls == 0
    assert engine.recorders.exposed_s > 0
    told = noted.calls[0]
    assert (told.operation, told.schedule, told.tensor, told.payload_bytes) == ("flags", "mpi", "opening a step", 40)
    assert told.sent_bytes is None
    noted.flags = False
    engine.recorders.record_control("flags", "opening a step", 40, 0.0)
    assert len(noted.calls) == 1


@pytest.mark.parametrize(("kind", "sent"), [("allreduce", 150), ("allgather", 75), ("reduce_scatter", 75)])
def test_the_least_that_dense_tensors_need(kind, sent):
    assert dense_sent(kind, 100, 4) == sent
    assert dense_sent(kind, 100, 1) == 0


def test_a_call_starts_with_nothing_known():
    call = Call(operation="allreduce", schedule="mpi")
    assert call.sent_bytes is None
    assert call.received_bytes is None


def test_a_call_that_outlives_its_span_belongs_to_the_outer_one(engine, noted):
    with engine.span("outer") as outer:
        with engine.span("inner"):
            call = engine.opened("allreduce", "ring", 1)
            inner = engine._span
        emit(call, [noted], inner)
        assert noted.calls == []
        outer.spent("decompressing_s", 2.0)
    assert [(one.tensor, one.decompressing_s) for one in noted.calls] == [("inner", 2.0)]
