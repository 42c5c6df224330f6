"""The command lines that start ranks: pure functions from what was typed and what is here to words.

`launch/mpirun` and `launch/horovodrun` run `start.py` with whichever Python there is, so nothing here
imports more than the standard library.
"""
