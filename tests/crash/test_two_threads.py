"""Two threads on one communicator: refused with advice while the other is inside, and the advice holds."""

import textwrap

import pytest
from jobs import run, run_ranks, torchrun

#: A thread waits in a collective, because rank 1 comes late to it; the main thread comes in meanwhile, on rank 0.
MEANWHILE = """
    import pathlib, sys, threading, time, torch, hpctk, hpctk.comm.world
    {start}
    comm = {comm}
    here = hpctk.comm.world.world(comm)
    model = torch.nn.Linear(4, 2)
    opt = hpctk.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), hpctk.Mean(), model=model, comm=comm
    )
    results = []

    def first():
        results.append(hpctk.allreduce(torch.full(({n},), here.rank + 1.0), schedule={schedule!r}, comm=comm))

    def second(call):
        try:
            call()
        except hpctk.HpctkError as error:
            return str(error)
        return "not refused"

    calls = [
        lambda: hpctk.allreduce(torch.ones(3), comm=comm),
        lambda: hpctk.ops.iallreduce(torch.ones(3), schedule="ring", comm=comm),
        lambda: hpctk.ops.allgather(torch.ones(3), comm=comm),
        lambda: hpctk.ops.broadcast(torch.ones(3), comm=comm),
        lambda: hpctk.ops.reduce_scatter(torch.ones(3), comm=comm),
        lambda: hpctk.ops.weighted_mean([torch.ones(3)], 1.0, comm=comm),
        lambda: hpctk.ops.adacons_aggregate([torch.ones(3)], hpctk.ops.ConsensusState(), comm=comm),
        lambda: hpctk.ops.sparse_allreduce(torch.tensor([1]), torch.ones(1), 3, comm=comm),
        lambda: opt.step(),
        lambda: here.barrier(),
        lambda: here.broadcast_bytes(b"", 0, "a test"),
    ]
    refused = pathlib.Path({refused!r})
    if here.rank == 1:
        while not refused.exists():
            time.sleep(0.05)
        first()
    else:
        thread = threading.Thread(target=first, name="the first")
        thread.start()
        while here.one_thread.holder != thread.ident:
            time.sleep(0.05)
        model(torch.ones(1, 4)).sum().backward()
        for number, call in enumerate(calls):
            print("refused:", number, second(call), flush=True)
        refused.touch()
        thread.join()
    # In one write, so that no line is torn.
    print(f"result: {{results[0].unique().tolist()}}\\n", end="", flush=True)
    # Once it has left, others may come.
    opt.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    opt.step()
    print(f"after: {{hpctk.allreduce(torch.ones(1), op='sum', comm=comm).item()}}\\n", end="", flush=True)
"""
CALLS = 11
ADVICE = "two threads use one communicator at once: give each thread its own, "


def check(output, own):
    said = [line for line in output.splitlines() if line.startswith("refused:")]
    assert [line.split()[1] for line in said] == [str(number) for number in range(CALLS)]
    assert [line for line in said if ADVICE + own not in line] == []
    assert output.count("result: [1.5]") == 2
    assert output.count("after: 2.0") == 2


@pytest.mark.parametrize(
    ("schedule", "n"),
    [
        ("mpi", 3),
        pytest.param("mpi", 100_000, marks=pytest.mark.full),
        pytest.param("ring", 100_000, marks=pytest.mark.full),
    ],
)
def test_a_second_thread_is_told_to_duplicate(tmp_path, schedule, n):
    program = MEANWHILE.format(start="", comm=None, schedule=schedule, n=n, refused=str(tmp_path / "refused"))
    ended = run_ranks(2, program, tmp_path, timeout_s=120, HPCTK_TIMEOUT_S="40")
    assert ended.code == 0, ended.output
    check(ended.output, "comm.Dup()")


def test_a_second_thread_without_mpi_is_told_to_make_a_group(tmp_path):
    start = "import torch.distributed as dist; dist.init_process_group('gloo')"
    refused = str(tmp_path / "refused")
    program = MEANWHILE.format(start=start, comm="dist.group.WORLD", schedule="ring", n=100_000, refused=refused)
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(program))
    ended = run(torchrun(2, str(script)), timeout_s=120, HPCTK_TIMEOUT_S="40")
    assert ended.code == 0, ended.output
    check(ended.output, "torch.distributed.new_group()")


#: Two threads on each rank that never rest.
AT_ONCE = """
    import sys, threading, torch, hpctk
    from mpi4py import MPI
    errors = []

    def work(comm, schedule, n):
        try:
            for i in range(200):
                mean = hpctk.allreduce(torch.full((n,), float(i)), schedule=schedule, comm=comm)
                assert mean.unique().tolist() == [i], mean
        except hpctk.HpctkError as error:
            errors.append(str(error))

    comms = [{comm} for _ in range(2)]
    threads = [
        threading.Thread(target=work, args=(comm, schedule, n))
        for comm, schedule, n in zip(comms, ("ring", "mpi"), (50_000, 20))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.stdout.write("".join(f"error: {{line}}\\n" for line in errors) + "ended\\n")
"""


def test_threads_at_once_end_with_advice(tmp_path):
    ended = run_ranks(2, AT_ONCE.format(comm="MPI.COMM_WORLD"), tmp_path, timeout_s=120, HPCTK_TIMEOUT_S="8")
    assert ended.code == 0, ended.output
    assert ended.output.count("ended") == 2
    assert ADVICE + "comm.Dup()" in ended.output


def test_threads_with_communicators_of_their_own_go_on(tmp_path):
    ended = run_ranks(2, AT_ONCE.format(comm="MPI.COMM_WORLD.Dup()"), tmp_path, timeout_s=120)
    assert ended.code == 0, ended.output
    assert ended.output == "ended\nended\n"
