"""How mpirun and horovodrun are started here: pure functions from what was typed to variables and words.

Nothing here imports more than the standard library, so that `hpctk mpirun` starts at once.
"""
