"""Ranks are killed in training, and the others go on: as simulations that lose the same workers at the same steps."""

import json
import os
import sys
from pathlib import Path

import pytest
from jobs import ROOT, mpirun, run, run_ranks
from random_faults import jobs

from hpctk import stats

HERE = Path(__file__).parent
#: Whether each method exchanges in every step.
METHODS = {
    "Mean": True, "Mean clip": True, "Mean TopK": True, "AdaCons": True, "EF21": True, "SAEF": True,
    "SAEF classic": True, "SAEF Sign": True, "SASG": True, "CELGC": False, "LocalSGD": False, "LocalSGD TopK": False,
    "DiLoCo": False, "EPISODE": False, "EASGD": False, "LSGD": False, "MGRAWA": False, "LGRAWA": False,
}  # fmt: skip
#: Those of benchmarks/faults.py.
FREQUENT = (
    "Mean", "Mean TopK", "AdaCons", "EF21", "SAEF TopK", "SAEF Sign", "SASG", "CELGC", "LocalSGD", "EPISODE", "MGRAWA",
    "LGRAWA", "EASGD", "LSGD",
)  # fmt: skip
#: Kills at random, ranks of a job.
KILLS, RANKS = (960 if os.environ.get("HPCTK_FULL") else 48), 9
#: Job -> (ranks, [(method, [(rank, step, during), ...]), ...]); ranks are numbered anew for every method.
JOBS = {
    "at every point of a step": (
        5,
        [
            ("AdaCons", [(2, 3, "segment"), (1, 2, "exchange", 0.3)]),
            ("Mean", [(0, 4, "commit")]),
            ("SAEF", [(0, 2, "exchange"), (1, 2, "shrink")]),
        ],
    ),
    "a host of two ranks, the first of all among them": (
        6,
        [("Mean TopK", [([1, 2], 4, "exchange")]), ("SASG", [([0, 2], 5, "status")]), ("EF21", [(1, 6, "step")])],
    ),
    "a second one when the step is done again": (
        8,
        [
            ("Mean TopK", [(1, 4, "status"), (0, 4, "again")]),
            ("SAEF", [(2, 5, "status"), (1, 5, "again")]),
            ("SASG", [(0, 6, "exchange"), (1, 6, "again")]),
        ],
    ),
    "messages between steps": (
        5,
        [
            ("Mean TopK overlap", [(1, 3, "exchange")]),
            ("AdaCons overlap", [(0, 4, "status")]),
            ("DiLoCo delay", [(1, 5, "decision")]),
        ],
    ),
    "delays": (4, [("DiLoCo dense delay", [(0, 4, "decision"), (2, 8, "step")]), ("Mean overlap", [(0, 6, "step")])]),
    "copies on the next rank": (
        7,
        [
            ("Mean TopK buddy=2", [(1, 4, "exchange")]),
            ("SAEF classic buddy=3", [(0, 5, "decision")]),
            ("SASG buddy=2", [(3, 7, "exchange")]),
            ("EF21 buddy=3", [(2, 8, "status")]),
            ("conserve", [(1, 4, "exchange")]),
        ],
    ),
    "ranks that run out of data": (4, [("join", [(1, 2, "exchange"), (0, 12, "status")])]),
}
#: Those that are more of the same.
MORE = ("delays",)


def survive(ranks, methods, program="lost_worker.py"):
    """Run a job in which ranks are lost, and see that those that are left follow the simulation to the end."""
    words = [sys.executable, "-m", "mpi4py", str(HERE / program), json.dumps(methods)]
    ended = run(mpirun(ranks, *words, tolerant=True), timeout_s=240)
    assert ended.code == 0, (methods, ended.output)
    for method, faults in methods:
        ranks -= sum(1 if isinstance(fault[0], int) else fault[0][1] for fault in faults if len(fault) == 3)
        name = method.partition(" buddy=")[0]
        assert ended.output.count(f"{name} ok, {ranks} left") == ranks, (methods, ended.output)


@pytest.mark.parametrize("job", [pytest.param(one, marks=pytest.mark.full if one in MORE else ()) for one in JOBS])
def test_survivors_follow_the_simulation(job):
    survive(*JOBS[job])


@pytest.mark.parametrize("number", range(-(-KILLS // (RANKS - 1))))
def test_random_faults(number):
    """All methods, with the parameters of every step compared: bit for bit among the ranks, and with the simulation."""
    survive(RANKS, jobs(METHODS, KILLS, RANKS, seed=0)[number])


#: A test ends after some minutes: jobs of each, and how many such tests.
SEEDS, PARTS = (8, 5) if os.environ.get("HPCTK_FULL") else (3, 1)


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("nbytes", [8, 400, 5000, 200_000])
def test_messages_under_way_between_those_that_are_left(nbytes, part):
    """Looked at once their communicator is revoked, they end the process: of three such jobs one goes on, by chance."""
    for seed in range(part * SEEDS, (part + 1) * SEEDS):
        words = [sys.executable, "-m", "mpi4py", str(HERE / "lost_messages.py"), str(nbytes), str(seed)]
        ended = run(mpirun(8, *words, tolerant=True), timeout_s=120)
        assert ended.code == 0, (seed, ended.output)
        assert ended.output.count(": ok") == 2, (seed, ended.output)


#: The same of asynchronous methods, by the program lost_tickets.py.
TICKETS = (5, [("MGRAWA", [(0, 2, "step")]), ("LGRAWA", [(1, 3, "exchange"), (0, 4, "step")])])


def test_tickets_move_to_those_that_are_left():
    survive(*TICKETS, "lost_tickets.py")


def test_agreements_beside_the_thread_that_answers_for_tickets(tmp_path):
    """In Open MPI 5.0 one agreement in a thousand says no where another thread is in MPI meanwhile."""
    script = tmp_path / "program.py"
    script.write_text(AGREEMENTS)
    ended = run(mpirun(4, sys.executable, "-m", "mpi4py", str(script), tolerant=True), timeout_s=240)
    assert ended.code == 0, ended.output
    assert ended.output.count("0 of 6000 said no") == 4, ended.output


AGREEMENTS = """
from hpctk.comm.shared_counter import shared_counter
from hpctk.comm.world import world
here = world()
word = shared_counter(here)
said_no = 0
for _ in range(6000):
    here.minimum([here.rank], "so that messages are under way")
    said_no += not here.decide(done=True)
print(f"{said_no} of 6000 said no", flush=True)
"""


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
    # The job that is queued next has all ranks again.
    ended = run(mpirun(4, *words, "again", tolerant=True), timeout_s=240)
    assert ended.code == 0, ended.output
    assert ended.output.count(f"of 4 goes on from step {seen[0]['loaded_step']}") == 4, ended.output


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
@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("name", FREQUENT)
def test_hail(name, part, tmp_path):
    """A thousand kills at any moment: benchmarks/faults.py raises where a job hangs or survivors differ."""
    target = tmp_path / "rows.json"
    words = [sys.executable, str(ROOT / "benchmarks/faults.py"), "--only", name, "--kills", "24", "--seed", str(part)]
    ended = run([*words, "--ranks", "8", "--every", "10", "--json", str(target)], timeout_s=390)
    assert ended.code == 0, ended.output
    assert sum(row["kills"] for row in json.loads(target.read_text())) >= 24
