"""Checkpoints of another number of ranks: what a method applies is conserved, and training goes on.

The ranks of a part of COMM_WORLD save or load; expected values come from the files that they wrote.
"""

import h5py
import numpy as np
import pytest
import torch
from restarts import METHODS, Job

import hpctk

STEPS = 6


@pytest.fixture
def part(comm):
    """All ranks but the last: another number of ranks."""
    if comm.size == 1:
        pytest.skip("one rank has no smaller part")
    inside = comm.rank < comm.size - 1
    made = comm.Split(0 if inside else 1, comm.rank)
    yield made if inside else None
    made.Free()


@pytest.fixture(params=["fewer", "more"])
def resized(request, world, comm, part, mpi_tmp_path):
    """Save with one number of ranks, load with another; gives a function from a method's name to what was seen."""

    def go(name):
        saving, loading = (comm, part) if request.param == "fewer" else (part, comm)
        path, saved, loaded = mpi_tmp_path / "kept", None, None
        if saving is not None:
            saved = Job(METHODS[name](), comm=saving)
            saved.train(STEPS)
            path = saved.save(path)
        world.barrier()
        if loading is not None:
            loaded = Job(METHODS[name](), comm=loading)
            loaded.load(mpi_tmp_path / "kept")
        world.barrier()
        place = next((mpi_tmp_path / "kept").iterdir())
        return read_all(place), loaded, loading

    yield go
    world.barrier()


def read_all(place):
    """Return every rank's file as {path: array}."""
    files = []
    for path in sorted(place.glob("rank-*.h5")):
        with h5py.File(path) as file:
            names = []
            file.visit(names.append)
            files.append({name: file[name][...] for name in names if isinstance(file[name], h5py.Dataset)})
    return files


def under(files, prefix):
    """Return what every file has under a key, as {name: [array of each rank]}."""
    names = [name.removeprefix(prefix) for name in files[0] if name.startswith(prefix)]
    return {name: [file[prefix + name].astype(np.float64) for file in files] for name in names}


def mean_over(comm, tensors):
    """Return the mean over the ranks that loaded, in float64."""
    return {name: np.mean(comm.allgather(tensor.double().numpy()), axis=0) for name, tensor in tensors.items()}


def assert_near(got, wanted):
    assert got.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_allclose(got[name], wanted[name], rtol=1e-6, atol=1e-9, err_msg=name)


MEANS = ["mean_topk", "mean_keep", "mean_sign", "mean_powersgd", "sasg_mean"]


@pytest.mark.parametrize("name", [*MEANS, "sasg"])
def test_residuals_keep_what_is_applied(resized, name):
    files, job, comm = resized(name)
    if job is None:
        return
    kept = under(files, "method/residuals/")
    assert kept
    assert any(np.abs(rows).max() > 0 for rows in kept.values())
    got = mean_over(comm, job.opt.local_state_dict()["residuals"])
    if name == "sasg":
        assert_near({n: x * comm.size for n, x in got.items()}, {n: np.sum(rows, 0) for n, rows in kept.items()})
    else:
        assert_near(got, {n: np.mean(rows, 0) for n, rows in kept.items()})
    job.train(3)
    assert all(torch.isfinite(parameter).all() for parameter in job.model.parameters())


@pytest.mark.parametrize("name", ["saef_topk", "saef_sign", "saef_onebit"])
def test_saef_steps_ahead_of_the_same_x(resized, name):
    """Residuals are how far the parameters are from x: the mean of both is kept."""
    files, job, comm = resized(name)
    if job is None:
        return
    state = job.opt.local_state_dict()
    # Which the model holds: they are in a file once.
    held = {n: rows for n, rows in under(files, "model/state/").items() if n in state["parameters"]}
    assert any(np.abs(np.mean(rows, 0) - files[0][f"method/x/{n}"]).max() > 0 for n, rows in held.items())
    assert_near(mean_over(comm, state["parameters"]), {n: np.mean(rows, 0) for n, rows in held.items()})
    for name, parameter in job.model.named_parameters():
        np.testing.assert_array_equal(state["x"][name].numpy(), files[0][f"method/x/{name}"])
        assert torch.equal(parameter.detach(), state["parameters"][name])
    job.train(3)
    assert all(torch.isfinite(parameter).all() for parameter in job.model.parameters())


def test_the_servers_residual_is_cut_anew(resized):
    files, job, comm = resized("saef_onebit")
    if job is None:
        return
    whole = np.concatenate([file["method/server_shard"] for file in files])
    # One rank alone leaves the server nothing to keep: its mean is its own signs.
    assert len(files) == 1 or np.abs(whole).max() > 0
    mine = comm.allgather(job.opt.local_state_dict()["server_shard"].numpy())
    np.testing.assert_array_equal(np.concatenate(mine), whole)


