"""The logger `hpctk`, in processes of its own: this one has pytest's handlers."""

import subprocess
import sys

import pytest

SAY = "from hpctk.log import log; log.info('an info'); log.warning('step %d', 7)"


def said(program, level=None):
    environ = {"PATH": "", "PYTHONPATH": ":".join(sys.path)} | ({"HPCTK_LOG": level} if level else {})
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environ, timeout=60
    )
    assert done.stdout == ""
    return done.stderr


@pytest.mark.parametrize(
    ("level", "wanted"),
    [
        (None, "hpctk: step 7\n"),
        ("info", "hpctk: an info\nhpctk: step 7\n"),
        ("WARNING", "hpctk: step 7\n"),
        ("error", ""),
    ],
)
def test_where_nothing_is_configured_it_prints(level, wanted):
    assert said(SAY, level) == wanted


def test_an_unknown_level_is_said_and_changes_nothing():
    wanted = "hpctk: HPCTK_LOG='loud': need debug, info, warning, error or critical\nhpctk: step 7\n"
    assert said(SAY, "loud") == wanted


@pytest.mark.parametrize(
    ("configured", "wanted"),
    [
        ("logging.basicConfig(format='%(name)s|%(levelname)s|%(message)s')", "hpctk|WARNING|step 7\n"),
        ("logging.getLogger('hpctk').addHandler(logging.NullHandler())", ""),
        ("logging.getLogger('hpctk').setLevel('ERROR')", ""),
    ],
    ids=["root", "a handler of its own", "level"],
)
def test_a_program_that_configured_logging_gets_each_record_once(configured, wanted):
    assert said(f"import logging; {configured}; {SAY}") == wanted
    assert said(f"import logging, hpctk.log; {configured}; {SAY}") == wanted


def test_what_sys_stderr_is_at_the_time_gets_it():
    program = f"import contextlib, io, hpctk.log\nwith contextlib.redirect_stderr(io.StringIO()) as kept: {SAY}\n"
    assert said(program + "assert kept.getvalue() == 'hpctk: step 7\\n'") == ""
