"""Checkpoints: training goes on bit for bit, errors are the same everywhere, nothing is half-loaded."""

import json
import shutil
import time
import zlib

import h5py
import numpy as np
import pytest
import torch
import torch_offers
from restarts import METHODS, Job, Net

import hpctk
from hpctk.checkpoint import folder
from hpctk.errors import MismatchError, PeerError, SettingError


@pytest.fixture
def shared(world, mpi_tmp_path):
    """A folder that all ranks see; nobody leaves before all are through with it."""
    yield mpi_tmp_path
    world.barrier()


@pytest.mark.parametrize("name", METHODS)
def test_goes_on_bit_for_bit(world, shared, name):
    straight = Job(METHODS[name](), adam="saef" in name)
    straight.train(5)
    straight.save(shared / "kept")
    straight.train(6)
    other = Job(METHODS[name](), adam="saef" in name)
    other.train(3)
    other.load(shared / "kept")
    other.train(6)
    assert other.digest() == straight.digest()
    assert other.opt.stats.steps == straight.opt.stats.steps == 11
    assert other.opt.stats.counts == straight.opt.stats.counts
    # The handshakes of loading are not the optimizer's; its own bytes go on where they were.
    assert other.opt.stats.sent_bytes == straight.opt.stats.sent_bytes


def test_saving_changes_nothing(world, shared):
    digests = []
    for saves in (False, True):
        job = Job(METHODS["saef_topk"]())
        for _ in range(4):
            job.step()
            if saves:
                job.save(shared / "kept")
        digests.append(job.digest())
    assert digests[0] == digests[1]


def test_the_last_two_are_kept(world, shared):
    job = Job(METHODS["mean"]())
    places = []
    for _ in range(4):
        job.train(1)
        places.append(job.save(shared / "kept"))
    world.barrier()
    assert [place.name for place in sorted((shared / "kept").iterdir())] == [place.name for place in places[2:]]
    assert [place.name for place in places] == [f"00000{t}-step-{t}" for t in (1, 2, 3, 4)]
    other = Job(METHODS["mean"]())
    other.load(places[2])
    assert other.t == 3


def test_what_was_not_finished_is_passed_over(world, shared):
    job = Job(METHODS["mean"]())
    job.train(1)
    job.save(shared / "kept")
    if world.rank == 0:
        (shared / "kept" / "000002-step-9").mkdir()
        (shared / "kept" / "000002-step-9" / "rank-00000.h5.partial").write_text("half")
    world.barrier()
    other = Job(METHODS["mean"]())
    other.load(shared / "kept")
    assert other.t == 1
    assert other.save(shared / "kept").name == "000003-step-1"
    assert not (shared / "kept" / "000002-step-9").exists()
    world.barrier()
    assert sorted(place.name for place in (shared / "kept").iterdir()) == ["000001-step-1", "000003-step-1"]


def _cut(place, last):
    path = place / f"rank-{last:05}.h5"
    path.write_bytes(path.read_bytes()[:-100])


def _flip(place, last):
    path = place / f"rank-{last:05}.h5"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _lose(place, last):
    (place / f"rank-{last:05}.h5").unlink()


def _mix(place, last):
    """Put the file of the checkpoint before here, and let the index know it: only the id tells."""
    name = f"rank-{last:05}.h5"
    source = folder.before(place)
    shutil.copy(source / name, place / name)
    index, other = (json.loads((one / "index.json").read_text()) for one in (place, source))
    index["files"][last] = other["files"][last]
    (place / "index.json").write_text(json.dumps(index))


def _newer(place, last):
    index = json.loads((place / "index.json").read_text())
    (place / "index.json").write_text(json.dumps({**index, "version": 2}))


def _garble(place, last):
    (place / "index.json").write_text('{"format": "hpctk-checkpoint", ')


def _foreign(place, last):
    (place / "index.json").write_text('{"format": "something else"}')


def _taken_from_elsewhere(how):
    """Let a weight be taken from another file, and let the index know."""

    def deed(place, last):
        path, other = place / f"rank-{last:05}.h5", place.parent / "secret.h5"
        with h5py.File(path, "r+") as file:
            shape = file[WEIGHT].shape
            del file[WEIGHT]
            with h5py.File(other, "w") as secret:
                secret["w"] = np.ones(shape, "<f4")
            if how == "raw":
                nbytes = 4 * int(np.prod(shape))
                file.create_dataset(WEIGHT, shape, "<f4", external=[(str(other), 0, nbytes)])
            elif how == "virtual":
                layout = h5py.VirtualLayout(shape, "<f4")
                layout[:] = h5py.VirtualSource(str(other), "w", shape)
                file.create_virtual_dataset(WEIGHT, layout)
            else:
                file[WEIGHT] = h5py.ExternalLink(str(other), "w")
            # Of the other file where it is a link: then no dtype is missing that would give it away.
            file[WEIGHT].attrs["torch_dtype"] = "float32"
        data, index = path.read_bytes(), json.loads((place / "index.json").read_text())
        index["files"][last] |= {"bytes": len(data), "crc32": zlib.crc32(data)}
        (place / "index.json").write_text(json.dumps(index))

    return deed


