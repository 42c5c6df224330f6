"""The recorder that writes files: rows, sums in constant memory, steps, and what happens when the disk is full."""

import os
import re

import numpy as np
import pytest

from hpctk.errors import SettingError
from hpctk.stats.read import read_rank
from hpctk.telemetry import schema
from hpctk.telemetry import summary as summary_module
from hpctk.telemetry.recorder import Call
from hpctk.telemetry.recording import BUFFER_ROWS, Recording
from hpctk.telemetry.settings import StatsSettings
from hpctk.ways_in import metadata


def make(tmp_path, size=3, **settings):
    told = StatsSettings(tmp_path, **{"flush_s": 1e9, **settings})
    return Recording(
        tmp_path / "rank-00001.h5", told, size, "WORLD", {"rank": 1, "size": size}, {}, dense_step_bytes=99
    )


def call(i=0, **more):
    return Call(
        **{
            "operation": "allreduce", "schedule": "ring", "compressor": "TopK", "tensor": "w", "elements": 10,
            "dense_bytes": 40, "dense_sent_bytes": 60, "payload_bytes": 8, "sent_bytes": 12, "received_bytes": 13,
            "messages": 2, "began_s": 1000.0 + i, "seconds": 0.5, "waiting_s": 0.25, "combining_s": 0.0625,
            "compressing_s": 0.125, "decompressing_s": 0.03125, "staging_s": 0.015625, **more,
        }
    )  # fmt: skip


def tables(tmp_path):
    read = read_rank(tmp_path / "rank-00001.h5")
    return read, *(read.table(name) for name in ("calls", "steps", "summary"))


def test_every_field_arrives(tmp_path):
    made = make(tmp_path)
    made.began_s = 1000.0
    made.begin_steps(7)
    made.record(call(1))
    made.record(call(2, sent_bytes=None, received_bytes=None, tensor="ü" * 40))
    made.close()
    read, calls, _, summary = tables(tmp_path)
    assert read.attributes["state"] == "closed"
    assert calls["call"].tolist() == [0, 1]
    assert calls["step"].tolist() == [7, 7]
    assert calls["start_s"].tolist() == [1, 2]
    assert calls["end_s"].tolist() == [1.5, 2.5]
    assert calls["operation"].tolist() == [b"allreduce"] * 2
    assert calls["communicator"].tolist() == [b"WORLD"] * 2
    assert calls["tensor"][0] == b"w"
    # Too long: its middle is left out, and no letter is cut in two.
    assert re.fullmatch("ü+[.][.]ü+", calls["tensor"][1].decode())
    assert calls["sent_bytes"].tolist() == [12, schema.UNKNOWN]
    assert calls["received_bytes"].tolist() == [13, schema.UNKNOWN]
    for name, value in [("elements", 10), ("dense_bytes", 40), ("dense_sent_bytes", 60), ("payload_bytes", 8),
                        ("messages", 2), ("waiting_s", 0.25), ("combining_s", 0.0625), ("compressing_s", 0.125),
                        ("decompressing_s", 0.03125), ("staging_s", 0.015625)]:  # fmt: skip
        assert calls[name].tolist() == [value] * 2, name
        assert summary[name].tolist() == [value] * 2, name
    assert summary["sent_bytes"].tolist() == [12, 0]
    assert summary["uncounted_calls"].tolist() == [0, 1]


def test_steps_hold_what_happened_in_them(tmp_path):
    made = make(tmp_path)
    made.record(call())
    made.begin_steps(3)
    made.record(call())
    made.record(call(sent_bytes=None))
    made.end_step(3, {"rounds": 1, "uploads": 1, "clipped_steps": 1, "unheard_of": 5}, 2.5, 0.75)
    made.end_step(4, {"skips": 1, "skipped_steps": 1, "fallbacks": 2}, None, 0.25)
    made.close()
    read, calls, steps, _ = tables(tmp_path)
    assert calls["step"].tolist() == [-1, 3, 3]
    assert steps["step"].tolist() == [3, 4]
    assert steps["calls"].tolist() == [2, 0]
    assert steps["sent_bytes"].tolist() == [12, 0]
    assert steps["communication_s"].tolist() == [1.0, 0]
    assert steps["exposed_s"].tolist() == [0.75, 0.25]
    assert steps["dense_bytes"].tolist() == [99, 99]
    assert steps["loss"][0] == 2.5
    assert np.isnan(steps["loss"][1])
    counted = [steps[name].tolist() for name in ("rounds", "uploads", "skips", "clipped", "skipped", "fallbacks")]
    assert counted == [[1, 0], [1, 0], [0, 1], [1, 0], [0, 1], [0, 2]]
    np.testing.assert_allclose(steps["start_s"][1], steps["start_s"][0] + steps["seconds"][0])
    assert read.progress["steps"] == 2
    assert read.progress["exposed_s"] == 1.0


