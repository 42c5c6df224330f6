"""How mpirun and horovodrun are started here: pure functions from what was typed to variables and words.

And the scripts of the emulated cluster, and how Horovod is built. Nothing here imports more than the standard library,
so that `hpctk mpirun` starts at once.
"""
