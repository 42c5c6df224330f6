"""A program for ranks: messages of some size to all others while ranks are killed; those that are left go on.

    mpirun --with-ft ulfm -n 8 python lost_messages.py BYTES SEED

One rank after the other is killed at any moment of an exchange, until two are left. Prints "rank R: ok". Without torch.
"""

import os
import random
import signal
import sys
import threading
import time

from hpctk.comm.world import world

#: The most seconds from one recovery to the next kill.
WITHIN_S = 0.02

nbytes, seed = map(int, sys.argv[1:])
here = world()
here.expect_losses()
name, ranks = here.rank, here.size
draws = random.Random(seed)
victims = draws.sample(range(ranks), ranks - 2)
here.barrier("beginning")


def arm():
    """Let the next victim be killed in a moment, if that is this process."""
    lost = ranks - here.size
    if lost < len(victims) and victims[lost] == name:
        threading.Timer(draws.random() * WITHIN_S, os.kill, (os.getpid(), signal.SIGKILL)).start()


def exchange():
    """Send a message to each other rank, and receive theirs, as the engine does."""
    transport = here.transport()
    received = [bytearray(nbytes) for _ in range(here.size - 1)]
    sent = [bytes([here.rank]) * nbytes for _ in received]
    requests = []
    for k, buffer in enumerate(received, start=1):
        requests.append(transport.irecv(buffer, (here.rank - k) % here.size, 5))
        requests.append(transport.isend(sent[k - 1], (here.rank + k) % here.size, 5))
    # MPI may write into them when nobody waits any more.
    kept.append((requests, received, sent))
    while requests:
        done = set(transport.complete(requests))
        requests = [request for i, request in enumerate(requests) if i not in done]
    for k, buffer in enumerate(received, start=1):
        assert bytes(buffer) == bytes([(here.rank - k) % here.size]) * nbytes


kept = []
last = None
arm()
while True:
    try:
        exchange()
        # Once all are lost that are to be, a while longer.
        on = here.size > 2 or time.monotonic() < last + WITHIN_S
        on = here.minimum([int(on)], "asking whether to go on") != [0]
        done = True
    except here.losses:
        done = False
    if here.decide(done=done):
        if not on:
            break
    else:
        here.shrink()
        last = time.monotonic()
        arm()
assert here.size == 2, here.size
print(f"rank {name}: ok", flush=True)
