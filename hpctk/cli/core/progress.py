"""A progress bar for one rank: one line that is rewritten on a terminal, a few lines in a log."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO

from hpctk.comm import environment

#: Seconds between two rewritings, and between two lines in a log.
BAR_S, LINE_S = 0.1, 10.0
#: Characters of the bar.
SHORTEST, LONGEST = 4, 24


class Progress:
    """Shows how far a piece of work is, on standard error unless a stream is given: results stay clean."""

    def __init__(self, title: str, stream: TextIO | None = None) -> None:
        self._title = title
        self._stream = stream or sys.stderr
        # mpirun stands between a rank and the terminal: whoever started it says what there is.
        self._style = environment.read("HPCTK_PROGRESS") or ("bar" if self._stream.isatty() else "lines")
        self._began = self._shown = 0.0
        #: Steps that were over before: of a job that was resumed.
        self._first = 0
        #: Whether there is a line that is not ended.
        self._open = False

    def step(self, done: int, total: int, remark: str = "") -> None:
        """Show that `done` steps of `total` are over, unless something was shown a moment ago."""
        now = time.monotonic()
        # The clock starts with the first step: what was loaded before it says nothing about the rest.
        if not self._began:
            self._began, self._first = now, done
        last, bar = done >= total, self._style == "bar"
        too_soon = now - self._shown < (BAR_S if bar else LINE_S)
        if self._style == "none" or (too_soon and not last):
            return
        self._shown = now
        self._open = bar and not last
        width = shutil.get_terminal_size().columns - 1 if bar else 0
        line = self._line(done, total, remark, now - self._began, width)
        self._stream.write(f"\r{line[:width]:<{width}}" if bar else line)
        self._stream.write("" if self._open else "\n")
        self._stream.flush()

    def finish(self) -> None:
        """End the line of work that was ended before its last step."""
        if self._open:
            self._stream.write("\n")
            self._stream.flush()
            self._open = False

    def _line(self, done: int, total: int, remark: str, seconds: float, width: int) -> str:
        """Return the line; the bar gives way to the words where `width` is short, 0 standing for any."""
        done_here, left = done - self._first, ""
        if done_here > 0 and done < total and seconds > 1:
            left = f", {seconds / done_here * (total - done):.0f} s left"
        words = f"{done}/{total} {seconds:.0f} s{left}  {remark}"
        room = width - len(f"{self._title} [] {words}") if width else LONGEST
        length = min(LONGEST, max(SHORTEST, room))
        bar = "#" * round(length * (done / total if total else 1.0))
        return f"{self._title} [{bar:<{length}}] {words}"
