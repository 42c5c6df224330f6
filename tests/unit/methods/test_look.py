"""One look at every gradient, whether all at once or some when they left during backward."""

import math

import pytest
import torch

from hpctk.methods.core.replica import Look, look, look_at_others

NAMES = ["a", "b", "c", "d"]


def gradients(bad=None):
    made = [torch.tensor([1.0, -3.0]), None, torch.tensor([-5.0, 2.0]), torch.tensor([4.0])]
    if bad is not None:
        made[bad][0] = math.nan
    return made


@pytest.mark.parametrize("bad", [None, 0, 2, 3])
@pytest.mark.parametrize("looked_at", [(), (0,), (2, 3), (0, 2, 3)])
def test_a_look_in_parts_finds_what_one_look_does(bad, looked_at):
    held = gradients(bad)
    looks = {NAMES[i]: look([held[i]]) for i in looked_at}
    whole, parts = look(held), look_at_others(NAMES, held, looks)
    assert parts.bad == whole.bad == bad
    if bad is None:
        assert parts.largest == whole.largest == 5.0


def test_what_was_sent_for_a_gradient_that_is_not_there_says_nothing():
    held = gradients()
    looks = {"b": Look(None, 7.0)}
    assert look_at_others(NAMES, held, looks) == Look(None, 5.0)
