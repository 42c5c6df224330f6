"""`hpctk mpirun --respawn`: ranks go on without one that is lost, and get it back at their next checkpoint."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from jobs import clean_environment, run

HPCTK = [sys.executable, "-m", "hpctk", "mpirun"]
#: Steps of the whole training; one rank is lost in this one, where the first argument says so.
STEPS, LOST = 30, 6
PROGRAM = f"""
import json, os, signal, sys, time
from pathlib import Path
import torch, hpctk
folder, every, kills = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
model = torch.nn.Linear(4, 1).double()
base = torch.optim.SGD(model.parameters(), lr=0.01)
opt = hpctk.DistributedOptimizer(base, hpctk.SAEF(hpctk.TopK(0.5)), model=model)
checkpoints = hpctk.Checkpoints(folder / "kept", opt, model, every_steps=every)
checkpoints.resume()
name, began = opt.world.rank, opt.stats.steps
print(f"begin {{name}} of {{opt.world.size}} at {{began}}", flush=True)
for t in range(began, {STEPS}):
    # Once in each start, for so many starts.
    if name == 1 and t == began + {LOST} and len(list(folder.glob("killed-*"))) < kills:
        (folder / f"killed-{{began}}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    opt.zero_grad()
    model(torch.ones(2, 4).double() * (1 + name)).sum().backward()
    opt.step()
    if every is None:
        # So slowly that ranks meet.
        time.sleep(0.05)
    checkpoints.after_step()
opt.together(lambda: opt.world.agree("the model", [("bits", [x.tolist() for x in opt._run.shared_state().values()])]))
print(f"end {{name}} of {{opt.world.size}} at {{opt.stats.steps}}", flush=True)
"""


def train(tmp_path, times, every, kills, **environ):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    words = [*HPCTK, "--respawn", str(times), "-n", "3", "python", str(script), str(tmp_path), json.dumps(every)]
    return run([*words, str(kills)], timeout_s=180, **environ)


def test_all_ranks_are_back_after_the_next_checkpoint_as_often_as_they_may_be(tmp_path):
    ended = train(tmp_path, 1, 10, 2)
    assert ended.code == 0, ended.output
    # Lost in step 6, saved after step 10, and all of them go on from there.
    assert ended.output.count("of 3 at 0\n") == ended.output.count("of 3 at 10\n") == 3, ended.output
    assert ended.output.count("beginning anew with all ranks, 1 of at most 1 times") == 1, ended.output
    # The second one that is lost stays so.
    assert ended.output.count(f"of 2 at {STEPS}\n") == 2, ended.output
    assert ended.output.count("rank 1 of 3 is lost; 2 go on") == 2, ended.output


def test_who_never_saves_by_itself_does_when_a_rank_is_lost(tmp_path):
    ended = train(tmp_path, 1, None, 1)
    assert ended.code == 0, ended.output
    assert ended.output.count("beginning anew") == 1, ended.output
    assert ended.output.count(f"of 3 at {STEPS}\n") == 3, ended.output


@pytest.mark.parametrize("send", [os.kill, os.killpg], ids=["to the command", "to its process group"])
def test_a_stop_is_passed_on_once_and_begins_nothing_anew(tmp_path, send):
    script = tmp_path / "program.py"
    # So that it can only end by the signal.
    script.write_text(PROGRAM.replace(f"range(began, {STEPS})", "range(began, 10**9)"))
    log = (tmp_path / "output").open("w+")
    job = subprocess.Popen(
        [*HPCTK, "--respawn", "3", "-n", "2", "python", str(script), str(tmp_path), "null", "0"],
        stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=clean_environment(), start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while (tmp_path / "output").read_text().count("begin") < 2 and time.monotonic() < deadline:
        assert job.poll() is None, (tmp_path / "output").read_text()
        time.sleep(0.1)
    send(job.pid, signal.SIGUSR2)
    try:
        status = job.wait(60)
    finally:
        job.kill()
    output = (tmp_path / "output").read_text()
    assert status == 85, output
    assert "stopped by SIGUSR2 and saved" in output
    assert "beginning anew" not in output


@pytest.mark.parametrize(
    ("words", "environ", "text"),
    [
        (["--respawn", "x", "-n", "2", "true"], {}, "--respawn='x': need a whole number from 0 to 1000"),
        (["--respawn=", "-n", "2", "true"], {}, "--respawn='': need a whole number"),
        (["--respawn=1", "--print", "-n", "2", "true"], {}, "leave out one of them"),
        (["--respawn=1", "-n", "2", "true"], {"HPCTK_ON_LOST_RANK": "raise"}, "but HPCTK_ON_LOST_RANK=raise"),
        (["--respawn=1", "-n", "2", "hpctk", "train", "digits"], {}, "say where it goes on by --run DIR --resume"),
        (["--respawn=1", "-n", "2", "python", "nowhere.py"], {}, "nowhere.py: no such file"),
    ],
)
def test_what_cannot_be_is_said_at_once(words, environ, text):
    ended = run([*HPCTK, *words], timeout_s=120, **environ)
    assert ended.code == 2, ended.output
    assert text in ended.output
