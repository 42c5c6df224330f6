"""`hpctk report` and `hpctk trace` on folders."""

import json
import shlex

import pytest
from stats_files import write_run

from hpctk.cli import main


def hpctk(capsys, *words):
    code = main([str(word) for word in words])
    caught = capsys.readouterr()
    return code, caught.out, caught.err


def test_text(tmp_path, capsys):
    code, out, err = hpctk(capsys, "report", write_run(tmp_path / "run", 4))
    assert (code, err) == (0, "")
    assert "ranks    4 on 2 nodes" in out
    assert "RANKS" in out


@pytest.mark.parametrize("inside", ["stats", "mean/stats"])
def test_the_folder_of_a_run_will_do(tmp_path, capsys, inside):
    write_run(tmp_path / "run" / inside, 2)
    code, out, _ = hpctk(capsys, "report", tmp_path / "run")
    assert code == 0
    assert f"{tmp_path}/run/{inside}" in "".join(out.split())


@pytest.mark.parametrize("run", ["run", "my run", "it's"])
def test_several_methods_in_one_run_are_named_for_a_shell(tmp_path, capsys, run):
    folders = [tmp_path / run / name for name in ("mean", "saef")]
    for folder in folders:
        write_run(folder / "stats", 2)
    code, out, err = hpctk(capsys, "report", tmp_path / run)
    assert (code, out) == (2, "")
    assert f"--compare {shlex.join(map(str, folders))}" in err


def test_json_to_the_terminal_and_to_a_file(tmp_path, capsys):
    run = write_run(tmp_path / "run", 3)
    code, out, _ = hpctk(capsys, "report", run, "--json")
    assert code == 0
    shown = json.loads(out)
    assert shown["totals"]["ranks"] == 3
    code, out, err = hpctk(capsys, "report", run, "--json", tmp_path / "r.json")
    assert (code, out, err) == (0, "", f"{tmp_path}/r.json\n")
    assert json.loads((tmp_path / "r.json").read_text()) == shown


def test_page_takes_the_place_of_an_old_one_only_when_whole(tmp_path, capsys):
    run, target = write_run(tmp_path / "run", 2), tmp_path / "r.html"
    target.write_text("old")
    code, out, err = hpctk(capsys, "report", run, "--html", target)
    assert (code, out, err) == (0, "", f"{target}\n")
    assert target.read_text().startswith("<!DOCTYPE html>")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["r.html", "run"]


def test_a_place_that_cannot_be_written(tmp_path, capsys):
    run = write_run(tmp_path / "run", 2)
    for words in (["report", run, "--html"], ["report", run, "--json"], ["trace", run, "-o"]):
        code, _, err = hpctk(capsys, *words, tmp_path / "nowhere" / "file")
        assert code == 2
        assert "cannot be written: No such file or directory" in err


def test_compare(tmp_path, capsys):
    a, b = write_run(tmp_path / "a", 2), write_run(tmp_path / "b", 2, density=0.1)
    code, out, _ = hpctk(capsys, "report", "--compare", a, b)
    assert code == 0
    assert [line.split()[-2:] for line in out.splitlines() if line.startswith("dense / wire")] == [["1x", "10x"]]
    code, _, _ = hpctk(
        capsys, "report", "--compare", a, b, "--html", tmp_path / "c.html", "--json", tmp_path / "c.json"
    )
    assert code == 0
    assert (tmp_path / "c.html").read_text().count("<svg") == 7
    assert len(json.loads((tmp_path / "c.json").read_text())["runs"]) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["report"], "RUN: one folder is needed, got 0"),
        (["report", "a", "b"], "got 2; --compare takes several"),
        (["report", "--compare", "a"], "--compare: needs two runs or more, got 1"),
        (["report", "--json", "a"], "write RUN before --json"),
        (["report", "nowhere"], "nowhere: no such"),
        (["report", "a", "--steps", "5"], "--steps 5: allowed is A:B"),
        (["trace", "a", "-o", "t", "--steps", "7:3"], "--steps 7:3: there is no step"),
        (["trace", "a", "-o", "t", "--ranks", "1-"], "--ranks 1-: allowed are"),
        (["trace", "a", "-o", "t", "--ranks", "9-1"], "--ranks 9-1: allowed are"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_words_are_one_line(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = hpctk(capsys, *words)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


def test_files_that_are_damaged_cost_their_rank_only(tmp_path, capsys):
    run = write_run(tmp_path / "run", 4)
    (run / "000" / "rank-00001.h5").write_bytes(b"")
    whole = (run / "000" / "rank-00002.h5").read_bytes()
    (run / "000" / "rank-00002.h5").write_bytes(whole[: len(whole) // 2])
    assert hpctk(capsys, "report", run, "--html", tmp_path / "r.html")[0] == 0
    code, out, _ = hpctk(capsys, "report", run)
    assert code == 0
    assert "- rank 1 is missing: is empty" in out
    assert "- rank 2 is missing: is cut off" in out
    assert hpctk(capsys, "trace", run, "-o", tmp_path / "t.json")[0] == 0


def test_trace(tmp_path, capsys):
    run = write_run(tmp_path / "run", 2, steps=5)
    code, out, _ = hpctk(capsys, "trace", run, "-o", tmp_path / "t.json", "--steps", "1:3", "--ranks", "0-1")
    assert code == 0
    assert out == f"{tmp_path}/t.json: 12 calls and steps; open it at ui.perfetto.dev\n"
    json.loads((tmp_path / "t.json").read_text())
