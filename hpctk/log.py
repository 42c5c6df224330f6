"""The logger `hpctk`: what the library has to say that is neither a result nor an error.

A program that has configured logging gets the records as it likes. In any other program they are printed to standard
error as `hpctk: message`. The environment variable HPCTK_LOG sets the level.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping

from hpctk.errors import SettingError

LEVELS = ("debug", "info", "warning", "error", "critical")

log = logging.getLogger("hpctk")


def level(environ: Mapping[str, str] = os.environ) -> int:
    """Return the level that HPCTK_LOG names, NOTSET where it is not set. Raise SettingError if it names none."""
    text = environ.get("HPCTK_LOG", "")
    if text and text.lower() not in LEVELS:
        raise SettingError(f"HPCTK_LOG={text!r}: need {', '.join(LEVELS[:-1])} or {LEVELS[-1]}")
    return logging.getLevelNamesMapping()[text.upper() or "NOTSET"]


class FallbackHandler(logging.Handler):
    """Prints records to standard error where the program has given no handler to the logger or to the root."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record, unless others get it."""
        if any(handler is not self for handler in (*log.handlers, *logging.root.handlers)):
            return
        try:
            # One call: lines of several ranks then do not mix.
            sys.stderr.write(f"hpctk: {self.format(record)}\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


log.addHandler(FallbackHandler())
try:
    if level():
        log.setLevel(level())
except SettingError as error:
    log.warning("%s", error)
