"""The bundled jobs as users start them: what they leave behind, how they stop and go on, what they refuse."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import idx_files
import pytest
from jobs import ROOT, clean_environment, mpirun, run

HPCTK = [sys.executable, "-m", "mpi4py", "-m", "hpctk", "train"]
#: Small enough for a test, and long enough to be stopped in the middle.
STOPPABLE = ["digits", "--method", "saef", "--epochs", "6", "--seed", "3", "--checkpoint-steps", "20"]


def train(ranks, *words, timeout_s=150, **options):
    return run(mpirun(ranks, *HPCTK, *map(str, words)), timeout_s=timeout_s, **options)


def result(folder):
    return json.loads((folder / "result.json").read_text())


def test_digits_by_two_methods(tmp_path):
    """Accounts, folders, picture; and once it is over, nothing is trained again."""
    folder = tmp_path / "run"
    words = ["digits", "--method", "mean,celgc", "--epochs", 5, "--run", folder]
    ended = train(4, *words, "--picture", tmp_path / "picture.png")
    assert ended.code == 0, ended.output
    document = result(folder)
    assert (document["ranks"], list(document["methods"])) == (4, ["mean", "celgc"])
    mean = document["methods"]["mean"]
    # The model has 17226 parameters; a ring sends 2*3/4 of them in each step, give or take a block's rounding.
    parameters = 64 * 128 + 128 + 128 * 64 + 64 + 64 * 10 + 10
    assert len(mean["ranks"]) == 4
    for rank in mean["ranks"]:
        assert rank["sent_bytes"] == pytest.approx(rank["steps"] * parameters * 4 * 2 * 3 / 4, rel=1e-3)
    assert mean["metrics"]["accuracy"] > 0.85
    assert mean["curve"]["losses"][-1] < mean["curve"]["losses"][0] / 4
    assert mean["curve"]["steps"][-1] == mean["ranks"][0]["steps"] == 5 * (1497 // 64)
    assert "sent per rank" in ended.output
    assert f"picture: {tmp_path / 'picture.png'}" in ended.output
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert "samples/s" in ended.output
    assert "/step" in ended.output

    again = train(4, "digits", "--run", folder, "--resume")
    assert again.code == 0, again.output
    assert "samples/s" not in again.output
    assert "celgc" in again.output
    assert result(folder) == document


@pytest.mark.full
def test_no_method_of_the_quickstart_is_worse_than_plain_averaging(tmp_path):
    """The quickstart's own job: worse by no more than the mean's own verdicts differ from seed to seed."""
    ended = train(4, "digits", "--method", "all", "--json", tmp_path / "result.json", timeout_s=380)
    assert ended.code == 0, ended.output
    methods = json.loads((tmp_path / "result.json").read_text())["methods"]
    verdicts = {name: one["metrics"] for name, one in methods.items()}
    mean, others = verdicts["mean"], {name: one for name, one in verdicts.items() if name != "mean"}
    assert set(others) == {"adacons", "sasg", "saef", "mgrawa", "lgrawa", "celgc"}
    assert mean["accuracy"] > 0.97
    # Over seeds 1 to 5 the mean came to losses of 0.062 to 0.079, and to accuracies of 97.7 % to 98.3 %.
    worse = {name: one for name, one in others.items() if one["test loss"] > mean["test loss"] + 0.02}
    assert not worse, (worse, mean)
    worse = {name: one for name, one in others.items() if one["accuracy"] < mean["accuracy"] - 0.01}
    assert not worse, (worse, mean)
    # What they are for: fewer bytes, but for AdaCons, which promises no more than the mean's.
    sent = {name: max(rank["sent_bytes"] for rank in one["ranks"]) for name, one in methods.items()}
    assert sent["adacons"] < 1.01 * sent["mean"]
    assert all(sent[name] < sent["mean"] / 4 for name in others if name != "adacons"), sent


def started(folder, words):
    """Start two ranks in the background; return the job and the ranks' process ids once a checkpoint is there."""
    job = subprocess.Popen(
        mpirun(2, *HPCTK, *words, "--run", str(folder)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, stdin=subprocess.DEVNULL, env=clean_environment(), cwd=ROOT, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not list(folder.glob("checkpoints/*/index.json")):
        if job.poll() is not None or time.monotonic() > deadline:
            os.killpg(job.pid, signal.SIGKILL)
            raise AssertionError(job.communicate()[0])
        time.sleep(0.01)
    mine = f"--run\0{folder}\0".encode()
    ranks = [
        int(pid)
        for pid in os.listdir("/proc")
        if pid.isdigit() and mine in _command(pid) and b"mpirun" not in _command(pid).split(b"\0")[0]
    ]
    return job, ranks


def _command(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


def test_a_stopped_job_goes_on_bit_for_bit(tmp_path):
    """A signal to one rank: all save and exit with 85; resumed, the parameters end the same as without a stop."""
    straight = train(2, *STOPPABLE, "--run", tmp_path / "straight")
    assert straight.code == 0, straight.output
    stopped = tmp_path / "stopped"
    job, ranks = started(stopped, STOPPABLE)
    os.kill(max(ranks), signal.SIGUSR2)
    output = job.communicate(timeout=60)[0]
    assert job.returncode == 85, output
    assert "stopped by SIGUSR2" in output
    assert not (stopped / "result.json").exists()
    resumed = train(2, "digits", "--run", stopped, "--resume")
    assert resumed.code == 0, resumed.output
    assert "resumed" in resumed.output
    one, two = (result(folder)["methods"]["saef"] for folder in (tmp_path / "straight", stopped))
    assert one["parameters_sha256"] == two["parameters_sha256"]
    assert one["metrics"] == two["metrics"]
    assert one["curve"]["losses"] == two["curve"]["losses"]
    assert one["curve"]["sent_bytes"] == two["curve"]["sent_bytes"]
    assert [rank["steps"] for rank in two["ranks"]] == [6 * (1497 // 32)] * 2


def test_a_killed_job_goes_on_from_its_last_checkpoint_with_another_number_of_ranks(tmp_path):
    folder = tmp_path / "run"
    job, ranks = started(folder, STOPPABLE)
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
    job.communicate(timeout=60)
    assert job.returncode != 0
    resumed = train(3, "digits", "--run", folder, "--resume")
    assert resumed.code == 0, resumed.output
    entry = result(folder)["methods"]["saef"]
    assert len(entry["ranks"]) == 3
    # 46 steps an epoch with two ranks, 31 with three; the first epoch or so was done by two.
    assert 6 * 31 < entry["ranks"][0]["steps"] < 6 * 46
    assert entry["metrics"]["accuracy"] > 0.9


FILE = "the settings file"


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["digits", "--settings", FILE], "no setting 'learning_rate' for digits: known are task, method"),
        (["digits", "--run", "README.md/run"], "README.md"),
        (["lm", "--data", "no/such/text"], "No such file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_settings(tmp_path, words, wanted):
    file = tmp_path / "settings.toml"
    file.write_text("learning_rate = 0.1\n")
    ended = train(2, *[str(file) if word == FILE else word for word in words])
    assert ended.code != 0
    assert wanted in ended.output
    assert "Traceback" not in ended.output


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--method", "saeff"], "method='saeff': did you mean saef?"),
        (["--method", "celgc", "--set", "perod=4"], "did you mean period?"),
        (["--method", "celgc", "--set", "period=often"], "period='often': need a whole number"),
        (["--schedule", "rign"], "schedule='rign': did you mean ring?"),
        (["--epochs", "many"], "invalid int value: 'many'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_word_is_said_once_before_anything_is_loaded(words, wanted):
    # No folder for the data: had they been looked for, that would be the complaint.
    ended = train(3, "fashion", "--data", "no/such/folder", *words)
    assert ended.code == 2, ended.output
    assert ended.output.count(wanted) == 1
    assert "no/such/folder" not in ended.output
    assert "MPI_ABORT" not in ended.output
    assert "Traceback" not in ended.output


def test_a_wrong_word_for_a_run_that_goes_on(tmp_path):
    (tmp_path / "settings.toml").write_text('task = "digits"\nmethod = "celgc"\n')
    ended = train(2, "digits", "--run", tmp_path, "--resume", "--set", "perod=4")
    assert ended.code == 2, ended.output
    assert ended.output.count("celgc has no setting 'perod': did you mean period?") == 1
    assert "MPI_ABORT" not in ended.output


def test_settings_can_be_checked_alone(tmp_path):
    """Nothing is trained or written."""
    words = ["digits", "--method", "celgc", "--run", str(tmp_path / "run"), "--check"]
    right = run([sys.executable, "-m", "hpctk", "train", *words])
    assert right.code == 0, right.output
    assert "make sense" in right.output
    assert not (tmp_path / "run").exists()
    assert run([sys.executable, "-m", "hpctk", "train", *words, "--set", "clip=-1"]).code == 2


@pytest.mark.full
def test_fashion_from_a_folder_with_a_time_budget(tmp_path):
    data = idx_files.write(tmp_path / "data", packed=True)
    words = ["fashion", "--model", "cnn", "--data", data, "--batch", 8, "--run", tmp_path / "run"]
    ended = train(2, *words, "--epochs", 10_000, "--time-budget-s", 2)
    assert ended.code == 0, ended.output
    assert "ended by the time budget: mean" in ended.output
    entry = result(tmp_path / "run")["methods"]["mean"]
    assert not entry["complete"]
    assert 0 < entry["ranks"][0]["steps"] == entry["ranks"][1]["steps"] < 10_000 * 30
    # A larger budget goes on from where it ended.
    more = train(2, "fashion", "--run", tmp_path / "run", "--resume", "--time-budget-s", 4)
    assert more.code == 0, more.output
    assert result(tmp_path / "run")["methods"]["mean"]["ranks"][0]["steps"] > entry["ranks"][0]["steps"]


def test_the_example_trains_and_goes_on(tmp_path):
    example = [sys.executable, "-m", "mpi4py", str(ROOT / "examples" / "train.py"), str(tmp_path / "checkpoints")]
    assert len((ROOT / "examples" / "train.py").read_text().splitlines()) < 80
    ended = run(mpirun(2, *example), timeout_s=120)
    assert ended.code == 0, ended.output
    assert float(re.search(r"accuracy ([0-9.]+)%", ended.output)[1]) > 90
    assert "after 300 steps" in ended.output
    # There is nothing left to do: what it prints is what it was.
    again = run(mpirun(2, *example), timeout_s=120)
    assert again.code == 0, again.output
    assert again.output == ended.output


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--ranks", "many"], "number of ranks"),
        (["--ranks"], "expected one argument"),
        (["--run", "elsewhere"], "runs/quickstart"),
        (["--resume"], "runs/quickstart"),
    ],
)
def test_quickstart_refuses_nonsense(words, wanted):
    ended = run([str(ROOT / "launch" / "quickstart"), *words])
    assert ended.code == 2
    assert wanted in ended.output
