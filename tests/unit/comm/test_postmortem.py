"""Processes told apart: those that run, and those that have ended."""

import os
import subprocess
import sys
import time

from hpctk.comm.postmortem import Process


def test_this_process_runs():
    assert Process.of(os.getpid()).is_alive()


def test_a_process_that_has_ended_does_not_run_before_anybody_asks_for_its_status():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = Process.of(child.pid)
    assert process.is_alive()
    child.stdin.close()
    deadline = time.monotonic() + 20
    while process.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    # Nobody has waited for it yet, so it still has its pid.
    assert os.path.exists(f"/proc/{child.pid}")
    assert not process.is_alive()
    child.wait()
    assert not process.is_alive()


def test_another_process_under_the_same_pid_is_not_the_one():
    me = Process.of(os.getpid())
    assert not Process(me.pid, me.namespace, me.start_ticks + 1).is_alive()
