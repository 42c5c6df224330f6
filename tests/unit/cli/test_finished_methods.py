"""A method that was trained already, in a run of several: by as many ranks as the job begins with."""

from types import SimpleNamespace

import pytest

from hpctk.cli.train import finished
from hpctk.errors import SettingError

#: Three of four ranks are left.
HERE = SimpleNamespace(size=3, run_on_root=lambda what, work: work())
OWN = SimpleNamespace(path="runs/a", result=lambda: {"ranks": 4, "methods": {"mean": {"complete": True}}})


def test_ranks_that_were_lost_meanwhile_change_nothing():
    assert finished(HERE, OWN, "mean", 4, several=True) == {"complete": True}


def test_a_comparison_needs_the_same_number_of_ranks():
    with pytest.raises(SettingError, match="mean was trained on 4 ranks, now there are 3"):
        finished(HERE, OWN, "mean", 3, several=True)
