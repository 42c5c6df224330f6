"""Digests of what every method comes to, by every way in, at 1, 2 and 3 ranks: that code may move and bits may not.

    cases.py        what is trained: methods, settings, and what happens on the way
    problem.py      a small model whose gradients are the same bits on every machine
    ways.py         the five ways in, and the training loop
    digests.py      what is kept of a training, and digests.json, where it is kept
    record.py       writes digests.json anew:
                    ./launch/mpirun -n 2 python -m mpi4py tests/support/golden/record.py

Only hpctk's public names are used here: moving a module changes nothing in these files.

When to record anew: when a case is new; or when a change adds the same numbers in another order on purpose, and
its commit says which order, and why. Not because a test here has failed: that test has found a change of what
training comes to.
"""