@pytest.mark.parametrize("name", ["localsgd", "celgc", "mgrawa", "lgrawa", "easgd", "lsgd"])
def test_model_methods_go_on_from_the_mean_of_the_workers(resized, name):
    files, job, comm = resized(name)
    if job is None:
        return
    models = under(files, "model/state/")
    momenta = under(files, "optimizer/state/0/")["momentum_buffer"]
    for parameter, tensor in job.model.named_parameters():
        np.testing.assert_allclose(tensor.detach().numpy(), np.mean(models[parameter], 0), rtol=1e-6, atol=1e-8)
    momentum = job.opt.state_dict()["state"][0]["momentum_buffer"].numpy()
    np.testing.assert_allclose(momentum, np.mean(momenta, 0), rtol=1e-5)
    # Batch norm: the mean of its floating point buffers; its count of batches is a count.
    np.testing.assert_allclose(job.model.norm.running_mean.numpy(), np.mean(models["norm.running_mean"], 0), rtol=1e-6)
    assert int(job.model.norm.num_batches_tracked) == STEPS
    if name in ("mgrawa", "lgrawa"):
        smooth = under(files, "method/")["smooth"]
        np.testing.assert_allclose(job.opt.local_state_dict()["smooth"].numpy(), np.mean(smooth, 0))
    job.train(5)
    assert len(set(comm.allgather(job.opt.stats.steps))) == 1


@pytest.mark.parametrize("name", ["mean", "adacons", "adacons_layerwise", "mean_randomk", "mean_qsgd", "mean_clip"])
def test_gradient_methods_hold_the_same_everywhere(resized, name, caplog):
    files, job, comm = resized(name)
    if job is None:
        return
    for parameter, tensor in job.model.named_parameters():
        np.testing.assert_array_equal(tensor.detach().numpy(), files[0][f"model/state/{parameter}"])
    assert job.t == STEPS
    # One rank alone has no momentum to lose, and none to miss.
    drops = "adacons" in name and len(files) > 1 and comm.size > 1
    job.train(3)
    assert ("momentum was of" in caplog.text) == drops
    assert len(set(comm.allgather(job.model.first.weight.detach().numpy().tobytes()))) == 1


def test_a_parameter_that_only_some_ranks_train(comm, part, world, mpi_tmp_path):
    """Its momenta are the mean, zeros where there are none; its number of steps that of a rank which has it."""

    def made(on):
        torch.manual_seed(1)
        model = torch.nn.ModuleList([torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)])
        base = torch.optim.Adam(model.parameters(), lr=0.1)
        return model, hpctk.DistributedOptimizer(base, hpctk.LocalSGD(2), model=model, comm=on)

    model, opt = made(comm)
    for _ in range(3):
        opt.zero_grad()
        # Rank 0 trains the first layer only, the others both.
        sum(layer(torch.ones(1, 2)).sum() for layer in model[: 1 + (comm.rank > 0)]).backward()
        opt.step()
    hpctk.save_checkpoint(mpi_tmp_path / "kept", opt, model)
    moments = comm.allgather(opt.state_dict()["state"].get(2, {}).get("exp_avg", torch.zeros(1, 2)).numpy())
    if part is not None:
        other, again = made(part)
        hpctk.load_checkpoint(mpi_tmp_path / "kept", again, other)
        state = again.state_dict()["state"][2]
        assert float(state["step"]) == 3
        np.testing.assert_allclose(state["exp_avg"].numpy(), np.mean(moments, 0), rtol=1e-6)
    world.barrier()


@pytest.mark.parametrize("name", ["diloco_topk", "celgc_sign", "mgrawa_topk"])
def test_the_common_model_stays_and_its_residuals_keep_their_mean(resized, name):
    files, job, comm = resized(name)
    if job is None:
        return
    state = job.opt.local_state_dict()
    for parameter, x in state["common"]["x"].items():
        np.testing.assert_array_equal(x.numpy(), files[0][f"method/common/x/{parameter}"])
    kept = under(files, "method/common/residuals/")
    assert any(np.abs(rows).max() > 0 for rows in kept.values())
    assert_near(mean_over(comm, state["common"]["residuals"]), {n: np.mean(rows, 0) for n, rows in kept.items()})
    models = under(files, "model/state/")
    for parameter, tensor in job.model.named_parameters():
        np.testing.assert_allclose(tensor.detach().numpy(), np.mean(models[parameter], 0), rtol=1e-6, atol=1e-8)
    job.train(5)
    assert all(torch.isfinite(parameter).all() for parameter in job.model.parameters())


def test_what_was_under_way_arrives_on_another_number_of_ranks(resized):
    """The outer momentum, the period and the combined displacement are what they were."""
    files, job, comm = resized("diloco_streaming")
    if job is None:
        return
    state, saved = job.opt.local_state_dict(), under(files, "method/")
    assert state["combined"]
    for part in ("combined", "momentum"):
        for parameter, tensor in state[part].items():
            np.testing.assert_array_equal(tensor.numpy(), saved[f"{part}/{parameter}"][0])
    assert (state["slot"], state["period"], state["t"]) == (1, 4, STEPS)
    job.train(5)
    assert len(set(comm.allgather(job.opt.stats.counts["rounds"]))) == 1
