"""What the files say is what happened: every byte of every schedule and method, on every rank."""

import gc
import json
import math
import os
from contextlib import nullcontext

import numpy as np
import pytest
import torch

import hpctk
from hpctk.collectives.engine.engine import counted, engine_of
from hpctk.collectives.tuning.clocks import clock_offset
from hpctk.comm.agreement import FRAME
from hpctk.errors import MismatchError
from hpctk.schedules import build
from hpctk.schedules.core.registry import names
from hpctk.telemetry.recording import Recording
from hpctk.telemetry.settings import StatsSettings

KINDS = {
    "allreduce": lambda x, schedule, comm: hpctk.allreduce(x, schedule=schedule, comm=comm),
    "reduce_scatter": lambda x, schedule, comm: hpctk.ops.reduce_scatter(x, schedule=schedule, comm=comm),
    "allgather": lambda x, schedule, comm: hpctk.ops.allgather(x, schedule=schedule, comm=comm),
    "broadcast": lambda x, schedule, comm: hpctk.ops.broadcast(x, schedule=schedule, comm=comm),
}
CASES = [(kind, schedule) for kind in KINDS for schedule in names(kind, with_nodes=True)]


def everyone(world, value):
    """Return a number of every rank, in rank order."""
    return [json.loads(text) for text in world.gather_texts(json.dumps(value), "comparing")]


@pytest.fixture
def recording(world, mpi_tmp_path):
    path, settings = mpi_tmp_path / f"rank-{world.rank:05d}.h5", StatsSettings(mpi_tmp_path)
    made = Recording(path, settings, world.size, "test", {"rank": world.rank, "size": world.size}, {})
    yield made
    made.close()


def tables(recording):
    from hpctk.stats.read import read_rank

    recording.close()
    read = read_rank(recording.path)
    return {name: read.table(name) for name in ("calls", "steps", "summary", "peers", "sizes")}


@pytest.mark.parametrize(("kind", "schedule"), CASES, ids=[f"{kind} {name}" for kind, name in CASES])
def test_logged_bytes_are_the_analytic_volume(world, recording, kind, schedule):
    plan = build(schedule, kind, world.size, nodes=world.nodes)
    # Blocks of equal length, longer than a segment: the closed form counts whole blocks.
    n = plan.blocks * 20_000
    whole = n * 4
    tensor = torch.ones(n // world.size if kind == "allgather" else n)
    if kind == "allgather":
        whole = tensor.numel() * world.size * 4
    with counted(world, recording):
        KINDS[kind](tensor, schedule, None)
    found = tables(recording)
    calls = found["calls"]
    row = np.flatnonzero(calls["operation"] == kind.encode())
    assert len(row) == 1
    sent = int(calls["sent_bytes"][row[0]])
    all_sent = everyone(world, sent)
    assert sum(all_sent) * plan.blocks == plan.volume.total_sent * whole
    assert max(all_sent) * plan.blocks == plan.volume.sent * whole
    assert sum(everyone(world, int(calls["received_bytes"][row[0]]))) == sum(all_sent)
    assert calls["schedule"][row[0]] == schedule.encode()
    # The same bytes by peer, and by length.
    assert found["peers"]["sent_bytes"].sum() == sent
    assert found["sizes"]["sent_bytes"].sum() == sent
    assert found["sizes"]["messages"].sum() == found["peers"]["sent_messages"].sum() == calls["messages"][row[0]]
    assert found["peers"]["sent_bytes"][world.rank] == 0
    matrix = np.array(everyone(world, found["peers"]["sent_bytes"].tolist()))
    np.testing.assert_array_equal(matrix[:, world.rank], found["peers"]["received_bytes"])


METHODS = {
    "Mean": lambda: hpctk.Mean(),
    "Mean TopK": lambda: hpctk.Mean(hpctk.TopK(0.01)),
    "Mean Half": lambda: hpctk.Mean(hpctk.Half()),
    "Mean PowerSGD": lambda: hpctk.Mean(hpctk.PowerSGD(1)),
    "Mean QSGD": lambda: hpctk.Mean(hpctk.QSGD(4)),
    "AdaCons": lambda: hpctk.AdaCons(),
    "SASG": lambda: hpctk.SASG(0.05, max_delay=3),
    "SAEF TopK": lambda: hpctk.SAEF(hpctk.TopK(0.02), average_every=3),
    "SAEF Sign": lambda: hpctk.SAEF(hpctk.Sign(), hpctk.Sign()),
    "MGRAWA": lambda: hpctk.MGRAWA(3),
    "MGRAWA asynchronous": lambda: hpctk.MGRAWA(3, asynchronous=True),
    "CELGC": lambda: hpctk.CELGC(0.1, 3),
    "LSGD": lambda: hpctk.LSGD(3),
}
STEPS = 12


def train(world, method, stats, *, steps=STEPS, overlap=False, schedule="ring", **more):
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(30, 60), torch.nn.Tanh(), torch.nn.Linear(60, 1))
    base = torch.optim.SGD(model.parameters(), lr=0.05)
    opt = hpctk.DistributedOptimizer(base, method, model=model, stats=stats, overlap=overlap, schedule=schedule, **more)
    generator = torch.Generator().manual_seed(world.rank)
    # Ranks that take tickets do different numbers of steps between rounds: one may be through before the others.
    with nullcontext() if method.lockstep else opt.join():
        for _ in range(steps):
            x = torch.randn(8, 30, generator=generator)

            def closure(x=x):
                opt.zero_grad()
                loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
                loss.backward()
                return loss

            opt.step(closure)
    opt.close_stats()
    return opt