WEIGHT = "model/state/first.weight"


@pytest.mark.parametrize(
    ("deed", "file", "wrong"),
    [
        (_taken_from_elsewhere("raw"), "rank", f"{WEIGHT} lies in another file"),
        (_taken_from_elsewhere("virtual"), "rank", f"{WEIGHT} lies in another file"),
        (_taken_from_elsewhere("link"), "rank", f"{WEIGHT} is a link to elsewhere"),
        (_cut, "rank", "is cut off"),
        (_flip, "rank", "is damaged: its checksum"),
        (_lose, "rank", "is missing"),
        (_mix, "rank", "belongs to another checkpoint"),
        (_newer, "index.json", "format version 2, this hpctk reads 1; it was written by a newer hpctk"),
        (_garble, "index.json", "is damaged"),
        (_foreign, "index.json", "is no index of a checkpoint"),
    ],
)
def test_damage_is_named_and_nothing_is_half_loaded(world, shared, deed, file, wrong):
    job = Job(METHODS["mean_topk"]())
    for _ in range(2):
        job.train(2)
        place = job.save(shared / "kept")
    last = world.size - 1
    if world.rank == 0:
        deed(place, last)
    world.barrier()
    other = Job(METHODS["mean_topk"]())
    other.train(1)
    before, drawn = other.digest(), torch.get_rng_state()
    with pytest.raises(PeerError) as caught:
        other.load(shared / "kept")
    text = str(caught.value)
    assert str(place / (f"rank-{last:05}.h5" if file == "rank" else file)) in text
    assert wrong in text
    world.agree("the error", [("text", text)])
    assert other.digest() == before
    assert torch.equal(drawn, torch.get_rng_state())
    # The one before still loads, by the name that the message gives where it can.
    if file == "rank":
        assert f"The checkpoint before it is {folder.before(place)}" in text
    other.load(folder.before(place))
    assert other.t == 2


def test_nothing_there(world, shared):
    job = Job(METHODS["mean"]())
    with pytest.raises(PeerError, match="there is no such folder"):
        job.load(shared / "nowhere")
    if world.rank == 0:
        (shared / "kept" / "000001-step-3").mkdir(parents=True)
    world.barrier()
    with pytest.raises(PeerError, match="holds no whole checkpoint; 1 were begun"):
        job.load(shared / "kept")


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(("saved", "now"), [("mean_topk", "saef_topk"), ("sasg", "mean"), ("localsgd", "adacons")])
def test_another_method_is_an_error_in_any_case(world, shared, saved, now, strict):
    job, other = Job(METHODS[saved]()), Job(METHODS[now]())
    job.train(2)
    job.save(shared / "kept")
    other.train(1)
    before = other.digest()
    with pytest.raises(SettingError) as caught:
        other.load(shared / "kept", strict=strict)
    text = str(caught.value)
    was, has = (one.opt.method.settings()["method"] for one in (job, other))
    assert f"made with method={was}, this optimizer has method={has}" in text
    assert "strict=False" not in text
    world.agree("the error", [("text", text)])
    assert other.digest() == before


def test_another_method_goes_on_from_what_was_loaded(world, shared):
    """As docs/checkpoints.md says: load with the one that saved, then make the other."""
    job = Job(METHODS["mean_topk"]())
    job.train(3)
    job.save(shared / "kept")
    other = Job(METHODS["mean_topk"]())
    other.load(shared / "kept")
    base, model = other.opt._base, other.model
    wanted = {name: value.clone() for name, value in model.named_parameters()}
    other.opt = hpctk.DistributedOptimizer(base, METHODS["saef_topk"](), model=model)
    assert all(torch.equal(value, wanted[name]) for name, value in model.named_parameters())
    momenta = [state["momentum_buffer"] for state in job.opt.state_dict()["state"].values()]
    kept = [state["momentum_buffer"] for state in other.opt.state_dict()["state"].values()]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(kept, momenta, strict=True))
    other.rates = torch.optim.lr_scheduler.StepLR(other.opt, 7, 0.5)
    other.train(3)
    assert other.opt.stats.steps == 3


