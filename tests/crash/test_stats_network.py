"""What the files say was sent is what the network interfaces saw."""

import json
import textwrap

import pytest
from emulated_cluster import needs_cluster, succeed

#: Every rank is a host of its own; its only interface is eth0, and /proc/net/dev is that of its network namespace.
PROGRAM = """
    import json, sys, time
    from pathlib import Path
    import torch, hpctk
    from hpctk.collectives.engine.engine import counted
    from hpctk.stats.read import read_rank
    from hpctk.telemetry.recording import Recording
    from hpctk.telemetry.settings import StatsSettings
    from hpctk.comm.world import world

    here, home = world(), Path(sys.argv[1])

    def counters():
        line = next(line for line in open("/proc/net/dev") if line.strip().startswith("eth0:"))
        numbers = line.split(":")[1].split()
        return int(numbers[8]), int(numbers[0])

    def seen(run):
        here.barrier()
        before = counters()
        run()
        here.barrier()
        time.sleep(0.2)
        return [b - a for a, b in zip(before, counters())]

    def compared(name, run, path):
        interface = seen(run)
        peers = read_rank(path).table("peers")
        logged = [int(peers[column].sum()) for column in ("sent_bytes", "received_bytes")]
        return {"name": name, "interface": interface, "logged": logged}

    def collective(name, call):
        path = home / f"{name}-{here.rank}.h5"
        described = {"rank": here.rank, "size": here.size}
        recording = Recording(path, StatsSettings(home), here.size, "all", described, {})
        def run():
            with counted(here, recording):
                call()
            recording.close()
        return compared(name, run, path)

    def training(name, method):
        torch.manual_seed(0)
        model = torch.nn.Linear(1000, 300)
        def run():
            base = torch.optim.SGD(model.parameters(), lr=0.1)
            opt = hpctk.DistributedOptimizer(base, method, model=model, stats=home / name, schedule="ring")
            for _ in range(8):
                opt.zero_grad()
                model(torch.randn(4, 1000)).square().mean().backward()
                opt.step()
            opt.close_stats()
        return compared(name, run, home / name / "000" / f"rank-{here.rank:05d}.h5")

    x, places = torch.randn(600_000), torch.arange(here.rank, 600_000, 10)
    # Connections are made with the first message.
    hpctk.allreduce(x, schedule="rotation")
    results = [
        collective(name, lambda: hpctk.allreduce(x, schedule=name))
        for name in ("ring", "rotation", "halving_doubling", "recursive_doubling", "hierarchical")
    ]
    results += [
        collective(f"sparse {name}", lambda: hpctk.ops.sparse_allreduce(places, x[places], 600_000, schedule=name))
        for name in ("allgather", "recursive_doubling", "split")
    ]
    results += [
        training("Mean", hpctk.Mean()),
        training("AdaCons", hpctk.AdaCons()),
        training("TopK", hpctk.Mean(hpctk.TopK(0.1))),
        training("SAEF", hpctk.SAEF(hpctk.TopK(0.1), average_every=3)),
        training("Sign", hpctk.SAEF(hpctk.Sign(), hpctk.Sign())),
        training("CELGC", hpctk.CELGC(1.0, 4)),
    ]
    (home / f"result-{here.rank}.json").write_text(json.dumps(results))
"""


@needs_cluster
def test_logged_bytes_agree_with_the_interfaces(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    succeed("with", 3, "--rate", "none", "--", "python", "-m", "mpi4py", program, tmp_path)
    for rank in range(3):
        for one in json.loads((tmp_path / f"result-{rank}.json").read_text()):
            for logged, interface in zip(one["logged"], one["interface"], strict=True):
                # The interface also counts headers, acknowledgements and the few bytes by which ranks agree.
                assert logged == pytest.approx(interface, rel=0.05), (rank, one)
                assert logged <= interface