@pytest.mark.parametrize("loss", ["no number", [1.0, 2.0]])
def test_a_loss_that_is_none_is_not_a_number(tmp_path, loss):
    made = make(tmp_path)
    made.end_step(0, {}, loss, 0.0)
    made.close()
    assert np.isnan(tables(tmp_path)[2]["loss"][0])


@pytest.mark.parametrize("events", [0, 1, 2500, 10**6])
def test_sums_are_whole_whatever_the_limit_of_rows(tmp_path, events):
    made = make(tmp_path, events=events)
    n = 5000
    for i in range(n):
        made.record(call(i, tensor=f"w{i % 3}", payload_bytes=i))
        made.traffic.outgoing[2, i] += 1
        if i % 10 == 9:
            made.end_step(i // 10, {}, None, 0.001)
    made.close()
    read, calls, steps, summary = tables(tmp_path)
    kept = min(events, n)
    assert calls["call"].tolist() == list(range(kept))
    assert calls["payload_bytes"].tolist() == list(range(kept))
    assert read.progress["events_dropped"] == n - kept
    assert len(steps["step"]) == min(events, 500)
    assert read.progress["steps_dropped"] == 500 - min(events, 500)
    assert read.progress["steps"] == 500
    assert summary["calls"].tolist() == [1667, 1667, 1666]
    assert summary["payload_bytes"].sum() == n * (n - 1) // 2
    sizes, peers = read.table("sizes"), read.table("peers")
    assert sizes["lower_bytes"][:3].tolist() == [1, 2, 4]
    # 0 and 1; 2 and 3; 4 to 7; ... 4096 to 4999
    expected = [2, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 904]
    assert sizes["calls"][:13].tolist() == expected
    assert sizes["messages"][:13].tolist() == expected
    assert sizes["sent_bytes"].sum() == n * (n - 1) // 2
    assert peers["sent_messages"].tolist() == [0, 0, n]


def test_memory_does_not_grow_with_names_that_never_come_twice(tmp_path):
    made = make(tmp_path)
    for i in range(3000):
        made.record(call(i, tensor=f"w{i}"))
    made.close()
    _, _, _, summary = tables(tmp_path)
    assert len(summary["calls"]) == summary_module.KINDS
    assert summary["tensor"][-1] == b"(other)"
    assert summary["calls"].sum() == 3000
    assert len(made._summary.kinds) < summary_module.KINDS


def test_what_was_flushed_can_be_read_while_it_goes_on(tmp_path):
    made = make(tmp_path)
    made.record(call())
    made.flush()
    made.record(call())
    read, calls, _, _ = tables(tmp_path)
    assert read.attributes["state"] == "running"
    assert calls["call"].tolist() == [0]
    made.close()
    assert tables(tmp_path)[1]["call"].tolist() == [0, 1]


def test_it_is_flushed_after_so_many_steps_or_seconds(tmp_path):
    by_steps = make(tmp_path, flush_steps=3)
    for step in range(5):
        by_steps.end_step(step, {}, None, 0.0)
    assert len(tables(tmp_path)[2]["step"]) == 3
    by_steps.close()
    by_time = make(tmp_path, flush_s=0.0)
    by_time.record(call(began_s=by_time.began_s + 0.001))
    assert len(tables(tmp_path)[1]["call"]) == 1
    by_time.close()


def test_a_full_disk_costs_one_warning_and_what_was_there_stays(tmp_path, monkeypatch, caplog):
    made = make(tmp_path)
    made.record(call())
    made.flush()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    made.record(call())
    made.flush()
    made.record(call())
    made.end_step(0, {}, 1.0, 0.0)
    made.flush()
    made.close()
    (said,) = caplog.messages
    assert re.search("No space left on device.*Training goes on", said)
    assert not made.writing
    assert tables(tmp_path)[1]["call"].tolist() == [0]


def test_a_forked_process_leaves_the_file_alone(tmp_path):
    made = make(tmp_path)
    made.record(call())
    child = os.fork()
    if child == 0:
        made.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert tables(tmp_path)[0].attributes["state"] == "running"
    made.record(call())
    made.close()
    assert len(tables(tmp_path)[1]["call"]) == 2


@pytest.mark.parametrize(
    ("key", "value"), [("events", -1), ("events", 1.5), ("flush_steps", 0), ("flush_s", float("nan")), ("flush_s", -1)]
)
def test_wrong_settings(tmp_path, key, value):
    with pytest.raises(SettingError, match=f"{key}={re.escape(repr(value))}"):
        StatsSettings(tmp_path, **{key: value})


def test_only_variables_on_the_list_are_kept():
    kept = metadata.environment(
        {"SLURM_JOB_ID": "7", "AWS_SECRET_ACCESS_KEY": "hush", "SLURM_JWT": "hush", "PATH": "x"}
    )
    assert kept == {"SLURM_JOB_ID": "7"}


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["a b.py", "--api-key=hush", "--x", "y"], "'a b.py' '--api-key=***' --x y"),
        (["t.py", "--wandb-token", "hush", "--lr", "1"], "t.py --wandb-token '***' --lr 1"),
        (["t.py", "--password", "a", "hush", "--lr", "1"], "t.py --password '***' '***' --lr 1"),
        (["t.py", "https://me:hu/sh@host/x"], "t.py 'https://***@host/x'"),
        (["t.py", "https://h/d?a=1&token=hush"], "t.py '***'"),
        (["t.py", "DB_PASSWORD=hush"], "t.py '***'"),
        (["t.py", "--header", "Authorization: Bearer hush"], "t.py --header '***'"),
        (["t.py", '{"api_key": "hush"}'], "t.py '***'"),
        (["t.py", "--set", "a=1,token=hush"], "t.py --set '***'"),
        (["t.py", "--wandb-key", "hush"], "t.py --wandb-key '***'"),
        (["t.py", "--key=hush", "--passphrase", "hush"], "t.py '--key=***' --passphrase '***'"),
        (["t.py", "--env", "WANDB_KEY=hush"], "t.py --env '***'"),
        (["t.py", "--pw", "hush", "--lr", "1"], "t.py --pw '***' --lr 1"),
        (["t.py", "--pw=hush", "--db-pw", "hush", "-pw", "hush"], "t.py '--pw=***' --db-pw '***' -pw '***'"),
        (["t.py", "--pass", "hush", "-passin", "pass:hush"], "t.py --pass '***' '-p***' '***'"),
        (["t.py", "-p", "hush", "-x", "y"], "t.py -p '***' -x y"),
        (["t.py", "-p=hush", "-phush", "y"], "t.py '-p=***' '-p***' y"),
        (["t.py", "--from", "sk-hush8fQ2LmZ0pX4vR7tB1"], "t.py --from '***'"),
        (["t.py", "--from=ghp_hushAbCdEf0123456789aBcDeF"], "t.py '--from=***'"),
    ],
)
def test_a_command_line_without_its_secrets(words, shown):
    assert metadata.command(words) == shown
    assert "hush" not in metadata.command(words)


