"""What a report computes from statistics, against sums over the same tables."""

import json

import numpy as np
import pytest
from stats_files import rank_tables, write_rank, write_run
from stats_memory import add_call, recording, run

import hpctk
from hpctk.stats.read import RunStats
from hpctk.stats.report.account import account
from hpctk.stats.report.document import POINTS, document


def report(stats):
    return document(account(stats))


def test_sums_of_ranks_are_those_of_their_tables():
    shown = report(run(4, density=0.02, steps=30))
    for rank in range(4):
        tables, one = rank_tables(rank, 4, density=0.02, steps=30), shown["ranks"][rank]
        calls, steps = tables["calls"], tables["steps"]
        seconds = (calls["end_s"] - calls["start_s"]).sum()
        assert one["steps"] == 30
        assert one["steps_s"] == pytest.approx(steps["seconds"].sum())
        assert one["communication_s"] == pytest.approx(seconds)
        assert one["waiting_share"] == pytest.approx(calls["waiting_s"].sum() / seconds)
        assert one["exposed_s"] == pytest.approx(steps["exposed_s"].sum())
        assert one["computing_s"] == pytest.approx((steps["seconds"] - steps["exposed_s"]).sum())
        # Flags have bytes that nobody knows (-1): they must not take anything off the sum.
        assert one["sent_bytes"] == calls["sent_bytes"][calls["sent_bytes"] > 0].sum()
        assert one["dense_wire"] == pytest.approx(50)
        assert one["uncounted_calls"] == 30


def test_compression_counts_only_calls_that_carry_tensors():
    shown = report(run(4, density=0.02))
    # Flags have a payload of 40 bytes in each of 20 steps, and no tensor.
    assert shown["compression"]["dense_payload"] == pytest.approx(50)
    assert shown["compression"]["dense_wire"] == pytest.approx(50)


def test_calls_that_only_the_library_counts_are_in_no_ratio():
    def by_mpi(_, tables):
        add_call(
            tables, operation=b"allreduce", schedule=b"mpi", tensor=b"w", calls=5, uncounted_calls=5, seconds=1.0,
            dense_bytes=10**9, dense_sent_bytes=10**9, payload_bytes=10**9,
        )  # fmt: skip

    shown = report(run(4, change=by_mpi))
    assert shown["compression"]["dense_wire"] == pytest.approx(1)
    assert shown["totals"]["uncounted_tensor_calls"] == 20
    assert any("that are counted" in text for text in shown["findings"])
    assert any("Of 180 calls, 100 have bytes that only the library knows" in text for text in shown["findings"])


def test_efficiency_is_pops():
    shown = report(run(4))
    tables = [rank_tables(rank, 4)["steps"] for rank in range(4)]
    useful = np.array([(one["seconds"] - one["exposed_s"]).sum() for one in tables])
    runtime = max(one["seconds"].sum() for one in tables)
    found = shown["efficiency"]
    assert found["load_balance"] == pytest.approx(useful.mean() / useful.max())
    assert found["communication"] == pytest.approx(useful.max() / runtime)
    assert found["parallel"] == pytest.approx(useful.mean() / runtime)


def test_kinds_of_calls_are_added_up_over_ranks():
    shown = report(run(3))
    data = next(one for one in shown["calls"] if one["operation"] == "allreduce")
    calls = [rank_tables(rank, 3)["calls"][1::2] for rank in range(3)]
    seconds = sum((one["end_s"] - one["start_s"]).sum() for one in calls)
    assert data["calls"] == 60
    assert data["sent_bytes"] == sum(one["sent_bytes"].sum() for one in calls)
    assert data["longest_s"] == pytest.approx(max((one["end_s"] - one["start_s"]).max() for one in calls))
    assert data["bus_bytes_per_s"] == pytest.approx(2 * 2 / 3 * 4_000_000 * 60 / seconds)
    flags = next(one for one in shown["calls"] if one["operation"] == "flags")
    assert flags["bus_bytes_per_s"] is None


def test_another_communicator_has_no_bus_bandwidth():
    def inside_a_node(_, tables):
        tables["summary"]["communicator"] = b"node"

    assert all(one["bus_bytes_per_s"] is None for one in report(run(4, change=inside_a_node))["calls"])


def test_the_slowest_is_the_one_who_waits_least():
    said = report(run(4))["findings"]
    assert any("slowest is rank 3 on host host1" in text for text in said)


