"""The counter's totals."""

import pytest

from hpctk.telemetry.recorder import Call, Counter


def call(operation="allreduce", sent=100, received=90, messages=3, seconds=0.5):
    return Call(
        operation=operation,
        schedule="ring",
        elements=25,
        dense_bytes=100,
        sent_bytes=sent,
        received_bytes=received,
        messages=messages,
        began_s=1.0,
        seconds=seconds,
    )


def test_totals():
    counter = Counter()
    counter.record(call())
    counter.record(call("broadcast", sent=0, received=8, messages=0, seconds=0.25))
    counter.record(call(sent=1, received=2))
    assert (counter.calls, counter.messages, counter.uncounted_calls) == (3, 6, 0)
    assert (counter.sent_bytes, counter.received_bytes) == (101, 100)
    assert counter.seconds == 1.25
    assert counter.by_operation == {"allreduce": 2, "broadcast": 1}


@pytest.mark.parametrize(("sent", "received"), [(None, None), (None, 90), (100, None)])
def test_unknown_bytes_are_counted_apart(sent, received):
    # Half-known calls too: totals over different sets of calls could not be compared with each other.
    counter = Counter()
    counter.record(call())
    counter.record(call(sent=sent, received=received))
    assert (counter.calls, counter.uncounted_calls, counter.messages) == (2, 1, 6)
    assert (counter.sent_bytes, counter.received_bytes) == (100, 90)


def test_counters_share_nothing():
    one, other = Counter(), Counter()
    one.record(call())
    assert other == Counter()
