"""The report in a terminal: at most 80 columns, nothing left out that it should say."""

import re

import numpy as np
import pytest
from stats_memory import add_call, recording, run

from hpctk.stats.read import RunStats
from hpctk.stats.report.account import account
from hpctk.stats.report.document import document
from hpctk.stats.report.findings import command_text, extremes, method_text
from hpctk.stats.report.text import WIDTH, text


def shown(stats):
    return text(document(account(stats)))


def section(report, title):
    return report.split(f"\n\n{title}\n")[1].split("\n\n")[0]


def test_every_section_is_there():
    report = shown(run(4, density=0.02))
    titles = [line for line in report.splitlines() if line.isupper() and line[0] != " "]
    assert titles == [
        "IN SHORT", "EFFICIENCY", "COMPRESSION", "RANKS", "CALLS BY TIME", "CALLS BY BYTES", "MESSAGE SIZES",
        "IMBALANCE", "COUNTS",
    ]  # fmt: skip
    assert report.startswith("run      runs/made/stats\nstarts   1\nranks    4 on 2 nodes\nmethod   Mean()\n")


def long_names(rank, tables):
    tables["summary"]["tensor"] = b"encoder.layers.11.feed_forward.intermediate.weight"
    tables["summary"]["compressor"] = b"PowerSGDPowerSGD"
    tables["summary"]["schedule"] = b"recursive_doubling_x"
    tables["summary"]["calls"] = 10**11
    tables["progress"]["steps"] = 10**11


@pytest.mark.parametrize(
    "stats",
    [
        run(1), run(4), run(300, per_node=7, steps=2), run(3, recordings=25, steps=2),
        run(6, missing=(0, 2, 4), running=(1,)), run(2, attrs={"host": "h" * 300, "command": "c" * 5000}),
        run(3, change=long_names),
    ],
    ids=["one", "four", "many", "restarts", "missing", "long attributes", "long names"],
)  # fmt: skip
def test_lines_are_at_most_80_characters(stats):
    lines = shown(stats).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert len(lines) < 150


def test_hidden_communication_is_told():
    def behind(_, tables):
        tables["steps"]["communication_s"][:], tables["steps"]["exposed_s"][:] = 0.5, 0.05

    line = next(one for one in shown(run(2, change=behind)).splitlines() if one.startswith("hidden"))
    assert line == "hidden communication           90 %  of 500 ms of calls, behind computing"


def test_one_rank_has_nobody_to_wait_for():
    report = shown(run(1))
    assert "One rank alone" in report
    assert "slowest" not in report
    assert "IMBALANCE" not in report


def test_of_many_ranks_the_extreme_ones_are_shown():
    report = section(shown(run(100, steps=2)), "RANKS").splitlines()
    ranks = [int(line.split()[0]) for line in report[2:18]]
    assert ranks[0] == 0
    assert ranks[-1] == 99
    assert report[18] == "84 ranks between these left out; --json has all"


def test_extremes_are_the_least_and_the_most():
    ranks = [
        {"rank": i, "waiting_share": None, "computing_s": 5.0, "communication_s": 1.0, "sent_bytes": 1.0,
         "exposed_s": 1.0, "received_bytes": 1.0}
        for i in range(50)
    ]  # fmt: skip
    ranks[17]["computing_s"], ranks[31]["sent_bytes"], ranks[40]["waiting_share"] = 9.0, 0.0, 0.9
    chosen, left = extremes(ranks, 16)
    assert {0, 49, 17, 31, 40} <= {one["rank"] for one in chosen}
    assert (len(chosen), left) == (16, 34)


def test_unknown_bytes_are_not_shown_as_nothing():
    report = shown(run(4))
    flags = next(line for line in section(report, "CALLS BY TIME").splitlines() if line.startswith("flags"))
    assert flags.split()[-2:] == ["?", "-"]
    assert "without the calls whose bytes only the library knows" in section(report, "RANKS")


