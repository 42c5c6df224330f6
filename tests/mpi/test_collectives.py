"""Reduce-scatter, all-gather, broadcast, weighted mean and consensus on real ranks."""

import gc
import weakref

import numpy as np
import pytest
import torch

import hpctk
from hpctk.collectives.engine.consensus_weights import SCALES, ConsensusState
from hpctk.collectives.engine.elements import InPlace
from hpctk.collectives.engine.engine import engine_of
from hpctk.collectives.engine.plan_run import SCRATCH
from hpctk.errors import MismatchError, PeerError, SettingError, TensorError
from hpctk.schedules import bounds, build
from hpctk.schedules.core.registry import names

#: Awkward shapes: a scalar, fewer elements than ranks, more dimensions, several segments.
SHAPES = [(), (5,), (3, 4), (2, 2, 2), (200, 201)]


def tensors_of(rank, seed=0, dtype=torch.float64):
    generator = np.random.default_rng([seed, rank])
    return [torch.from_numpy(np.asarray(generator.standard_normal(shape))).to(dtype) for shape in SHAPES]


def everyone(world, seed=0):
    return [tensors_of(rank, seed) for rank in range(world.size)]


@pytest.mark.parametrize("schedule", ["ring", "rotation", "auto"])
@pytest.mark.parametrize("n", [0, 1, 3, 10, 50_001])
@pytest.mark.parametrize("op", ["mean", "sum", "max"])
def test_reduce_scatter(world, schedule, n, op):
    rows = np.stack([np.random.default_rng([n, rank]).standard_normal(n) for rank in range(world.size)])
    shard = hpctk.ops.reduce_scatter(torch.from_numpy(rows[world.rank]), op=op, schedule=schedule)
    lo, hi = world.rank * n // world.size, (world.rank + 1) * n // world.size
    np.testing.assert_allclose(shard.numpy(), getattr(rows, op)(0)[lo:hi], rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("schedule", ["ring", "rotation", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (300, 111)])
def test_allgather(world, schedule, dtype, shape):
    def of(rank):
        return torch.from_numpy(np.asarray(np.random.default_rng([3, rank]).integers(0, 2, shape))).to(dtype)

    result = hpctk.ops.allgather(of(world.rank), schedule=schedule)
    assert torch.equal(result, torch.stack([of(rank) for rank in range(world.size)]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e5m2, torch.bool], ids=str)
@pytest.mark.parametrize("n", [0, 1, 100_003])
def test_broadcast_from_every_root(world, dtype, n):
    for root in range(world.size):
        given = torch.full((n,), float(world.rank + 1)).to(dtype)
        result = hpctk.ops.broadcast(given, root=root)
        assert torch.equal(result.float(), torch.full((n,), float(root + 1)).to(dtype).float())


def test_broadcast_from_nowhere(world):
    with pytest.raises(SettingError, match=f"0 to {world.size - 1}"):
        hpctk.ops.broadcast(torch.ones(3), root=world.size)


@pytest.mark.parametrize("call", [hpctk.ops.allgather, hpctk.ops.broadcast, hpctk.ops.reduce_scatter])
def test_disagreement(world, call):
    if world.size < 2:
        pytest.skip("one rank cannot disagree")
    with pytest.raises(MismatchError, match="shape"):
        call(torch.ones(3 + (world.rank == 1)))


@pytest.mark.parametrize("kind", ["allreduce", "reduce_scatter", "allgather", "broadcast"])
def test_counted_bytes_equal_the_volume_of_the_plan(world, kind):
    # As many elements as make all blocks equal, so that the closed form in blocks is exact in bytes.
    counter = engine_of(world).counter
    for schedule in names(kind, with_nodes=True):
        plan = build(schedule, kind, world.size, nodes=world.nodes)
        n = 6000 * plan.blocks
        per_rank = n // world.size if kind == "allgather" else n
        before = counter.sent_bytes, counter.received_bytes, counter.calls
        getattr(hpctk, kind)(torch.ones(per_rank), schedule=schedule)
        sent = counter.sent_bytes - before[0]
        received = counter.received_bytes - before[1]
        rows = [list(plan.rounds(rank)) for rank in range(world.size)]
        mine = rows[world.rank]
        per_block = 4 * n // plan.blocks
        assert sent == per_block * sum(len(send.blocks) for step in mine for send in step.sends)
        assert received == per_block * sum(len(recv.blocks) for step in mine for recv in step.recvs)
        assert sent <= per_block * plan.volume.sent
        assert counter.calls == before[2] + 1


@pytest.mark.parametrize("schedule", names("allreduce", with_nodes=True))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_extra_memory_is_at_most_two_copies(world, schedule, dtype):
    from hpctk.collectives.engine.elements import elements
    from hpctk.comm.buffers import dtype_of

    flat = torch.ones(3_000_000, dtype=dtype)
    engine = engine_of(world)
    parts = elements(flat, dtype_of(flat), "sum")
    plan = build(schedule, "allreduce", world.size, nodes=world.nodes)
    run = engine.run(plan, parts)
    scratch = SCRATCH * engine.machine.segment_bytes
    # float32: scratch only. Shorter floats: a float32 copy, two copies' worth, and the scratch.
    copies = 2 if dtype == torch.bfloat16 else 0
    assert run.extra_bytes <= copies * flat.numel() * flat.element_size() + scratch
    assert dtype == torch.bfloat16 or run.extra_bytes <= 2 * flat.numel() * flat.element_size()


@pytest.mark.parametrize("per_tensor", [False, True])
@pytest.mark.parametrize("schedule", ["auto", "ring"])
def test_weighted_mean(world, per_tensor, schedule):
    table = np.random.default_rng(5).uniform(0.1, 2, (world.size, len(SHAPES) if per_tensor else 1))
    weight = table[world.rank].tolist() if per_tensor else float(table[world.rank, 0])
    result = hpctk.ops.weighted_mean(tensors_of(world.rank), weight, schedule=schedule)
    for k, tensor in enumerate(result):
        column = table[:, k if per_tensor else 0]
        wanted = sum(w * row[k] for w, row in zip(column, everyone(world), strict=True)) / column.sum()
        torch.testing.assert_close(tensor, wanted, rtol=1e-12, atol=1e-13)


def test_weight_zero_silences_a_rank_even_its_nans(world):
    if world.size < 2:
        pytest.skip("one rank has nobody to speak for it")
    mine = [torch.full((4,), float("nan") if world.rank == 0 else 2.0)]
    result = hpctk.ops.weighted_mean(mine, 0.0 if world.rank == 0 else 1.0)
    assert torch.equal(result[0], torch.full((4,), 2.0))


def test_no_weight_at_all_is_the_plain_mean(world):
    result = hpctk.ops.weighted_mean([torch.full((3,), float(world.rank))], 0.0)
    torch.testing.assert_close(result[0], torch.full((3,), (world.size - 1) / 2))


def test_bad_weight_is_refused_everywhere_by_rank(world):
    with pytest.raises(SettingError, match=f"rank {world.size - 1} gave"):
        hpctk.ops.weighted_mean([torch.ones(3)], float("nan") if world.rank == world.size - 1 else 1.0)


def two_pass(gradients, scale):
    """AdaCons as its authors do it, on all workers' flat gradients in one process."""
    g = np.stack(gradients)
    norms = np.linalg.norm(g, axis=1)
    alpha = g @ g.mean(0) / (norms + 1e-8)
    a = alpha / alpha.sum()
    w = a / (norms + 1e-8)
    if scale == "mean_norm":
        w = w * norms.mean()
    if scale == "coefficients":
        w = w / w.sum()
    return w @ g


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("layerwise", [False, True])
def test_consensus_equals_the_two_pass_way(world, scale, layerwise):
    # A common part, so that the gradients agree and the guard stays out of it.
    common = tensors_of(99)
    rows = [[c + 0.3 * t for c, t in zip(common, row, strict=True)] for row in everyone(world)]
    state = ConsensusState()
    result = hpctk.ops.adacons_aggregate(rows[world.rank], state, scale=scale, layerwise=layerwise)
    assert state.fallbacks == 0
    if layerwise:
        wanted = [two_pass([row[k].numpy().ravel() for row in rows], scale) for k in range(len(SHAPES))]
        found = [t.numpy().ravel() for t in result]
    else:
        wanted = [two_pass([np.concatenate([t.numpy().ravel() for t in row]) for row in rows], scale)]
        found = [np.concatenate([t.numpy().ravel() for t in result])]
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5 if world.size == 1 else 1e-10, atol=1e-12)
    world.agree("consensus", [("bits", b"".join(t.numpy().tobytes() for t in result).hex()[:200_000])])


