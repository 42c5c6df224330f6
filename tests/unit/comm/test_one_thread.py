"""Who may be inside a communicator's collectives: the same thread again, another one later, the driver in between."""

import threading
import time

import pytest

from hpctk.comm.agreement import OneThread
from hpctk.errors import HpctkError


def in_a_thread(work):
    """Return what `work` does in another thread, or the error that it raises."""
    found = []

    def run():
        try:
            found.append(work())
        except HpctkError as error:
            found.append(error)

    thread = threading.Thread(target=run, name="the other")
    thread.start()
    thread.join(30)
    return found[0]


def enter(inside):
    with inside:
        return "entered"


def test_the_same_thread_enters_again():
    inside = OneThread()
    with inside:
        with inside:
            assert isinstance(in_a_thread(lambda: enter(inside)), HpctkError)
        assert isinstance(in_a_thread(lambda: enter(inside)), HpctkError)
    assert in_a_thread(lambda: enter(inside)) == "entered"


def test_an_error_inside_lets_others_in():
    inside = OneThread()
    with pytest.raises(ZeroDivisionError), inside:
        _ = 1 / 0
    assert in_a_thread(lambda: enter(inside)) == "entered"


def test_another_thread_is_told_what_to_do():
    inside = OneThread("comm.Dup()")
    with inside:
        refused = str(in_a_thread(lambda: enter(inside)))
    assert "two threads use one communicator at once: give each thread its own, comm.Dup()" in refused
    assert "'the other'" in refused


def test_the_driver_stays_out_while_others_are_there():
    inside = OneThread()
    with inside:
        assert in_a_thread(lambda: inside.drive(lambda: True)) is False
    assert in_a_thread(lambda: inside.drive(lambda: True)) is True


def test_others_wait_for_the_driver():
    inside, driving, order = OneThread(), threading.Event(), []

    def work():
        with inside:
            driving.set()
            time.sleep(0.2)
            order.append("driven")
        return True

    thread = threading.Thread(target=lambda: inside.drive(work))
    thread.start()
    assert driving.wait(30)
    with inside:
        order.append("entered")
    thread.join(30)
    assert order == ["driven", "entered"]