def test_where_all_wait_alike_nobody_is_called_slow():
    def alike(_, tables):
        tables["summary"]["waiting_s"] = 0.5 * tables["summary"]["seconds"]

    def almost(rank, tables):
        alike(rank, tables)
        tables["summary"]["waiting_s"] *= 1 - 0.1 * (rank == 2)

    assert not any("slowest" in text for text in report(run(4, change=alike))["findings"])
    said = report(run(4, change=almost))["findings"]
    assert (
        "rank 0 waits 50 % of its communication time, and all others almost as much "
        "(least: rank 2 on host host1, 45 %): nobody is slow." in said
    )


def test_bytes_per_step_against_averaging():
    said = report(run(4, density=0.02))["findings"]
    # 2 * 3/4 of 4 MB, and of 80 kB.
    assert "A rank sends 120 kB a step; plain averaging would send 6 MB (50 times as much)." in said


def test_restarts_are_added_up():
    shown = report(run(4, recordings=3, steps=10))
    assert [one["number"] for one in shown["recordings"]] == [0, 1, 2]
    assert shown["totals"]["steps"] == 30
    assert shown["ranks"][0]["steps"] == 30
    assert shown["totals"]["calls"] == 3 * 4 * 20
    assert shown["efficiency"]["load_balance"] == pytest.approx(report(run(4, steps=10))["efficiency"]["load_balance"])


def test_restarts_of_which_each_lacks_another_rank():
    stats = RunStats(run(1).path, [recording(3, number=0, missing=(2,)), recording(3, number=1, missing=(0,))])
    shown = report(stats)
    assert [one["steps"] for one in shown["ranks"]] == [20, 40, 20]
    assert shown["missing"] == ["start 0: rank 2 is missing: no such file", "start 1: rank 0 is missing: no such file"]


def test_what_is_counted_is_whole_and_what_is_measured_is_not():
    shown = report(run(2))
    assert type(shown["totals"]["steps"]) is int
    assert type(shown["ranks"][0]["sent_bytes"]) is int
    assert type(shown["message_sizes"][15]["messages"]) is int
    assert type(shown["efficiency"]["runtime_s"]) is float
    assert type(shown["compression"]["dense_wire"]) is float


def test_restarts_with_another_number_of_ranks():
    stats = RunStats(run(1).path, [recording(4, number=0), recording(2, number=1)])
    shown = report(stats)
    assert shown["totals"]["ranks"] == 4
    assert [one["steps"] for one in shown["ranks"]] == [40, 40, 20, 20]


def test_a_missing_rank_is_named_and_its_bytes_are_those_its_peers_received():
    found = account(run(4, missing=(2,)))
    shown = document(found)
    sent = rank_tables(2, 4)["peers"]["sent_bytes"]
    np.testing.assert_array_equal(found.matrix.sent[2], sent)
    assert shown["missing"] == ["rank 2 is missing: no such file"]
    assert [one["rank"] for one in shown["ranks"]] == [0, 1, 3]


def test_the_matrix_is_what_every_rank_sent():
    found = account(run(5))
    expected = np.stack([rank_tables(rank, 5)["peers"]["sent_bytes"] for rank in range(5)])
    np.testing.assert_array_equal(found.matrix.sent, expected)


def test_files_that_were_not_closed_are_named_and_the_first_that_ends():
    def died(rank, tables):
        tables["progress"]["flushed_s"] = 0.4 if rank == 1 else 9.4 - 0.1 * rank

    said = report(run(4, running=(0, 1, 2, 3), change=died))["missing"]
    assert said[0].startswith("ranks 0-3 did not close their files: still running, or killed")
    assert said[1] == "rank 1's file ends 9 s before the last one does"


def test_dropped_rows_are_told_and_sums_are_whole():
    def dropped(_, tables):
        tables["calls"] = tables["calls"][:0]
        tables["progress"]["calls_rows"], tables["progress"]["events_dropped"] = 0, 40

    shown = report(run(4, change=dropped))
    assert "160 calls have no row of their own; their sums are complete" in shown["missing"]
    assert shown["totals"]["calls"] == 160


def test_the_curve_adds_up_bytes_and_averages_losses():
    def own_loss(rank, tables):
        tables["steps"]["loss"] = rank
        if rank == 3:
            tables["steps"]["loss"] = np.nan

    shown = report(run(4, steps=10, change=own_loss))["curve"]
    assert shown["loss"] == pytest.approx([1.0] * 10)
    assert shown["step"] == list(range(10))
    assert shown["sent_bytes"] == pytest.approx([6e6 * (i + 1) for i in range(10)])
    assert shown["seconds"] == pytest.approx([0.02 * (i + 1) for i in range(10)])


