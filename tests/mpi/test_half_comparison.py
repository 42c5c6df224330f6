"""bfloat16 parameters train as float32 ones do: the losses are as near as those of three seeds are to each other."""

import pytest
from half_comparison import METHODS, SEEDS, TASKS, compared

# Losses of real training, seed by seed: that the steps are those of float32, rounded, test_half_parameters shows.
pytestmark = pytest.mark.full


@pytest.fixture(autouse=True)
def two_ranks(world):
    if world.size != 2:
        pytest.skip("what rounding does to training depends on no number of ranks")


def assert_alike(task, name):
    wide, half = compared(task, name, task.steps)
    assert abs(sum(half) - sum(wide)) / len(SEEDS) <= max(wide) - min(wide), (wide, half)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("task", TASKS)
def test_losses_are_alike(world, task, name):
    assert_alike(TASKS[task](), name)
