"""A program for the ranks of an emulated cluster: hosts disappear, and those that are left go on. Needs no torch.

    lost_host.py FOLDER: rank R writes FOLDER/R at its end: the ranks that are left and the steps that counted on all

All ranks of host h1 are killed in step 10; those of h2 in step 30, once its link is down: nobody hears of that.
"""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from hpctk.comm.world import world

STEPS = 50

here = world()
here.expect_losses()
name, host, counted = here.rank, socket.gethostname(), 0
while counted < STEPS:
    if (host, counted) in (("h1", 10), ("h2", 30)):
        if host == "h2":
            # The other rank of this host may have been faster.
            subprocess.run(["ip", "link", "set", "eth0", "down"], check=False)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        done = here.minimum([counted], "counting steps") == [counted]
    except here.losses:
        done = False
    if here.decide(done=done):
        counted += 1
    else:
        here.shrink()
        here.expect_losses()
Path(sys.argv[1], str(name)).write_text(f"{here.size} left, {counted} steps\n")