def test_a_long_curve_has_few_points_and_ends_at_the_end():
    shown = report(run(2, steps=5000))["curve"]
    assert len(shown["step"]) == POINTS
    assert shown["step"][-1] == 4999
    assert shown["sent_bytes"][-1] == pytest.approx(4e6 * 5000)


def test_of_many_long_runs_some_ranks_steps_are_read_and_it_says_so(monkeypatch):
    monkeypatch.setattr("hpctk.stats.report.account.ROWS", 100)
    shown = report(run(20, steps=20))
    assert shown["counts"]["ranks"] == 5
    assert "curves and counts are those of 5 of 20 ranks" in shown["missing"]


HOSTILE = (np.nan, np.inf, -np.inf, -1.0, 1e300, 5e-324)


@pytest.mark.parametrize("value", HOSTILE)
def test_absurd_numbers_raise_nothing_and_are_counted(value):
    def spoil(rank, tables):
        if rank == 1:
            for table in ("summary", "steps", "progress"):
                for name in tables[table].dtype.names:
                    if tables[table].dtype[name].kind == "f":
                        tables[table][name] = value

    shown = report(run(4, change=spoil))
    json.dumps(shown, allow_nan=False)
    assert any("make no sense" in text for text in shown["missing"]) == (value != 5e-324)


@pytest.mark.parametrize("value", [-(2**63), 2**63 - 1, -7])
def test_absurd_counts_raise_nothing(value):
    def spoil(rank, tables):
        if rank == 1:
            for table in ("summary", "steps", "peers", "sizes"):
                for name in tables[table].dtype.names:
                    if tables[table].dtype[name].kind == "i":
                        tables[table][name] = value

    shown = report(run(4, change=spoil))
    json.dumps(shown, allow_nan=False)
    assert any("make no sense" in text for text in shown["missing"])


def test_attributes_of_any_type_raise_nothing():
    strange = {
        "host": 7,
        "node": "x",
        "nodes": np.nan,
        "method": b"\xff",
        "settings": '{"method": [1]}',
        "command": 1.5,
    }
    shown = report(run(2, attrs={**strange, "began_unix_s": "never", "clock_offset_s": None, "communicator": 3}))
    json.dumps(shown, allow_nan=False)
    assert shown["recordings"][0]["began"] is None


def test_the_parts_of_a_ranks_time_add_up():
    """What was done for calls beside them is taken off the time of computing, and nothing is in two parts."""

    def busy(_, tables):
        tables["summary"]["compressing_s"][1], tables["summary"]["decompressing_s"][1] = 0.05, 0.03
        tables["summary"]["staging_s"][1] = 0.02

    for one in report(run(4, change=busy))["ranks"]:
        parts = ("computing", "waiting", "combining", "compressing", "decompressing", "staging", "other")
        # All communication is exposed here.
        assert sum(one[f"{part}_s"] for part in parts) == pytest.approx(one["steps_s"])
        assert one["useful_s"] == pytest.approx(one["computing_s"] + 0.1)


def test_what_ran_behind_computing():
    def behind(rank, tables):
        tables["steps"]["communication_s"][:], tables["steps"]["exposed_s"][:] = 0.5, 0.05 * (rank + 1)

    step = report(run(3, change=behind))["per_step"]
    assert step["communication_s"] == pytest.approx(0.5)
    # 0.1 s of 0.5 s were not, in the mean of the ranks.
    assert step["hidden_share"] == pytest.approx(0.8)
    assert report(run(3))["per_step"]["hidden_share"] == pytest.approx(0)
    assert report(run(3, change=lambda _, tables: tables["steps"]["communication_s"].fill(0)))["per_step"][
        "hidden_share"
    ] is None  # fmt: skip


def write_run_at(folder, number):
    for rank in range(4):
        write_rank(folder / f"{number:03d}", rank, 4, recording=number, began_unix_s=1.7e9 + 0.1 * number)


def test_recordings_made_at_once_are_not_restarts(tmp_path):
    write_run(tmp_path / "later", recordings=2)
    for number in (0, 1):
        write_run_at(tmp_path / "at_once", number)
    one, other = (report(hpctk.stats.load(tmp_path / name)) for name in ("later", "at_once"))
    assert not one["together"]
    assert one["efficiency"]["parallel"] > 0
    assert other["together"]
    assert other["efficiency"]["parallel"] is None
    assert other["per_step"]["exposed_share"] is None
    assert any("at the same time" in text for text in other["findings"])
    assert other["totals"]["sent_bytes"] == one["totals"]["sent_bytes"]