def test_another_setting(world, shared):
    job = Job(hpctk.Mean(hpctk.TopK(0.1)))
    job.train(2)
    job.save(shared / "kept")
    changed = Job(hpctk.Mean(hpctk.TopK(0.2)))
    with pytest.raises(SettingError, match="density.*0.1.*density.*0.2.*strict=False"):
        changed.load(shared / "kept")
    changed.load(shared / "kept", strict=False)
    mine, theirs = (one.opt.local_state_dict()["residuals"] for one in (changed, job))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_a_model_that_does_not_fit(world, shared):
    job = Job(METHODS["saef_topk"]())
    job.train(2)
    job.save(shared / "kept")
    other = Job(METHODS["saef_topk"]())
    other.train(1)
    odd = Net()
    odd.last = torch.nn.Linear(8, 4)
    before = other.digest()
    with pytest.raises(PeerError, match="size mismatch for last.weight"):
        hpctk.load_checkpoint(shared / "kept", other.opt, odd)
    assert other.digest() == before


def test_what_cannot_be_kept(world, shared):
    job = Job(METHODS["mean"]())
    with pytest.raises(SettingError, match=r"'extra.hook' is a function: a checkpoint keeps tensors"):
        hpctk.save_checkpoint(shared / "kept", job.opt, job.model, hook=lambda: 1)
    assert not (shared / "kept").exists()
    if world.size > 1:
        with pytest.raises(MismatchError, match="path"):
            hpctk.save_checkpoint(shared / f"kept{world.rank}", job.opt, job.model)


def test_one_rank_cannot_write(world, shared):
    """The last rank's file has a folder in its way: all raise, and the checkpoint before is untouched."""
    job = Job(METHODS["mean"]())
    job.train(1)
    first = job.save(shared / "kept")
    job.train(1)
    last = world.size - 1
    if world.rank == 0:
        (shared / "kept" / "000002-step-2").mkdir()
        (shared / "kept" / "000003-step-2").mkdir()
    world.barrier()
    blocked = shared / "kept" / "000004-step-2" / f"rank-{last:05}.h5.partial"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder, "next_place", lambda home, step: _blocked(home, blocked))
        with pytest.raises(PeerError, match=f"failed on rank {last}.*rank-{last:05}.h5"):
            job.save(shared / "kept")
    world.barrier()
    assert folder.complete(shared / "kept") == [first]
    assert not blocked.parent.exists()


def _blocked(home, blocked):
    """Return the place for a checkpoint in which a folder will be in the way of one file."""

    class Blocking(type(home)):
        def mkdir(self, *words, **more):
            super().mkdir(*words, **more)
            blocked.mkdir()

    return Blocking(blocked.parent)


def test_save_between_backward_and_step(world, shared):
    model = torch.nn.Linear(3, 2)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = hpctk.DistributedOptimizer(base, hpctk.Mean(), model=model, overlap=True)
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(PeerError, match=r"save_checkpoint\(\) between backward and step"):
        hpctk.save_checkpoint(shared / "kept", opt, model)
    opt.step()
    hpctk.save_checkpoint(shared / "kept", opt, model)


def test_fused_optimizers_find_their_momenta(world, shared):
    """In channels-last memory, where the order of elements is not that of the shape."""

    def made():
        torch.manual_seed(3)
        model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        base = torch_offers.optimizer("AdamW", model.parameters(), lr=0.01, fused=True)
        return model, hpctk.DistributedOptimizer(base, hpctk.Mean(), model=model)

    def train(model, opt, steps):
        for t in steps:
            x = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(10 * t + world.rank))
            opt.zero_grad()
            model(x.to(memory_format=torch.channels_last)).square().sum().backward()
            opt.step()

    model, opt = made()
    train(model, opt, range(4))
    hpctk.save_checkpoint(shared / "kept", opt, model)
    train(model, opt, range(4, 6))
    other, again = made()
    hpctk.load_checkpoint(shared / "kept", again, other)
    train(other, again, range(4, 6))
    assert torch.equal(other.weight, model.weight)


def test_caches_that_grow(world, shared):
    class Caching(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(2, 2)
            self.register_buffer("mask", torch.zeros(2), persistent=False)
            self.linear.register_buffer("lazy", None, persistent=False)

    models = [Caching(), Caching()]
    opts = [hpctk.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=0.1), hpctk.Mean(), model=m) for m in models]
    models[0].mask, models[0].linear.lazy = torch.ones(5), torch.full((3,), 2.0)
    hpctk.save_checkpoint(shared / "kept", opts[0], models[0])
    hpctk.load_checkpoint(shared / "kept", opts[1], models[1])
    assert torch.equal(models[1].mask, torch.ones(5))
    assert torch.equal(models[1].linear.lazy, torch.full((3,), 2.0))


def test_other_settings_are_those_of_now(world, shared):
    job = Job(hpctk.CELGC(clip=1.0, period=2))
    job.train(2)
    job.save(shared / "kept")
    other = Job(hpctk.CELGC(clip=0.001, period=2))
    other.load(shared / "kept", strict=False)
    other.train(1)
    assert other.opt.stats.counts["clipped_steps"] > job.opt.stats.counts["clipped_steps"]
    plain = Job(hpctk.Mean())
    plain.save(shared / "plain")
    Job(hpctk.Mean(hpctk.RandomK(0.5), clip=0.1)).load(shared / "plain", strict=False)


