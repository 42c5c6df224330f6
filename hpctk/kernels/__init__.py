"""The arithmetic of compression, compiled: selecting, merging, and writing numbers in few bits.

Everything here is a function of flat, C-contiguous NumPy arrays; `device` does the same with torch
operations, for tensors that live on a GPU. Nothing knows about packets, ranks or MPI, and nothing
touches a global random generator. Import the modules where they are used: they import numba, which
`import hpctk` must not. Where numba is missing `plain` does the same in numpy, to the bit.
"""