@pytest.mark.parametrize("name", METHODS)
def test_files_and_counters_agree(world, mpi_tmp_path, name):
    """Two accounts of one run: the counter in memory, and the file; and the file's tables among themselves."""
    opt = train(world, METHODS[name](), mpi_tmp_path / "run")
    run = hpctk.stats.load(mpi_tmp_path / "run")
    assert [recording.size for recording in run.recordings] == [world.size]
    mine = run.recordings[0].ranks[world.rank]
    calls, steps, summary = mine.table("calls"), mine.table("steps"), mine.table("summary")
    stats = opt.stats
    assert mine.progress["steps"] == len(steps["step"]) == stats.steps
    assert steps["step"].tolist() == list(range(stats.steps))
    known = calls["sent_bytes"] >= 0
    prepared = calls["step"] < 0
    in_steps = known & ~prepared
    assert calls["sent_bytes"][in_steps].sum() == stats.sent_bytes
    assert calls["received_bytes"][in_steps].sum() == stats.received_bytes
    # What comes after the last step, such as the round in which ranks learn that all are through, is in none.
    within = in_steps & (calls["step"] < stats.steps)
    assert steps["sent_bytes"].sum() == calls["sent_bytes"][within].sum()
    assert steps["messages"].sum() == calls["messages"][within & known].sum()
    assert summary["sent_bytes"].sum() == calls["sent_bytes"][known].sum() == mine.table("peers")["sent_bytes"].sum()
    assert summary["calls"].sum() == len(calls["call"])
    assert np.isfinite(steps["loss"]).sum() == STEPS
    assert steps["rounds"].sum() == stats.counts.get("rounds", 0) - (0 if METHODS[name]().lockstep else 1)
    assert steps["uploads"].sum() == stats.counts.get("uploads", 0)
    assert steps["skips"].sum() == stats.counts.get("skips", 0)
    assert (calls["end_s"] >= calls["start_s"]).all()
    assert (calls["waiting_s"] + calls["combining_s"] <= calls["end_s"] - calls["start_s"] + 1e-4).all()
    assert (steps["exposed_s"] <= steps["seconds"] + 1e-4).all()
    # What all ranks sent to this one has come here.
    received = calls["received_bytes"][known & (calls["received_bytes"] >= 0)].sum()
    assert mine.table("peers")["received_bytes"].sum() == received
    n = sum(parameter.numel() for parameter in opt._replica.parameters)
    assert mine.attributes["parameters"] == n
    assert steps["dense_bytes"].tolist() == [2 * (world.size - 1) * 4 * n // world.size] * stats.steps


def carried(mine):
    calls = mine.table("calls")
    return {name: calls[name][calls["dense_bytes"] > 0] for name in calls}


@pytest.mark.parametrize(
    ("name", "ratio"),
    [("Mean", 1), ("Mean Half", 2), ("Mean TopK", 45), ("Mean QSGD", 4), ("SAEF Sign", 25), ("AdaCons", 1)],
)
def test_what_a_compressor_saves_shows(world, mpi_tmp_path, name, ratio):
    opt = train(world, METHODS[name](), mpi_tmp_path / "run")
    mine = hpctk.stats.load(mpi_tmp_path / "run").recordings[0].ranks[world.rank]
    calls = carried(mine)
    calls = {column: values[calls["step"] >= 0] for column, values in calls.items()}
    n = sum(parameter.numel() for parameter in opt._replica.parameters)
    saved = calls["dense_bytes"].sum() / calls["payload_bytes"].sum()
    assert saved == 1 if ratio == 1 else ratio <= saved <= 2 * ratio
    if name != "AdaCons":
        # Told once for each exchange, however many calls that takes.
        assert calls["dense_bytes"].sum() == STEPS * 4 * n
        assert calls["elements"].sum() == STEPS * n
    expected = b"" if ratio == 1 else name.split()[1].encode()
    assert set(calls["compressor"]) == {expected}
    if ratio != 1:
        whole = mine.table("calls")
        assert whole["compressing_s"].sum() > 0
        assert whole["decompressing_s"].sum() > 0


def test_residual_averages_flags_and_broadcasts_are_there(world, mpi_tmp_path):
    train(world, METHODS["SAEF TopK"](), mpi_tmp_path / "run")
    calls = hpctk.stats.load(mpi_tmp_path / "run").recordings[0].ranks[world.rank].table("calls")
    residuals = calls["tensor"] == b"4 residuals"
    assert residuals.sum() == STEPS // 3
    assert (calls["schedule"][residuals] == b"ring").all()
    flags = (calls["operation"] == b"flags") & (calls["tensor"] == b"opening a step")
    assert flags.sum() == STEPS
    assert (calls["payload_bytes"][flags] == 8 * FRAME).all()
    assert (calls["sent_bytes"][flags] == -1).all()
    first = (calls["step"] == -1) & (calls["schedule"] == b"binomial")
    assert first.sum() == 1
    assert calls["dense_bytes"][first].tolist() == [4 * (30 * 60 + 60 + 61) if world.rank == 0 else 0]


def test_tickets_are_there(world, mpi_tmp_path):
    opt = train(world, METHODS["MGRAWA asynchronous"](), mpi_tmp_path / "run")
    mine = hpctk.stats.load(mpi_tmp_path / "run").recordings[0].ranks[world.rank]
    calls = mine.table("calls")
    tickets = calls["operation"] == b"ticket"
    assert tickets.sum() >= opt.stats.counts["tickets"] > 0
    assert set(calls["sent_bytes"][tickets]) == {0 if world.rank == 0 else 8}


def test_a_rank_that_skips_uploads_shows_it(world, mpi_tmp_path):
    opt = train(world, hpctk.SASG(0.05, max_delay=3, alpha=1e9), mpi_tmp_path / "run")
    mine = hpctk.stats.load(mpi_tmp_path / "run").recordings[0].ranks[world.rank]
    calls, n = carried(mine), sum(parameter.numel() for parameter in opt._replica.parameters)
    calls = {column: values[calls["step"] >= 0] for column, values in calls.items()}
    assert opt.stats.counts["skips"] > 0
    # What was not sent would have been sent, dense.
    assert calls["dense_bytes"].tolist() == [4 * n] * STEPS
    silent = calls["payload_bytes"] == 0
    assert silent.sum() == opt.stats.counts["skips"]


def test_overlap_hides_communication_from_the_step(world, mpi_tmp_path):
    train(world, hpctk.Mean(), mpi_tmp_path / "run", overlap=True)
    calls = hpctk.stats.load(mpi_tmp_path / "run").recordings[0].ranks[world.rank].table("calls")
    assert b"bucket 0" in set(calls["tensor"])


def test_later_recordings_follow_in_the_same_run(world, mpi_tmp_path):
    folder = mpi_tmp_path / "run"
    first = train(world, hpctk.Mean(), folder)
    second = train(world, hpctk.Mean(), folder, steps=0)
    second.load_stats(first.stats)
    third = train(world, hpctk.Mean(), folder)
    run = hpctk.stats.load(folder)
    assert [recording.number for recording in run.recordings] == [0, 1, 2]
    ids = {one.attributes["run_id"] for recording in run.recordings for one in recording.ranks.values()}
    assert len(ids) == 1
    assert third.stats.steps == STEPS


def test_steps_go_on_where_a_checkpoint_left_them(world, mpi_tmp_path):
    opt = train(world, hpctk.Mean(), None)
    model = torch.nn.Linear(3, 1)
    again = hpctk.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), hpctk.Mean(), model=model, stats=mpi_tmp_path / "run"
    )
    again.load_stats(opt.stats)
    model(torch.ones(1, 3)).sum().backward()
    again.step()
    again.close_stats()
    mine = hpctk.stats.load(mpi_tmp_path / "run").recordings[0].ranks[world.rank]
    steps, calls = mine.table("steps"), mine.table("calls")
    assert steps["step"].tolist() == [STEPS]
    assert steps["rounds"].tolist() == [1]
    assert set(calls["step"].tolist()) <= {-1, STEPS}


