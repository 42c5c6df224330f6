"""Waiting for other ranks without waiting forever, and finding out whom we wait for.

A rank that waits polls its request. Meanwhile it listens: a peer that waits too may ask "are you
there?", and is told which operation this rank waits in. A rank that leaves the program says so to
those who watch it. So a rank that has waited for a while knows whether to go on (the peer has not
answered: it computes), or to give up at once (the peer has left and will never come); at the
deadline it can name the ranks that did not come.

Each rank watches its next WATCHED neighbours only, so that a roll call of P waiting ranks costs
WATCHED*P messages, not P*P.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from hpctk.comm.mpi.abort import fault_tolerant
from hpctk.comm.mpi.survivors import completed
from hpctk.comm.mpi.tags import ANSWER, FAREWELL, GAVE_UP, LETTERS, QUESTION
from hpctk.errors import PeerError

WATCHED = 64
#: Seconds of waiting before a rank asks who is there, and between two questions.
PATIENCE_S = 2.0
#: Seconds a peer has for its answer. A rank that waits in hpctk answers within milliseconds.
ANSWER_S = 0.5
#: Seconds in which what a rank has sent before it left may still arrive, where cores are few.
GRACE_S = 3.0
#: Looks before the core is offered to others for the first time.
LOOKS = 8
#: Seconds before the first pause: a message on its way is not worth giving up the core for.
SPIN_S = 1e-3
#: Seconds for which nothing but the messages waited for is looked at.
FEW_S = 5e-5
NAP_S = 5e-5
#: Seconds between two looks for questions of others: each costs as much as a look for a message.
LISTEN_S = 5e-3

#: Held by every thread of hpctk's but the rank's own while it is in MPI, and by the rank's own in MPI_Comm_agree and
#: MPI_Comm_shrink: in Open MPI 5.0 an agreement is not thread-safe. Beside a thread that probed for messages about one
#: in a thousand said no though all ranks had said yes.
ONE_IN_MPI = threading.RLock()

#: Returns the ranks that a wait depends on; asked only when it has lasted.
Peers = Callable[[], Iterable[int]]

TEXT_BYTES = 240


class Waiter:
    """One wait: call `pause` whenever there is nothing to do, `progress` whenever there was.

    Spins at first (a message on its way is not worth giving up the core for), then sleeps between
    looks, answers the questions of others, asks its own, and raises PeerError when there is no hope
    or the deadline has passed since the last progress.
    """

    def __init__(self, roll_call: Watchdog, operation: str) -> None:
        self._watchdog = roll_call
        self._operation = operation
        self._began = self._next_listen = self._next_question = 0.0
        #: Whether a rank that is waited for had left when this one asked.
        self._peer_left = False

    def progress(self) -> None:
        """Something came: start counting anew."""
        self._began, self._peer_left = 0.0, False

    def pause(self, peers: Peers = tuple) -> None:
        """Let some time pass, waiting for `peers()` (all ranks where empty); PeerError where that is in vain."""
        now = time.monotonic()
        if not self._began:
            self._began, self._next_listen = now, now + LISTEN_S
            self._next_question = now + self._watchdog.patience_s
        if self._watchdog.work():
            self.progress()
            return
        if now < self._began + SPIN_S:
            os.sched_yield()
            return
        time.sleep(NAP_S)
        self.look(now, peers)

    def look(self, now: float, peers: Peers = tuple, going_on: Callable[[], bool] = lambda: True) -> None:
        """Listen and ask where it is time to; PeerError where waiting is in vain.

        `going_on` returns whether this still waits, where it is another thread that does.
        """
        watchdog = self._watchdog
        if not self._began:
            self._began = self._next_listen = now
            self._next_question = now + watchdog.patience_s
        last = now >= self._began + watchdog.timeout_s
        if not last and now < self._next_listen and now < self._next_question:
            return
        try:
            # The guard's thread may be at it for a call that has just ended.
            with ONE_IN_MPI:
                watchdog.listen(self._operation)
                self._next_listen = now + LISTEN_S
                if last or now >= self._next_question:
                    self._peer_left = watchdog.question(
                        peers(), self._operation, last, sure=self._peer_left, going_on=going_on
                    )
                    wait_s = GRACE_S if self._peer_left else watchdog.patience_s
                    self._next_question = time.monotonic() + wait_s
        except MPI.Exception as error:
            raise watchdog.failure(error, self._operation) from error


def spun(requests: Sequence[MPI.Request]) -> bool:
    """Look at requests for a moment, in as few calls of Python as can be; return whether all are complete.

    One after the other: they are waited for together, and to look at one lets MPI go on with all.
    """
    until = 0.0
    for request in requests:
        looks = 0
        while not request.Test():
            looks += 1
            if looks < LOOKS:
                continue
            now = time.monotonic()
            until = until or now + FEW_S
            if now >= until:
                return False
            os.sched_yield()
    return True


class Watchdog:
    """Polled waiting on the requests of one communicator's ranks.

    Parameters
    ----------
    control : MPI.Comm
        Questions and answers travel on it, with tags that nothing else has there.
    timeout_s : float
        How long to wait for anything.
    on_missing : callable
        Called with the ranks that did not answer at the deadline, before the error is raised.
    """

    def __init__(self, control: MPI.Comm, timeout_s: float, on_missing: Callable[[list[int]], None]) -> None:
        self.control = control
        self.rank, self.size = control.Get_rank(), control.Get_size()
        self.timeout_s = timeout_s
        self.left: dict[int, str] = {}
        self.gave_up: dict[int, str] = {}
        #: Work to go on with while waiting; each returns whether it got something done.
        self.background: list[Callable[[], bool]] = []
        #: Whether ranks may be lost: then others need not be asked what they do when one is.
        self.quiet = False
        self._on_missing = on_missing
        self._number = 0
        self._outgoing: list[tuple[MPI.Request, Any]] = []
        #: Requests that were given up, with their buffers.
        self.abandoned: list[MPI.Request] = []

    def wait(
        self, requests: Sequence[MPI.Request], operation: str, peers: Iterable[int] = (), comm: MPI.Comm | None = None
    ) -> None:
        """Wait until all `requests` are complete, or raise PeerError.

        Parameters
        ----------
        requests : sequence of MPI.Request
        operation : str
            What this rank is doing, for messages here and on other ranks.
        peers : iterable of int
            Ranks the requests depend on; all ranks where empty.
        comm : MPI.Comm, optional
            On which they are, where it may be revoked and this rank goes on.
        """
        try:
            if comm is not None:
                self._outlive(comm, requests, operation, peers)
                return
            # A few looks before anything else: most waits of a few bytes end here.
            if spun(requests):
                return
            waiter = self.waiter(operation)
            while not MPI.Request.Testall(requests):
                waiter.pause(lambda: peers)
        except BaseException as error:
            # Should the others come after all, MPI would write into memory that is somebody else's by then.
            self.abandoned += requests
            if isinstance(error, MPI.Exception):
                raise self.failure(error, operation) from error
            raise

    def _outlive(self, comm: MPI.Comm, requests: Sequence[MPI.Request], operation: str, peers: Iterable[int]) -> None:
        pending, looks, until = list(requests), 0, 0.0
        waiter: Waiter | None = None
        while pending:
            done = completed(comm, pending)
            if done:
                pending = [request for i, request in enumerate(pending) if i not in done]
                continue
            looks += 1
            if looks < LOOKS:
                continue
            now = time.monotonic()
            until = until or now + FEW_S
            if now < until:
                os.sched_yield()
                continue
            waiter = waiter or self.waiter(operation)
            waiter.pause(lambda: peers)

    def work(self) -> bool:
        """Go on with everything in the background; return whether anything got done."""
        done = False
        for step in self.background:
            done |= step()
        return done

    @property
    def patience_s(self) -> float:
        """Seconds of waiting between two questions."""
        return min(PATIENCE_S, self.timeout_s / 2)

    def waiter(self, operation: str) -> Waiter:
        """Return what a rank does while it waits."""
        return Waiter(self, operation)

    def failure(self, error: MPI.Exception, operation: str) -> PeerError:
        """Return what to raise where MPI itself ends an operation with an error: who has died, where MPI knows."""
        text = f"rank {self.rank} of {self.size}: MPI says {error.Get_error_string()!r} in {operation}"
        if not fault_tolerant():
            return PeerError(f"{text}. Did the ranks give tensors of different sizes?")
        missing = [] if self.quiet or self.dead() else self._missing(operation)
        # That may have taken a while: by now MPI may know of more.
        dead = self.dead()
        if dead:
            return PeerError(f"{text}: rank {', '.join(map(str, dead))} {'has' if len(dead) == 1 else 'have'} died.")
        if missing:
            return PeerError(f"{text}: rank {', '.join(map(str, missing[:8]))} did not come and does not answer.")
        return PeerError(f"{text}: another rank has given up.")

    def dead(self) -> list[int]:
        """Return the ranks that MPI knows to be dead."""
        failed = self.control.Get_failed()
        return list(failed.Translate_ranks(list(range(failed.Get_size())), self.control.Get_group()))

    def _missing(self, operation: str) -> list[int]:
        """Return the ranks that are in no operation, where another rank has ended this one."""
        watched = self.watched()
        with ONE_IN_MPI:
            try:
                answers = self.ask(watched, operation)
            except MPI.Exception:
                return []
            return [peer for peer in watched if self._silent(peer, answers)]

    def question(
        self,
        peers: Iterable[int],
        operation: str,
        last: bool,
        *,
        sure: bool,
        going_on: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Ask the peers we wait for; return whether one has left. PeerError if so and `sure`, or at the last question.

        A farewell may overtake what its rank has sent before it: only who still waits some time later waits in vain.
        Where it is no longer `going_on`, nothing is raised.
        """
        expected = self._expected(peers)
        # A peer may itself wait for another: in the end, ask around who is missing.
        everyone = list(dict.fromkeys([*expected, *self.watched()])) if last else expected
        answers = self.ask(everyone, operation, going_on)
        if not going_on():
            return False
        gone = [peer for peer in everyone if peer in self.left]
        if gone and (sure or last):
            raise PeerError(
                f"rank {self.rank} of {self.size} waits in {operation}, but rank {gone[0]} "
                f"{self.left[gone[0]]} and will never come. Every rank must make the same collective calls."
            )
        if last:
            self._give_up(expected, everyone, answers, operation)
        return bool(gone)

    def _expected(self, peers: Iterable[int]) -> list[int]:
        named = [peer for peer in dict.fromkeys(peers) if peer != self.rank]
        return named[:WATCHED] or self.watched()

    def watched(self) -> list[int]:
        """Return the ranks this rank asks, and whose farewells it hears."""
        return [(self.rank + i) % self.size for i in range(1, min(WATCHED, self.size - 1) + 1)]

    def ask(self, peers: Sequence[int], operation: str, going_on: Callable[[], bool] = lambda: True) -> dict[int, str]:
        """Ask `peers` what they wait in; return the answers that come in time, while it is `going_on`."""
        self._number += 1
        question = np.array([self._number], np.int64)
        for peer in peers:
            if peer not in self.left:
                self._send(question, peer, QUESTION)
        answers: dict[int, str] = {}
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline and going_on() and any(self._silent(p, answers) for p in peers):
            self.listen(operation, answers)
            time.sleep(NAP_S)
        return answers

    def _silent(self, peer: int, answers: dict[int, str]) -> bool:
        return peer not in answers and peer not in self.left and peer not in self.gave_up

    def listen(self, operation: str, answers: dict[int, str] | None = None) -> None:
        """Take in what has arrived: answer that we wait in `operation`, collect `answers`, note farewells."""
        status = MPI.Status()
        for tag in LETTERS:
            while self.control.Iprobe(MPI.ANY_SOURCE, tag, status):
                self._receive(status.Get_source(), tag, operation, answers)
        # Not before: on a communicator that was revoked the loop has raised.
        self._outgoing = [(request, data) for request, data in self._outgoing if not request.Test()]

    def _receive(self, peer: int, tag: int, operation: str, answers: dict[int, str] | None) -> None:
        if tag == QUESTION:
            question = np.empty(1, np.int64)
            self.control.Recv([question, MPI.INT64_T], peer, tag)
            self._send(_letter(int(question[0]), operation), peer, ANSWER)
            return
        letter = np.zeros(8 + TEXT_BYTES, np.uint8)
        self.control.Recv([letter, MPI.BYTE], peer, tag)
        number, text = _read(letter)
        if tag == FAREWELL:
            self.left[peer] = text
        elif tag == GAVE_UP:
            self.gave_up[peer] = text
        elif answers is not None and number == self._number:
            answers[peer] = text

    def farewell(self, reason: str) -> None:
        """Tell those who watch this rank that it leaves the program."""
        self._tell_watchers(reason, FAREWELL)

    def _tell_watchers(self, text: str, tag: int) -> None:
        for i in range(1, min(WATCHED, self.size - 1) + 1):
            self._send(_letter(0, text), (self.rank - i) % self.size, tag)

    def _send(self, data: Any, peer: int, tag: int) -> None:
        request = self.control.Isend([data.view(np.uint8), MPI.BYTE], peer, tag)
        self._outgoing.append((request, data))

    def _give_up(
        self, expected: Sequence[int], everyone: Sequence[int], answers: dict[int, str], operation: str
    ) -> None:
        # The others' deadlines pass at the same moment: tell them that we were here.
        self._tell_watchers(operation, GAVE_UP)
        answers = {**self.gave_up, **answers}
        missing = [peer for peer in expected if peer not in answers]
        missing = missing or [peer for peer in everyone if peer not in answers]
        if not self.gave_up:
            # The first to give up has the stuck ranks shown; the others would only repeat it.
            self._on_missing(missing)
        lines = [f"rank {self.rank} of {self.size} waited {self.timeout_s:g} s in {operation}"]
        if missing:
            shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            lines.append(f"rank {shown} did not come and does not answer: stuck, computing or dead")
        elsewhere = {peer: text for peer, text in answers.items() if text != operation}
        lines += [f"rank {peer} waits in {text}" for peer, text in list(elsewhere.items())[:8]]
        lines.append("HPCTK_TIMEOUT_S sets how long to wait")
        raise PeerError("; ".join(lines) + ".")


def _letter(number: int, text: str) -> Any:
    letter = np.zeros(8 + TEXT_BYTES, np.uint8)
    letter[:8] = np.frombuffer(number.to_bytes(8, "little", signed=True), np.uint8)
    encoded = np.frombuffer(text.encode(errors="backslashreplace")[:TEXT_BYTES], np.uint8)
    letter[8 : 8 + len(encoded)] = encoded
    return letter


def _read(letter: Any) -> tuple[int, str]:
    raw = letter.tobytes()
    return int.from_bytes(raw[:8], "little", signed=True), raw[8:].rstrip(b"\0").decode(errors="replace")
