"""Everything here runs on the stand-in device of tests/support/shielded.cpp."""

import shielded
from golden import problem

# Before any model is made.
problem.device = shielded.register()