def test_consensus_layerwise_with_one_tensor_is_modelwise(world):
    mine = [tensors_of(world.rank)[4] + 1]
    one = hpctk.ops.adacons_aggregate(mine, ConsensusState(), layerwise=True)[0]
    other = hpctk.ops.adacons_aggregate(mine, ConsensusState(), layerwise=False)[0]
    assert torch.equal(one, other)


def test_consensus_volume_is_one_allreduce(world):
    n = 6000 * world.size
    counter = engine_of(world).counter
    before = counter.sent_bytes
    hpctk.ops.adacons_aggregate([torch.ones(n)], ConsensusState())
    scalars = 2 * world.size * 8 * build("recursive_doubling", "allreduce", world.size).volume.sent
    gradient = 2 * (world.size - 1) * n * 4 // world.size
    assert gradient <= counter.sent_bytes - before <= gradient + scalars


def test_consensus_refuses_mixed_dtypes(world):
    with pytest.raises(TensorError, match="one dtype"):
        hpctk.ops.adacons_aggregate([torch.ones(2), torch.ones(2).double()], ConsensusState())


def test_shards_cover_everything(world):
    covered = [bounds(10, world.size, range(r, r + 1)) for r in range(world.size)]
    assert [i for lo, hi in covered for i in range(lo, hi)] == list(range(10))