@pytest.mark.parametrize(
    "line",
    [
        "train.py --lr 0.1 --tokenizer bert --author me --monkey 3",
        "train.py --partition p --pwelch 3 --passes 2 -P 8000 --compass north",
        "train.py runs/celgc-period8-clip0p1-seed3/checkpoints --data /data/ImageNet_2012 --epochs=90",
        "hpctk train digits --method mean:topk:0.01,celgc --run runs/7",
    ],
)
def test_what_is_no_secret_is_shown(line):
    assert metadata.command(line.split()) == line


def test_a_call_that_fits_into_no_row_costs_a_warning_and_no_more(tmp_path, caplog):
    made = make(tmp_path)
    made.record(call())
    made.flush()
    made.record(call(elements=2**70))
    made.close()
    assert "no more statistics" in caplog.text
    assert tables(tmp_path)[1]["call"].tolist() == [0]


def test_any_failure_of_the_file_costs_a_warning_and_no_more(tmp_path, monkeypatch, caplog):
    made = make(tmp_path)
    made.record(call())
    monkeypatch.setattr(os, "pwrite", lambda *_: 1 / 0)
    made.flush()
    assert "no more statistics" in caplog.text
    assert not made.writing
    # From then on calls cost nothing but a moment, however many there are.
    for i in range(5 * BUFFER_ROWS):
        made.record(call(i, began_s=made.began_s + 1e12))
    assert len(made._kinds) <= BUFFER_ROWS


def test_peers_keep_their_numbers_when_a_rank_is_lost(tmp_path):
    made = make(tmp_path, size=4)
    made.traffic.outgoing[1, 100] += 1
    made.forget([0, 2, 3])
    made.traffic.outgoing[1, 10] += 1
    made.end_step(0, {"lost_ranks": 1, "lost_residual_norm": 0.5}, None, 0.0)
    made.close()
    read, _, steps, _ = tables(tmp_path)
    assert read.table("peers")["sent_bytes"].tolist() == [0, 100, 10, 0]
    assert (steps["lost_ranks"][0], steps["lost_residual_norm"][0]) == (1, 0.5)