def test_tensors_lie_under_their_names(world, shared):
    job = Job(METHODS["mean_topk"]())
    job.train(2)
    place = job.save(shared / "kept")
    with h5py.File(place / f"rank-{world.rank:05}.h5") as file:
        kept = file["method/residuals/first.weight"][...]
        np.testing.assert_array_equal(kept, job.opt.local_state_dict()["residuals"]["first.weight"].numpy())
        np.testing.assert_array_equal(file["model/state/first.weight"][...], job.model.first.weight.detach().numpy())
        np.testing.assert_array_equal(file["model/left_out/seen"][...], job.model.seen.numpy())


def test_resolved_schedules_are_kept(world, shared):
    from hpctk.collectives.tuning import auto

    job = Job(METHODS["mean"]())
    job.train(1)
    job.save(shared / "kept")
    chosen = dict(auto.current(world).chosen)
    odd = {key: "rotation" for key in chosen if key[0] in ("allreduce", "iallreduce")}
    assert odd
    auto.current(world).chosen.update(odd)
    try:
        Job(METHODS["mean"]()).load(shared / "kept")
        assert {key: auto.current(world).chosen[key] for key in chosen} == chosen
    finally:
        auto.current(world).chosen.update(chosen)


class TestCheckpoints:
    def test_every_steps_and_resume(self, world, shared):
        job = Job(METHODS["mean"]())
        checkpoints = hpctk.Checkpoints(shared / "kept", job.opt, job.model, every_steps=3)
        assert checkpoints.resume() is None
        for _ in range(8):
            job.step()
            checkpoints.after_step(t=job.t, rates=job.rates)
        checkpoints.close()
        other = Job(METHODS["mean"]())
        with hpctk.Checkpoints(shared / "kept", other.opt, other.model) as again:
            extra = again.resume()
        assert extra["t"] == 6
        assert [place.name for place in folder.complete(shared / "kept")] == ["000001-step-3", "000002-step-6"]

    def test_by_the_clock(self, world, shared):
        """Rank 0's clock decides: all save in the same step, whatever the others' clocks say."""
        job = Job(METHODS["localsgd"]())
        every_s = 1e-6
        with hpctk.Checkpoints(shared / "kept", job.opt, job.model, every_s=every_s) as checkpoints:
            job.step()
            checkpoints.after_step(t=1)
        assert [place.name for place in folder.complete(shared / "kept")] == ["000001-step-1"]

    def test_ranks_that_ran_out_of_data(self, world, shared):
        """In a join() an idle rank counts rounds, not steps; all must save at the same calls all the same."""
        job = Job(METHODS["localsgd"]())
        with hpctk.Checkpoints(shared / "kept", job.opt, job.model, every_steps=2) as checkpoints:
            for epoch in range(4):
                with job.opt.join():
                    job.train(4 + 4 * (world.rank == 0))
                checkpoints.after_step(epoch=epoch)
        assert len(folder.complete(shared / "kept")) == 2

    def test_bad_settings(self, world, shared):
        job = Job(METHODS["mean"]())
        for settings in ({"every_steps": 0}, {"every_steps": 1.5}, {"every_s": 0}, {"every_s": "10"}):
            with pytest.raises(SettingError, match=f"{next(iter(settings))}=.*need"):
                hpctk.Checkpoints(shared / "kept", job.opt, job.model, **settings)
        if world.rank == 0:
            (shared / "file").write_text("")
        world.barrier()
        with pytest.raises(PeerError, match="keeping checkpoints in"):
            hpctk.Checkpoints(shared / "file" / "below", job.opt, job.model)

    def test_asynchronous_workers_save_after_rounds(self, world, shared):
        """Ranks do different numbers of steps; a save between two rounds would wait for one that waits in a round."""

        def train(job, rounds):
            with hpctk.Checkpoints(shared / "kept", job.opt, job.model, every_steps=3) as checkpoints:
                extra = checkpoints.resume()
                while job.opt.stats.counts["rounds"] < rounds:
                    job.step()
                    if world.rank == 0:
                        time.sleep(1e-3)
                    checkpoints.after_step(t=job.t)
            return extra

        assert train(Job(hpctk.MGRAWA(period=2, asynchronous=True)), 7) is None
        other = Job(hpctk.MGRAWA(period=2, asynchronous=True))
        assert train(other, 9) is not None
        assert other.opt.stats.counts["rounds"] == 9
        # Rank 0 removes what is old while the others go on.
        world.barrier()
        assert len(folder.complete(shared / "kept")) == 2
