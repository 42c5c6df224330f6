"""Checkpoints under Horovod: what a rank alone knows survives, with the stock optimizer too."""

import pytest
from horovod_ways import bits, own, stock, trajectory
from test_parity import METHODS
from training import net, sgd

import hpctk


@pytest.mark.parametrize("name", ["Mean TopK", "AdaCons", "SAEF", "MGRAWA", "CELGC"])
@pytest.mark.parametrize("way", ["stock", "own"])
def test_goes_on_bit_for_bit(world, hvd, mpi_tmp_path, way, name):
    def made(seed=0):
        if way == "stock":
            model = net(seed)
            _, opt, compression = stock(hvd, METHODS[name](), model=model, base=sgd(model.parameters()))
            return model, opt, compression
        model, opt = own(world, METHODS[name]())
        return model, opt, opt

    model, opt, carrier = made()
    trajectory(world, model, opt, 4)
    hpctk.save_checkpoint(mpi_tmp_path / "kept", carrier, model, optimizer=opt)
    trajectory(world, model, opt, 3, first=4)
    other, again, carrier = made(seed=0)
    extra = hpctk.load_checkpoint(mpi_tmp_path / "kept", carrier, other)
    if way == "stock":
        again.load_state_dict(extra["optimizer"])
    trajectory(world, other, again, 3, first=4)
    assert bits(other) == bits(model)
    assert carrier.stats.steps == 7
    world.barrier()
