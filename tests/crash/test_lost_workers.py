"""Ranks are killed in training, and the others go on: as simulations that lose the same workers at the same steps."""

import json
import sys
from pathlib import Path

import pytest
from jobs import ROOT, mpirun, run, run_ranks

from hpctk import stats

HERE = Path(__file__).parent
#: Job -> (ranks, [(method, [(rank, step, during), ...]), ...]); ranks are numbered anew for every method.
JOBS = {
    "gradients": (4, [("Mean", [(2, 3, "exchange")]), ("AdaCons", [(0, 4, "commit")]), ("EF21", [(1, 5, "status")])]),
    "updates": (4, [("SAEF", [(0, 4, "decision")]), ("SASG", [(1, 5, "exchange")]), ("Mean TopK", [(0, 2, "step")])]),
    "models": (
        4,
        [("LocalSGD", [(3, 5, "exchange")]), ("MGRAWA", [(0, 8, "decision")]), ("EPISODE", [(1, 4, "step")])],
    ),
    "two at once, and one while the others meet": (
        5,
        [("Mean", [(0, 3, "exchange"), (4, 3, "exchange")]), ("SAEF classic", [(0, 2, "exchange"), (2, 2, "shrink")])],
    ),
    "differences of models": (3, [("DiLoCo", [(2, 5, "exchange")]), ("LocalSGD TopK", [(0, 8, "decision")])]),
    "more models": (4, [("CELGC", [(1, 5, "status")]), ("LGRAWA", [(0, 5, "exchange")]), ("EASGD", [(1, 8, "step")])]),
    "the rest": (3, [("Mean clip", [(0, 5, "commit")]), ("LSGD", [(1, 8, "decision")])]),
}
#: Those that are more of the same.
MORE = ("more models", "the rest")


@pytest.mark.parametrize("job", [pytest.param(one, marks=pytest.mark.full if one in MORE else ()) for one in JOBS])
def test_survivors_follow_the_simulation(job):
    ranks, methods = JOBS[job]
    text = json.dumps([{"method": method, "faults": faults} for method, faults in methods])
    words = [sys.executable, "-m", "mpi4py", str(HERE / "lost_worker.py"), text]
    ended = run(mpirun(ranks, *words, tolerant=True), timeout_s=240)
    assert ended.code == 0, ended.output
    for method, faults in methods:
        ranks -= len(faults)
        assert ended.output.count(f"{method} ok, {ranks} left") == ranks, ended.output


def test_data_checkpoints_and_statistics(tmp_path):
    """No sample is trained on twice; what is saved while a rank is lost can be loaded, and so can the statistics."""
    words = [sys.executable, "-m", "mpi4py", str(HERE / "lost_trainer.py"), str(tmp_path)]
    ended = run(mpirun(4, *words, tolerant=True), timeout_s=240)
    assert ended.code == 0, ended.output
    seen = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("dealt-*.json"))]
    assert len(seen) == 2, ended.output
    for epoch in range(2):
        samples = [sample for one in seen for number, batch in one["dealt"] if number == epoch for sample in batch]
        assert len(samples) == len(set(samples))
    # The second epoch has no fault in it: all of it is dealt out, but for what is less than a step.
    assert len(samples) > 0.95 * seen[0]["samples"]
    assert len({one["sha256"] for one in seen}) == 1
    assert {one["size"] for one in seen} == {2}
    assert [one["loaded_step"] > 0 for one in seen] == [True, True]
    run_stats = stats.load(tmp_path / "stats")
    assert run_stats is not None


def test_not_without_fault_tolerance(tmp_path):
    ended = run_ranks(
        1,
        """
        import torch, hpctk
        model = torch.nn.Linear(2, 2)
        base = torch.optim.SGD(model.parameters(), lr=0.1)
        hpctk.DistributedOptimizer(base, hpctk.Mean(), model=model, on_lost_rank="shrink")
        """,
        tmp_path,
    )
    assert ended.code != 0
    assert "hpctk mpirun --with-ft" in ended.output


@pytest.mark.full
def test_hail(tmp_path):
    """Kills at any moment, by all methods: benchmarks/faults.py raises where a job hangs or survivors differ."""
    target = tmp_path / "rows.json"
    words = [sys.executable, str(ROOT / "benchmarks/faults.py"), "--kills", "1000", "--ranks", "8", "--every", "10"]
    ended = run([*words, "--json", str(target)], timeout_s=3 * 3600)
    assert ended.code == 0, ended.output
    assert sum(row["kills"] for row in json.loads(target.read_text())) >= 1000
