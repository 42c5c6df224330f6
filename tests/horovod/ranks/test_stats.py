"""Statistics of the ways in under Horovod: the same bytes as without it, and the tokens that Horovod moves."""

import pytest
from horovod_ways import over_mpi, own, stock
from training import loss_of

import hpctk

STEPS = 4


def table(folder, world, name="calls"):
    (recording,) = hpctk.stats.load(folder).recordings
    return recording.ranks[world.rank].table(name)


def exchanged(calls):
    """Return what carried gradients in steps: tensor, bytes sent and received."""
    chosen = (calls["dense_bytes"] > 0) & (calls["step"] >= 0)
    return sorted(
        zip(calls["operation"][chosen], calls["sent_bytes"][chosen], calls["received_bytes"][chosen], strict=True)
    )


def without_horovod(world, folder, method):
    model, opt = over_mpi(world, method, stats=folder, schedule="ring")
    for t in range(STEPS):
        opt.zero_grad()
        loss_of(model, world.rank, t).backward()
        opt.step()
    opt.close_stats()
    return exchanged(table(folder, world))


@pytest.mark.parametrize(
    "method", [hpctk.Mean, lambda: hpctk.Mean(hpctk.TopK(0.3)), hpctk.AdaCons], ids=["Mean", "TopK", "AdaCons"]
)
def test_the_stock_optimizer_with_a_compression(world, hvd, mpi_tmp_path, method):
    folder = mpi_tmp_path / "stock"
    model, opt, compression = stock(hvd, method(), of_compression={"stats": folder, "schedule": "ring"})
    for t in range(STEPS):
        opt.zero_grad()
        loss = loss_of(model, world.rank, t)
        compression.note_loss(loss)
        loss.backward()
        opt.step()
    compression.close_stats()
    calls, steps = table(folder, world), table(folder, world, "steps")
    assert exchanged(calls) == without_horovod(world, mpi_tmp_path / "plain", method())
    assert steps["step"].tolist() == list(range(STEPS))
    assert (steps["loss"] > 0).all()
    tokens = calls["operation"] == b"tokens"
    # At one rank Horovod moves none.
    assert tokens.sum() == (STEPS if world.size > 1 else 0)
    assert (calls["payload_bytes"][tokens] == 16 * len(list(model.parameters()))).all()


def test_a_method_that_acts_in_steps(world, hvd, mpi_tmp_path):
    folder = mpi_tmp_path / "stock"
    model, opt, compression = stock(hvd, hpctk.CELGC(1.0, 2), of_compression={"stats": folder, "schedule": "ring"})
    for t in range(STEPS):
        opt.zero_grad()
        loss_of(model, world.rank, t).backward()
        opt.step()
    compression.close_stats()
    steps = table(folder, world, "steps")
    assert steps["rounds"].tolist() == [0, 1, 0, 1]
    assert exchanged(table(folder, world)) == without_horovod(world, mpi_tmp_path / "plain", hpctk.CELGC(1.0, 2))


def test_hpctk_s_own_optimizer(world, hvd, mpi_tmp_path):
    folder = mpi_tmp_path / "own"
    model, opt = own(world, hpctk.Mean(), stats=folder, schedule="ring")
    for t in range(STEPS):
        opt.zero_grad()
        loss_of(model, world.rank, t).backward()
        opt.step()
    opt.close_stats()
    assert exchanged(table(folder, world)) == without_horovod(world, mpi_tmp_path / "plain", hpctk.Mean())