def test_bars_show_where_messages_are():
    def sizes(_, tables):
        tables["sizes"]["messages"] = 0
        tables["sizes"]["messages"][[0, 3, 9]] = 1, 1000, 500

    lines = section(shown(run(2, change=sizes)), "MESSAGE SIZES").splitlines()
    assert lines[1].split() == ["0", "B", "to", "2", "B", "2", "0", "B", "#"]
    assert lines[2].split()[:5] == ["2", "B", "to", "4", "B"]
    assert lines[4].count("#") == 34
    # Many empty rows are one.
    assert lines[5].split() == ["..."]
    assert lines[6].count("#") == 17
    assert len(lines) == 7


def test_terminal_escapes_from_files_are_taken_out():
    def planted(_, tables):
        add_call(tables, operation=b"\x1b]0;x\x07", tensor=b"a\nb", calls=1, seconds=99.0)

    report = shown(run(2, change=planted, attrs={"host": "h\x1b[2J", "library": "Open\rMPI"}))
    assert not set(report) & {"\x1b", "\r", "\x07"}


def test_a_run_that_has_not_stepped_yet():
    def nothing(_, tables):
        for name in ("calls", "steps", "summary"):
            tables[name] = tables[name][:0]
        for name in ("sizes", "peers", "progress"):
            for column in tables[name].dtype.names:
                if column not in ("peer", "lower_bytes"):
                    tables[name][column] = 0

    report = shown(run(4, running=(0, 1, 2, 3), change=nothing))
    assert "steps    0 in 0 s" in report
    assert "nan" not in report
    assert "did not close" in report


def test_starts_are_listed():
    report = shown(RunStats(run(1).path, [recording(4, number=0), recording(2, number=3, running=(1,))]))
    lines = section(report, "STARTS").splitlines()
    assert lines[2].split()[0] == "0"
    assert lines[2].endswith("closed")
    assert lines[3].split()[0] == "3"
    assert lines[3].endswith("not closed")


@pytest.mark.parametrize(
    ("command", "text"),
    [("/opt/lib/hpctk/__main__.py train digits", "hpctk train digits"), ("/home/me/train.py --lr 1", "train.py --lr 1"),
     ("train.py", "train.py"), ("", "")],
)  # fmt: skip
def test_commands_as_one_types_them(command, text):
    assert command_text({"command": command}) == text


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ('{"method": "SAEF", "compressor": {"compressor": "TopK", "density": 0.01}, "average_every": 0}',
         "SAEF(compressor=TopK(density=0.01), average_every=0)"),
        ("", "Mean"), ("[1, 2]", "Mean"), ("{", "Mean"), ('{"method": 3}', "Mean"), ("[" * 100_000, "Mean"),
    ],
)  # fmt: skip
def test_settings_as_one_writes_them(settings, text):
    assert method_text({"settings": settings, "method": "Mean"}) == text


def test_numbers_that_make_no_sense_are_shown_as_unknown():
    def spoil(_, tables):
        tables["summary"]["seconds"] = np.nan

    report = shown(run(2, change=spoil))
    assert "nan" not in report.lower()
    cells = re.split(r" {2,}", section(report, "RANKS").splitlines()[2])
    assert cells[:2] == ["0", "host0"]
    assert cells[6] == "?"


def test_lost_ranks_are_told_of_once():
    """All that are left say the same; one that was lost says less."""

    def lose(rank, tables):
        if rank:
            tables["steps"]["lost_ranks"][3], tables["steps"]["redone"][3] = 1, 1
            tables["steps"]["restored_residuals"][3], tables["steps"]["restored_residual_norm"][3] = 1, 0.125

    made = run(4, change=lose)
    report = shown(made)
    assert "1 rank was lost on the way, and the others went on; residuals: 1 restored" in " ".join(report.split())
    assert re.search(r"residuals from copies +1  2-norm 0.125, shared out", section(report, "LOST RANKS"))
    assert document(account(made))["losses"]["lost_ranks"] == 1
