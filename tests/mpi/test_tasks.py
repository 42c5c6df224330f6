"""Bundled tasks on real ranks: losses fall, the same seed gives the same bits, clocks are agreed on."""

import dataclasses

import idx_files
import pytest

from hpctk.cli import main
from hpctk.tasks import task_class
from hpctk.tasks.core.recipes import recipes
from hpctk.tasks.core.train import Job

#: A few steps of each; enough for the loss to fall by this factor.
SHORT = {
    "regression": ({"method": "adacons", "updates": 300, "global_batch": 120}, 0.1),
    "digits": ({"epochs": 3}, 0.7),
    "fashion": ({"epochs": 3, "batch": 8}, 0.7),
    "lm": ({"epochs": 1, "batch": 4, "window": 16, "hidden": 32}, 0.9),
}


def job(world, task, folder, **given):
    made = task_class(task)
    if task == "fashion":
        given |= {"data": str(folder / "data")}
    if task == "lm":
        given |= {"data": str(folder / "text")}
    one = made(made.settings_class(**given))
    one.load()
    (recipe,) = recipes(one.settings, made.recipes)
    return Job(world, one, recipe)


@pytest.fixture
def folder(mpi_tmp_path, world):
    if world.rank == 0:
        idx_files.write(mpi_tmp_path / "data", packed=False)
        (mpi_tmp_path / "text").write_bytes(b"all work and no play makes jack a dull boy. " * 200)
    world.barrier()
    return mpi_tmp_path


@pytest.mark.parametrize("task", SHORT)
def test_the_loss_falls_and_a_seed_decides_every_bit(world, folder, task):
    given, factor = SHORT[task]
    results, reports = [], []
    for seed in (1, 1, 2):
        run = job(world, task, folder, seed=seed, **given)
        results.append(run.run(reports.append))
        assert run.close() == 0
    losses = results[0].curve["losses"]
    assert losses[-1] < factor * losses[0]
    assert results[0].complete
    assert results[0].parameters_sha256 == results[1].parameters_sha256 != results[2].parameters_sha256
    assert dataclasses.replace(results[0], seconds=0, curve={}) == dataclasses.replace(results[1], seconds=0, curve={})
    assert losses == results[1].curve["losses"]
    # The model that was evaluated is everybody's.
    assert set(world.gather_texts(results[0].parameters_sha256, "test")) == {results[0].parameters_sha256}
    assert reports[0].done == 1
    assert {report.total for report in reports} == {results[0].steps}


@pytest.mark.parametrize("method", ["adacons", "saef", "mgrawa", "easgd", "lsgd"])
def test_every_kind_of_method_trains_digits(world, folder, method):
    result = job(world, "digits", folder, epochs=3, method=method).run(lambda report: None)
    assert result.metrics["accuracy"] > 0.4
    assert (result.sent_bytes > 0) == (world.size > 1)


def test_an_asynchronous_job_ends_after_the_same_round_everywhere(world, folder):
    given = {"method": "mgrawa", "method_settings": {"asynchronous": True, "period": 4}}
    run = job(world, "digits", folder, epochs=2, **given)
    result = run.run(lambda report: None)
    lockstep = 2 * (1497 // (16 * world.size))
    rounds = -(-lockstep // 4)
    assert result.rounds == rounds
    steps = [int(text) for text in world.gather_texts(str(result.steps), "test")]
    # A cycle has 4 local steps for each rank, whoever does them.
    assert sum(steps) == rounds * 4 * world.size
    assert result.complete


@pytest.mark.parametrize("asynchronous", [False, True], ids=["lockstep", "asynchronous"])
def test_a_time_budget_ends_all_ranks_together(world, folder, asynchronous):
    given = {"method_settings": {"asynchronous": asynchronous, "period": 4}, "time_budget_s": 0.3}
    run = job(world, "digits", folder, epochs=10_000, method="lgrawa", **given)
    result = run.run(lambda report: None)
    assert not result.complete
    assert len(set(world.gather_texts(str(result.rounds), "test"))) == 1


def test_the_oracle_reaches_what_plain_arithmetic_says(world, folder):
    """Two updates of the regression by plain averaging, against numpy in double precision."""
    import numpy as np

    run = job(world, "regression", folder, updates=2, global_batch=12, schedule="ring")
    task = task_class("regression")(task_class("regression").settings_class(updates=2, global_batch=12))
    task.load()
    w = task.model().weight.detach().numpy()[0].astype(np.float64)
    for update in range(2):
        gradients = []
        for rank in range(world.size):
            x = task.batch(rank, world.size, 0, update * 24).numpy().astype(np.float64).reshape(-1, 1000)
            gradients.append((x @ w) @ x / len(x))
        out = np.mean(gradients, axis=0)
        w = w - (out @ w) / (out @ out) * out
    run.run(lambda report: None)
    np.testing.assert_allclose(run.model.weight.detach().numpy()[0], w, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["digits", "--schedule", "star"], "known are ring"),
        (["digits", "--batch", "1498"], "samples for one step, there are 1497"),
        (["digits", "--json", "no/such/folder/x.json", "--epochs", "1"], "is no folder that can be written to"),
        (["fashion", "--data", "docs"], "apt-get install dataset-fashion-mnist"),
        (["regression", "--global-batch", "12", "--method", "saef"], "step_size='oracle' needs"),
        (["digits", "--settings", "README.md"], "README.md: is not TOML"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_goes_wrong_is_one_line_on_every_rank(world, capsys, words, wanted):
    assert main(["train", *words]) == 2
    complaint = capsys.readouterr().err.splitlines()[-1]
    assert complaint.startswith("hpctk train: ")
    assert wanted in complaint
