"""Every method comes to the bits that are recorded in tests/support/golden, by both ways under Horovod.

See tests/support/golden/__init__.py for when, and only when, digests are recorded anew.
"""

import pytest
from golden import digests
from golden.cases import pairs
from golden.ways import train

UNDER_HOROVOD = pairs("horovod", "compression")


@pytest.mark.parametrize("name", UNDER_HOROVOD)
def test_under_horovod(comm, hvd, shared_folder, name):
    way, case = UNDER_HOROVOD[name]
    digests.check(way, case, train(way, case, shared_folder / name), comm)