def test_a_finished_run_does_not_keep_its_tensor(world):
    array = np.ones(1000, np.float32)
    parts = InPlace(array, 4, "float32")
    gone = weakref.ref(parts)
    engine_of(world).run(build("ring", "allreduce", world.size), parts)
    del parts
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("n", [20, 5000])
def test_scratch_is_no_longer_than_what_arrives(world, n):
    run = engine_of(world).run(build("ring", "allreduce", world.size), InPlace(np.ones(n, np.float32), 4, "float32"))
    assert run.extra_bytes <= 2 * 4 * n


@pytest.mark.parametrize("call", [hpctk.ops.allgather, hpctk.ops.broadcast, hpctk.ops.reduce_scatter, hpctk.allreduce])
def test_sparse_tensors_are_refused(world, call):
    with pytest.raises(TensorError, match="to_dense"):
        call(torch.eye(3).to_sparse())


def test_weights_that_are_no_numbers_are_an_error_everywhere(world):
    with pytest.raises(PeerError, match=f"failed on rank {world.size - 1}"):
        hpctk.ops.weighted_mean([torch.ones(3)], "x" if world.rank == world.size - 1 else 1.0)


def test_a_state_of_another_number_of_ranks_is_dropped(world, caplog):
    if world.size < 2:
        pytest.skip("one rank has no momentum")
    state = hpctk.ops.ConsensusState({group: np.ones(world.size + 1) for group in range(2)})
    hpctk.ops.adacons_aggregate([torch.ones(8), torch.ones(8)], state, layerwise=True)
    (said,) = caplog.messages
    assert "dropped" in said
    assert len(state.sorted_momentum[0]) == world.size
