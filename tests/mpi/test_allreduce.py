"""Sums of every kind of tensor, by every schedule, at every number of ranks."""

import numpy as np
import pytest
import torch
from fake_gpu import FakeCupyArray, fake_cuda, recorded_synchronisation

from hpctk.collectives.allreduce import allreduce, iallreduce
from hpctk.comm import buffers
from hpctk.errors import HpctkError, MismatchError, SettingError, TensorError
from hpctk.schedules.core.registry import names

SCHEDULES = ["mpi", "shared_memory", *names("allreduce", with_nodes=True)]


def values_of(rank, n, seed=0):
    """What `rank` contributes: the same wherever it is computed, so that expectations need no MPI."""
    return np.random.default_rng([seed, rank]).standard_normal(n)


def all_values(world, n, seed=0):
    return np.stack([values_of(rank, n, seed) for rank in range(world.size)])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("n", [0, 1, 2, 3, 7, 100, 40_001])
def test_float64_mean(world, schedule, n):
    result = allreduce(torch.from_numpy(values_of(world.rank, n)), schedule=schedule)
    np.testing.assert_allclose(result.numpy(), all_values(world, n).mean(0), rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_ranks_get_the_same_bits(world, schedule):
    result = allreduce(torch.from_numpy(values_of(world.rank, 70_001)).float(), schedule=schedule)
    world.agree("result", [("bits", result.numpy().tobytes().hex())])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_max(world, schedule):
    result = allreduce(torch.from_numpy(values_of(world.rank, 999)), op="max", schedule=schedule)
    np.testing.assert_array_equal(result.numpy(), all_values(world, 999).max(0))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_short_floats_are_summed_in_float32(world, schedule, dtype):
    # Small whole numbers: representable, and so are their sums in any order. A wrong type shows at once.
    mine = torch.from_numpy(np.random.default_rng([7, world.rank]).integers(-2, 3, 3001)).to(dtype)
    wanted = sum(torch.from_numpy(np.random.default_rng([7, rank]).integers(-2, 3, 3001)) for rank in range(world.size))
    result = allreduce(mine, op="sum", schedule=schedule)
    assert result.dtype == dtype
    assert torch.equal(result.float(), wanted.float())


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_means_of_short_floats_are_the_same_on_all_ranks(world, schedule, dtype):
    """A rank that is sent the sum gets it rounded, and must not come to another mean than the one that made it."""
    result = allreduce(torch.from_numpy(values_of(world.rank, 3001)).to(dtype), op="mean", schedule=schedule)
    world.agree("a mean", [("bits", result.view(torch.int16).numpy().tobytes().hex())])


def test_bfloat16_is_rounded_once_by_rotation(world):
    mine = torch.from_numpy(values_of(world.rank, 5000)).bfloat16()
    everyone = [torch.from_numpy(row).bfloat16().float() for row in all_values(world, 5000)]
    result = allreduce(mine, op="sum", schedule="rotation")
    exact = torch.stack(everyone).double().sum(0)
    # Half a unit in the last of 8 bits, and a little for float32.
    assert torch.all((result.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
def test_integers(world, dtype):
    mine = torch.arange(1000).remainder(10).to(dtype) + world.rank
    wanted = torch.arange(1000).remainder(10) * world.size + sum(range(world.size))
    assert torch.equal(allreduce(mine, op="sum").long(), wanted)
    assert torch.equal(allreduce(mine, op="sum", schedule="ring").long(), wanted)


def test_large_int64_is_exact(world):
    mine = torch.tensor([2**53 + 1 + world.rank])
    assert allreduce(mine, op="sum").item() == sum(2**53 + 1 + rank for rank in range(world.size))


@pytest.mark.parametrize("schedule", ["mpi", "ring", "rotation"])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex(world, schedule, dtype):
    mine = torch.complex(*(torch.from_numpy(values_of(world.rank, 501, seed)) for seed in (1, 2))).to(dtype)
    wanted = (all_values(world, 501, 1) + 1j * all_values(world, 501, 2)).mean(0)
    for given, expected in ((mine, wanted), (mine.conj(), wanted.conj())):
        np.testing.assert_allclose(
            allreduce(given, schedule=schedule).resolve_conj().numpy(), expected, rtol=2e-5, atol=1e-6
        )


@pytest.mark.parametrize("schedule", ["mpi", "ring"])
@pytest.mark.parametrize(
    "layout",
    [
        lambda a: a.reshape(4, 6),
        lambda a: torch.from_numpy(np.asfortranarray(a.reshape(4, 6).numpy())),
        lambda a: torch.stack([a, a], 1)[:, 0],
        lambda a: a[0].clone(),
        lambda a: a.clone().requires_grad_(),
        lambda a: a.reshape(2, 3, 4).permute(2, 0, 1),
        lambda a: a[:1].expand(24),
    ],
    ids=["2-d", "Fortran", "strided", "0-d", "requires_grad", "permuted", "expanded"],
)
def test_layouts(world, schedule, layout):
    mine = layout(torch.from_numpy(values_of(world.rank, 24)))
    before = mine.detach().clone()
    wanted = sum(layout(torch.from_numpy(row)).detach() for row in all_values(world, 24)) / world.size
    result = allreduce(mine, schedule=schedule)
    torch.testing.assert_close(result, wanted)
    assert torch.equal(mine.detach(), before)
    assert not result.requires_grad


def test_ranks_may_lay_the_same_tensor_out_differently(world):
    array = values_of(world.rank, 24).reshape(4, 6)
    mine = np.asfortranarray(array) if world.rank % 2 else array
    result = allreduce(mine, schedule="ring")
    np.testing.assert_allclose(result, all_values(world, 24).mean(0).reshape(4, 6))


def test_read_only_input(world):
    array = values_of(world.rank, 10)
    array.flags.writeable = False
    np.testing.assert_allclose(allreduce(array), all_values(world, 10).mean(0))


@pytest.mark.parametrize(
    ("tensor", "op", "words"),
    [
        (torch.ones(3, dtype=torch.bool), "sum", "bool"),
        (torch.ones(3, dtype=torch.int64), "mean", "mean of int64"),
        (torch.ones(3, dtype=torch.complex64), "max", "complex"),
        (np.array(["a"]), "sum", "cannot send"),
        (np.ones(3, ">f4"), "sum", "swapped"),
        (np.ones(3, np.longdouble), "sum", "cannot send"),
        (torch.eye(3).to_sparse(), "sum", "to_dense"),
        (torch.empty(3, device="meta"), "sum", "meta"),
        ([1.0, 2.0], "sum", "list"),
    ],
    ids=["bool", "int mean", "complex max", "strings", "byte order", "longdouble", "sparse", "meta", "list"],
)
def test_refused_with_a_clear_message(world, tensor, op, words):
    with pytest.raises(TensorError, match=words):
        allreduce(tensor, op=op)
    world.barrier("after a refusal nobody waits")


@pytest.mark.parametrize(
    ("odd", "words"),
    [(torch.ones(6), r"\(5,\).*\(6,\)"), (torch.ones(5).double(), "float32.*float64"), (torch.ones(5, 1), "shape")],
)
def test_ranks_that_disagree(world, odd, words):
    if world.size < 2:
        pytest.skip("one rank cannot disagree")
    with pytest.raises(MismatchError, match=words):
        allreduce(odd if world.rank == world.size - 1 else torch.ones(5))


def test_unknown_schedule_lists_the_known(world):
    with pytest.raises(SettingError, match="ring.*rotation"):
        allreduce(torch.ones(3), schedule="star")


def test_unknown_op(world):
    with pytest.raises(SettingError, match="mean, sum, max"):
        allreduce(torch.ones(3), op="median")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_counts_above_the_limit_go_in_chunks(world, schedule, monkeypatch):
    monkeypatch.setattr(buffers, "COUNT_LIMIT", 96)
    result = allreduce(torch.from_numpy(values_of(world.rank, 1001)), schedule=schedule)
    np.testing.assert_allclose(result.numpy(), all_values(world, 1001).mean(0), rtol=1e-14, atol=1e-15)


def test_several_in_flight_waited_for_in_any_order(world):
    tensors = [torch.from_numpy(values_of(world.rank, 3000 + i, i)).float() for i in range(20)]
    schedules = [SCHEDULES[i % len(SCHEDULES)] for i in range(20)]
    handles = [iallreduce(t, schedule=s) for t, s in zip(tensors, schedules, strict=True)]
    order = list(range(20)) if world.rank % 2 else list(reversed(range(20)))
    for i in order:
        np.testing.assert_allclose(
            handles[i].wait().numpy(), all_values(world, 3000 + i, i).mean(0), rtol=1e-4, atol=1e-6
        )


def test_a_handle_is_waited_for_once(world):
    handle = iallreduce(torch.ones(100), schedule="ring")
    handle.wait()
    with pytest.raises(HpctkError, match="already"):
        handle.wait()


@pytest.mark.parametrize("gpu_aware", [False, True])
@pytest.mark.parametrize("schedule", ["mpi", "ring", "rotation"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_device_tensors(world, monkeypatch, gpu_aware, schedule, dtype):
    monkeypatch.setattr(world.stager, "gpu_aware", gpu_aware)
    mine = fake_cuda(torch.from_numpy(values_of(world.rank, 5000)).to(dtype))
    with recorded_synchronisation(monkeypatch) as synchronised:
        result = allreduce(mine, schedule=schedule)
    wanted = torch.stack([torch.from_numpy(row).to(dtype).float() for row in all_values(world, 5000)]).mean(0)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(torch.Tensor(result).float(), wanted, rtol=tolerance, atol=tolerance)
    assert synchronised, "MPI looked before the stream was synchronised"
    if not gpu_aware or schedule == "mpi":
        assert len(world.stager.staging._free) >= 1, "the host buffer is kept for the next tensor"


def test_staging_memory_is_reused(world, monkeypatch):
    monkeypatch.setattr(world.stager, "gpu_aware", False)
    world.stager.staging._free.clear()
    with recorded_synchronisation(monkeypatch):
        for n in (1000, 900, 1000, 10):
            allreduce(fake_cuda(torch.ones(n)), schedule="ring")
    assert [buffer.numel() for buffer in world.stager.staging._free] == [4000]


def test_foreign_device_arrays(world, monkeypatch):
    mine = FakeCupyArray(values_of(world.rank, 64))
    with recorded_synchronisation(monkeypatch):
        result = allreduce(mine)
    np.testing.assert_allclose(np.asarray(result), all_values(world, 64).mean(0))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_the_mean_of_short_floats_is_formed_in_float32(world, schedule, dtype):
    # Partial sums that every dtype here holds exactly, a mean that it need not.
    mine = torch.full((40_000,), 2.0 if world.rank else 4.0).to(dtype)
    wanted = torch.full((40_000,), (2.0 * world.size + 2.0) / world.size).to(dtype)
    assert torch.equal(allreduce(mine, schedule=schedule).float(), wanted.float())


def test_max_keeps_nan(world):
    for n in (world.size, 50_000):
        mine = torch.zeros(n)
        mine[world.rank] = float("nan")
        result = allreduce(mine, op="max")
        assert torch.isnan(result[: world.size]).all()
        assert not torch.isnan(result[world.size :]).any()


@pytest.mark.parametrize("schedule", names("allreduce", with_nodes=True))
def test_messages_longer_than_the_window(world, schedule):
    # More segments in one message than a run looks ahead, each above the eager limit of shared memory.
    from hpctk.collectives.engine.elements import InPlace
    from hpctk.collectives.engine.engine import engine_of
    from hpctk.collectives.engine.plan_run import WINDOW
    from hpctk.schedules import build

    plan = build(schedule, "allreduce", world.size, nodes=world.nodes)
    segment = 8192
    array = np.full(plan.blocks * (WINDOW + 100) * segment // 4, float(world.rank + 1), np.float32)
    engine_of(world).run(plan, InPlace(array, 4, "float32"), segment_bytes=segment)
    assert np.all(array == sum(range(1, world.size + 1)))


def test_tags_are_not_used_twice_at_once(world):
    # One long all-reduce under way while as many short ones as there are lanes come and go.
    from hpctk.collectives.engine.engine import LANES

    long = iallreduce(torch.full((3_000_000,), float(world.rank)), schedule="rotation")
    for i in range(LANES + 2):
        short = allreduce(torch.full((5000,), float(i)), schedule="ring")
        assert torch.all(short == i)
    assert torch.all(long.wait() == (world.size - 1) / 2)


def test_runs_go_on_while_a_rank_waits_in_a_handshake(world):
    big, small = torch.full((3_000_000,), 1.0), torch.ones(3)
    first = iallreduce(big, schedule="ring")
    if world.rank == 0:
        # Waits for the others, which are in the next handshake already.
        first.wait()
        second = iallreduce(small, schedule="ring")
    else:
        second = iallreduce(small, schedule="ring")
        first.wait()
    assert torch.equal(second.wait(), small)
