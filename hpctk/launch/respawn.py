"""`hpctk mpirun --respawn K`: a job that has lost ranks gets all of them back at its next checkpoint.

    a rank is lost            the others go on without it (on_lost_rank="shrink")
    the next checkpoint       they save, and leave with RESPAWN (checkpoint/checkpoints.py)
    here                      the job is begun anew with all ranks, which load what was saved; K times at most

Whoever starts ranks anew must outlive mpirun, so this process waits for it instead of becoming it, and passes on
signals. Not by MPI_Comm_spawn, which brings a new rank into a job that goes on: on Open MPI 5.0 most jobs in which it
was used did not end (docs/faults.md).
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

from hpctk.comm.exit_status import RESPAWN, SAVED
from hpctk.errors import SettingError
from hpctk.launch.command_line import MPIRUN, CommandLine
from hpctk.settings import Setting

#: How often ranks may still ask to be begun anew; where it is not set nobody would do so.
LEFT = "HPCTK_RESPAWN"
SHRINK = "HPCTK_ON_LOST_RANK"
#: What a launcher passes on to its job: what ends it, and what does not.
ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR2)
PASSED_ON = (*ENDING, signal.SIGUSR1)
TIMES = Setting("how often a job is begun anew", int, at_least=0, at_most=1000)


class _Job:
    """The mpirun under way, and the signal by which it was to end, 0 for none."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.heard = 0
        #: What came before there was anybody to pass it on to.
        self._waiting: list[int] = []

    def run(self, command: Sequence[str], environ: Mapping[str, str]) -> int:
        """Run mpirun, and return its exit status; that of a signal is negative."""
        # A group of its own: a signal for ours, such as Ctrl-C of a terminal, would reach it once more by pass_on, and
        # ranks that hear of a stop twice do not save.
        process = self.process = subprocess.Popen(command, env=environ, process_group=0)
        while self._waiting:
            process.send_signal(self._waiting.pop())
        try:
            return process.wait()
        finally:
            self.process = None

    def pass_on(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal on."""
        self.heard = number if number in ENDING else self.heard
        if self.process is None:
            self._waiting.append(number)
        else:
            self.process.send_signal(number)

    @contextmanager
    def hearing(self) -> Iterator[None]:
        """Pass signals on meanwhile, but for those that were to be ignored, as by nohup."""
        heeded = [number for number in PASSED_ON if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self.pass_on) for number in heeded}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def times(text: str) -> int:
    """Return how often a job may be begun anew, as it was typed."""
    found: int = TIMES.parse("--respawn", text)
    return found


def tolerant(words: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return mpirun's words for ranks that may be lost. Raise SettingError where they are to end with the first one."""
    said = environ.get(SHRINK) or "shrink"
    if said != "shrink":
        raise SettingError(f"--respawn is for ranks that go on without one that is lost, but {SHRINK}={said}")
    return [*([] if "with-ft" in CommandLine(words, MPIRUN).names else ["--with-ft"]), *words]


def run(command: Sequence[str], environ: Mapping[str, str], times: int) -> int:
    """Run a job, and anew whenever its ranks ask for it, `times` times at most; return its exit status."""
    job = _Job()
    with job.hearing():
        for begun in range(times + 1):
            if begun:
                print(f"hpctk mpirun: beginning anew with all ranks, {begun} of at most {times} times", file=sys.stderr)
            status = job.run(command, {**environ, SHRINK: "shrink", LEFT: str(times - begun)})
            if job.heard and (status == RESPAWN or (begun and status == -job.heard)):
                # It was to end, maybe before the ranks begun anew could listen: who starts it again finds it saved.
                return SAVED
            if status != RESPAWN:
                break
    return 128 - status if status < 0 else status
