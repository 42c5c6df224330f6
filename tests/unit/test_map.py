"""The measured map: README and docs show what the results in the checkout say, and the arithmetic of the table."""

import json
import sys

import pytest
from jobs import ROOT

from hpctk.advise.evidence import load


@pytest.fixture
def report(monkeypatch):
    """Return the benchmark that writes the pages."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    before = set(sys.modules)
    import report

    yield report
    for name in set(sys.modules) - before:
        if name.startswith(("report", "_rig", "_training")):
            del sys.modules[name]


@pytest.mark.parametrize("page", ["README.md", "docs/when-it-pays.md"])
def test_pages_show_what_was_measured(report, page):
    text = (ROOT / page).read_text(encoding="utf-8")
    made = report.with_map(text, load(ROOT / "benchmarks" / "results"), limited=page == "README.md")
    assert text == made, "write it anew: ./launch/bench report"
    assert len(report.PLACE.findall(text)) == 1
    assert "| DDP, 16 bit |" in text


def set_up(rate, **to_target_s):
    rows = [{"name": name.replace("_", "-"), "to_target_s": seconds} for name, seconds in to_target_s.items()]
    bits = None if rate == "none" else 1e9
    return {"settings": {"task": "cnn", "rate": rate, "bits_per_second": bits}, "params": 1_600_000, "summary": rows}


def test_who_was_first_and_who_lost(report):
    fast = set_up("none", alone=1.0, ddp=9.0, ddp_fp16=8.0, saef=16.0, celgc=10.0, sasg=None)
    slow = set_up("1gbit", alone=1.0, ddp=90.0, ddp_fp16=60.0, saef=30.0, celgc=20.0, sasg=None)
    lines = report.sheet.table([fast, slow]).splitlines()
    assert lines[2] == "| cnn, 1.6 M, 1 Gbit/s | 90.0 s | 60.0 s | celgc, 20.0 s | 3.0 | sasg (missed) |"
    assert lines[3].startswith("| cnn, 1.6 M, no limit | 9.0 s | 8.0 s | ddp, 9.0 s | 0.9 | saef, celgc")
    assert len(report.sheet.table([fast, slow], limited=True).splitlines()) == 3
    assert report.sheet.gains(slow) == {"ddp": 60 / 90, "saef": 2.0, "celgc": 3.0, "sasg": None}


def test_experiments_of_the_papers_stand_on_the_page_once_they_are_through(report, tmp_path):
    machine = {"hpctk": "0.2.0", "commit": "0123456789abcdef"}
    for name, more in (("saef", {"table": "contender  accuracy\nSAEF       87 %"}), ("celgc", {})):
        document = {"settings": {}, "machine": machine, "runs": [], **more}
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    text = report.page({}, report.published(tmp_path))
    assert "### paper/saef\n\nhpctk 0.2.0, commit 0123456789.\n\n```\ncontender  accuracy\nSAEF       87 %\n```" in text
    assert "celgc" not in text
    assert "own experiments" not in report.page({}, {})