def test_the_environment_says_where(world, mpi_tmp_path, monkeypatch):
    monkeypatch.setenv("HPCTK_STATS", str(mpi_tmp_path / "there"))
    monkeypatch.setenv("HPCTK_STATS_EVENTS", "5")
    train(world, hpctk.Mean(), None)
    mine = hpctk.stats.load(mpi_tmp_path / "there").recordings[0].ranks[world.rank]
    assert len(mine.table("calls")["call"]) == 5
    assert mine.progress["events_dropped"] > 0
    assert mine.table("summary")["calls"].sum() == 5 + mine.progress["events_dropped"]


def test_no_secret_lands_in_a_file(world, mpi_tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t-of-the-user")
    monkeypatch.setenv("SLURM_JOB_NAME", "harmless")
    monkeypatch.setattr("sys.argv", ["train.py", "--api-key", "s3cr3t-of-the-user"])
    train(world, hpctk.Mean(), mpi_tmp_path / "run")
    for path in (mpi_tmp_path / "run").rglob("*.h5"):
        data = path.read_bytes()
        assert b"s3cr3t" not in data
        assert b"harmless" in data


def test_a_folder_that_cannot_be_written(world, mpi_tmp_path, caplog):
    """One warning in all, by the first rank that has to do without; training goes on."""
    if world.rank == 0:
        (mpi_tmp_path / "file").write_text("in the way")
    world.barrier()
    opt = train(world, hpctk.Mean(), mpi_tmp_path / "file" / "run")
    assert opt.stats.steps == STEPS
    told = [text for text in caplog.messages if "no statistics" in text]
    assert len(told) == (world.rank == 0)
    assert all("Training goes on" in text for text in told)


def test_ranks_that_disagree(world, mpi_tmp_path):
    if world.size == 1:
        pytest.skip("needs another rank")
    with pytest.raises(MismatchError, match="stats is"):
        train(world, hpctk.Mean(), mpi_tmp_path / f"run{min(world.rank, 1)}")


def test_clocks_of_one_node_are_one(world):
    assert clock_offset(world) == (0.0, 0.0)


def test_clocks_of_several_nodes_are_compared(world, monkeypatch):
    """The ranks of one machine taken for nodes, each with a clock of its own."""
    import time

    ahead, now = 1000.0 * world.rank, time.perf_counter
    monkeypatch.setattr("hpctk.collectives.tuning.clocks.time.perf_counter", lambda: now() + ahead)
    monkeypatch.setattr(world, "nodes", tuple((rank,) for rank in range(world.size)))
    offset, error = clock_offset(world)
    assert error < 1
    assert math.isclose(offset, -ahead, abs_tol=max(error, 1e-12))


def test_steps_without_data_are_steps_like_others(world, mpi_tmp_path):
    """In join() the seconds in communication belong to the step in which they were spent."""
    model = torch.nn.Linear(3, 1)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = hpctk.DistributedOptimizer(base, hpctk.Mean(), model=model, stats=mpi_tmp_path / "run", schedule="ring")
    with opt.join():
        for _ in range(2 if world.rank else 6):
            opt.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            opt.step()
    opt.close_stats()
    steps = hpctk.stats.load(mpi_tmp_path / "run").recordings[0].ranks[world.rank].table("steps")
    assert len(steps["step"]) == 6
    assert (steps["exposed_s"] > 0).all()
    assert (steps["exposed_s"] <= steps["seconds"] + 1e-4).all()


def test_a_loss_is_kept_as_it_was(world, mpi_tmp_path):
    model, kept = torch.nn.Linear(3, 1), torch.zeros(())
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = hpctk.DistributedOptimizer(base, hpctk.Mean(), model=model, stats=mpi_tmp_path / "run")
    for step in range(3):
        kept.fill_(step)
        opt.step(loss=kept)
    opt.step(loss=torch.ones(5))
    opt.close_stats()
    steps = hpctk.stats.load(mpi_tmp_path / "run").recordings[0].ranks[world.rank].table("steps")
    assert steps["loss"][:3].tolist() == [0, 1, 2]
    assert np.isnan(steps["loss"][3])


def test_an_optimizer_that_is_gone_has_closed_its_file(world, mpi_tmp_path):
    def use():
        model = torch.nn.Linear(3, 1)
        base = torch.optim.SGD(model.parameters(), lr=0.1)
        opt = hpctk.DistributedOptimizer(base, hpctk.Mean(), model=model, stats=mpi_tmp_path / "run")
        opt.step()

    use()
    gc.collect()
    mine = hpctk.stats.load(mpi_tmp_path / "run").recordings[0].ranks[world.rank]
    assert mine.attributes["state"] == "closed"
    assert mine.progress["steps"] == 1


@pytest.mark.parametrize("error", [OSError(28, "disk full"), TypeError("of a damaged package")], ids=["disk", "other"])
def test_one_rank_that_cannot_write(world, mpi_tmp_path, monkeypatch, caplog, error):
    """Its file is missing, the others are there; nobody waits."""
    if world.size == 1:
        pytest.skip("needs another rank")
    if world.rank == 1:
        monkeypatch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(error))
    train(world, hpctk.Mean(), mpi_tmp_path / "run")
    assert sum(str(error) in text for text in caplog.messages) == (world.rank == 1)
    world.barrier()
    recording = hpctk.stats.load(mpi_tmp_path / "run").recordings[0]
    assert set(recording.ranks) == set(range(world.size)) - {1}
    assert set(recording.missing) == {1}


def test_times_of_all_ranks_can_be_compared(world, mpi_tmp_path):
    """An all-reduce ends nowhere before it has begun everywhere: so do the times in the files, once clocks are one."""
    train(world, hpctk.Mean(), mpi_tmp_path / "run", schedule="recursive_doubling")
    world.barrier()
    (recording,) = hpctk.stats.load(mpi_tmp_path / "run").recordings
    starts, ends = [], []
    for rank in recording.ranks.values():
        calls, offset = rank.table("calls"), rank.attributes["clock_offset_s"]
        chosen = calls["operation"] == b"allreduce"
        starts.append(calls["start_s"][chosen] + offset)
        ends.append(calls["end_s"][chosen] + offset)
        assert (rank.rank == 0) == (offset == 0) or world.size == 1
    error = max(rank.attributes["clock_error_s"] for rank in recording.ranks.values())
    assert (np.min(ends, axis=0) > np.max(starts, axis=0) - 2 * error).all()


def test_nothing_is_communicated_for_the_sake_of_statistics_in_steps(world, mpi_tmp_path):
    """As many collectives with files as without."""
    opts = [train(world, hpctk.Mean(), stats) for stats in (None, mpi_tmp_path / "run")]
    one, other = (opt._counters.counter for opt in opts)
    assert one.by_operation == other.by_operation
    assert one.sent_bytes == other.sent_bytes
    assert len(engine_of(world).recorders) == 1
