"""PowerSGD over several ranks: two all-reduces, the mean conserved, the leading directions found."""

import threading

import pytest
import torch
from compressor_cases import bits

from hpctk.compressors import PowerSGD
from hpctk.compressors.power_sgd import next_start, orthonormal
from hpctk.errors import HpctkError, SettingError, TensorError

SHAPES = {
    "conv.weight": (12, 3, 3, 3),
    "conv.bias": (12,),
    "fc.weight": (10, 40),
    "small": (3, 2),
    "scalar": (),
    "empty": (0, 5),
}


class Ranks:
    """All ranks as threads, with an all-reduce in rank order that they meet in."""

    def __init__(self, size):
        self.size = size
        self.barrier = threading.Barrier(size, timeout=20)
        self.given = [None] * size
        self.calls = [0] * size
        self.sizes = []

    def allreduce(self, rank):
        def mean(flat):
            assert flat.dim() == 1
            self.calls[rank] += 1
            self.given[rank] = flat
            self.barrier.wait()
            total = sum(self.given[1:], self.given[0].clone())
            self.barrier.wait()
            if rank == 0:
                self.sizes.append(flat.numel())
            # May write into what it is given.
            return flat.copy_(total / self.size)

        return mean

    def run(self, work):
        """Return work(rank, allreduce) of every rank, or the exception it raised."""
        results = [None] * self.size

        def one(rank):
            try:
                results[rank] = work(rank, self.allreduce(rank))
            except Exception as error:
                results[rank] = error
                if not isinstance(error, HpctkError):
                    self.barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


def gradients(rank, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def aggregate_over(size, given, rank=2, compressors=None, ranks=None):
    compressors = compressors or [PowerSGD(rank) for _ in range(size)]
    return (ranks or Ranks(size)).run(lambda r, allreduce: compressors[r].aggregate(given[r], allreduce))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [1, 3])
def test_what_all_send_and_what_all_keep_add_up_to_the_mean(size, dtype):
    before = [gradients(rank, dtype) for rank in range(size)]
    left = [{name: tensor.clone() for name, tensor in given.items()} for given in before]
    compressors = [PowerSGD(2) for _ in range(size)]
    for _ in range(2):
        ranks = Ranks(size)
        results = aggregate_over(size, left, compressors=compressors, ranks=ranks)
        assert ranks.calls == [2] * size
        for name in SHAPES:
            tolerance = 8 * torch.finfo(dtype).eps
            mean = sum(given[name].double() for given in before) / size
            kept = sum(given[name].double() for given in left) / size
            torch.testing.assert_close(results[0][name].double() + kept, mean, rtol=tolerance, atol=4 * tolerance)
            for result in results:
                assert bits(result[name]) == bits(results[0][name])
                assert result[name].dtype == dtype
                assert result[name].shape == SHAPES[name]
        for given in left:
            assert not given["conv.bias"].any()
            assert not given["small"].any()
        before = [{name: tensor.clone() for name, tensor in given.items()} for given in left]


def test_what_this_rank_sent_and_kept_is_what_it_had():
    given = gradients(0)
    left = {name: tensor.clone() for name, tensor in given.items()}
    # Alone, the mean is one's own part.
    result = PowerSGD(2).aggregate(left, lambda flat: flat)
    for name in SHAPES:
        torch.testing.assert_close(result[name] + left[name], given[name], rtol=1e-6, atol=1e-6)
    # A projection: what is left is orthogonal to what was sent.
    assert abs((result["fc.weight"] * left["fc.weight"]).sum()) < 1e-3
    assert torch.linalg.matrix_rank(result["fc.weight"]) == 2


def test_everything_travels_in_two_all_reduces():
    ranks = Ranks(2)
    aggregate_over(2, [gradients(0), gradients(1)], ranks=ranks)
    rows_and_rest = 2 * (12 + 10) + 12 + 6 + 1
    columns = 2 * (27 + 40)
    assert ranks.sizes == [rows_and_rest, columns]


def test_spared_matrices_travel_as_they_are():
    for compressor in (PowerSGD(2, exclude=["fc.*"]), PowerSGD(2, min_elements=401)):
        given = gradients(0)
        before = given["fc.weight"].clone()
        assert torch.equal(compressor.aggregate(given, lambda flat: flat)["fc.weight"], before)
        assert not given["fc.weight"].any()


def test_dtypes_are_grouped():
    ranks = Ranks(2)

    def mixed(rank):
        return {
            "a": torch.ones(8, 9) * rank,
            "b": torch.ones(8, 9, dtype=torch.float64),
            "c": torch.ones(3, dtype=torch.bfloat16),
            "d": torch.ones(2, dtype=torch.float64),
        }

    results = aggregate_over(2, [mixed(0), mixed(1)], ranks=ranks)
    assert ranks.sizes == [2 * 8 + 3, 2 * 9, 2 * 8 + 2, 2 * 9]
    assert list(results[0]) == ["a", "b", "c", "d"]
    assert results[1]["c"].dtype == torch.bfloat16
    torch.testing.assert_close(results[0]["a"], torch.full((8, 9), 0.5))


def test_without_matrices_one_all_reduce_is_enough():
    ranks = Ranks(2)
    results = aggregate_over(2, [{"b": torch.zeros(3)}, {"b": torch.ones(3)}], ranks=ranks)
    assert ranks.sizes == [3]
    assert results[0]["b"].tolist() == [0.5] * 3
    assert PowerSGD().aggregate({}, lambda flat: pytest.fail("nothing to send")) == {}
    assert PowerSGD().aggregate({"e": torch.zeros(0)}, lambda flat: pytest.fail("nothing to send"))["e"].shape == (0,)


def test_steps_find_the_leading_directions():
    generator = torch.Generator().manual_seed(0)
    u, _ = torch.linalg.qr(torch.randn(30, 4, generator=generator))
    v, _ = torch.linalg.qr(torch.randn(50, 4, generator=generator))
    matrix = u @ torch.diag(torch.tensor([9.0, 7.0, 2.0, 1.0])) @ v.T
    compressor = PowerSGD(2)
    for _ in range(30):
        result = compressor.aggregate({"w": matrix.clone()}, lambda flat: flat)["w"]
    # Eckart and Young: what remains of the best approximation are the smaller singular values.
    assert torch.linalg.matrix_norm(matrix - result) == pytest.approx(5**0.5, rel=1e-4)


@pytest.mark.parametrize("scale", [0.0, 1e-44, 1e-30, 1e-10, 1e30], ids=str)
def test_no_scale_of_gradients_gives_nan(scale):
    given = {"w": torch.ones(20, 30) * scale}
    given["w"][3] *= -1
    before = given["w"].clone()
    compressor = PowerSGD(2)
    for _ in range(3):
        result = compressor.aggregate(given, lambda flat: flat)["w"]
        assert torch.allclose(result + given["w"], before, rtol=1e-5, atol=0)
        assert given["w"].isfinite().all()
        given = {"w": before.clone()}
    assert compressor.state_dict()["w"]["q"].isfinite().all()


def test_a_gradient_of_zeros_does_not_lose_the_start():
    compressor = PowerSGD(1)
    matrix = torch.zeros(20, 30)
    compressor.aggregate({"w": matrix.clone()}, lambda flat: flat)
    # Only its last row is not zero: a start that had turned into unit vectors would miss it for ever.
    matrix[-1] = 1.0
    result = compressor.aggregate({"w": matrix.clone()}, lambda flat: flat)["w"]
    torch.testing.assert_close(result, matrix, rtol=1e-5, atol=1e-6)


def test_each_matrix_is_orthonormalised_alone():
    for shape in ((20, 1), (20, 3)):
        p = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(orthonormal(p).T @ orthonormal(p), torch.eye(shape[1]))
    alone = PowerSGD(1).aggregate({"a": gradients(0)["fc.weight"]}, lambda flat: flat)["a"]
    both = {"a": gradients(0)["fc.weight"], "b": 100 * gradients(1)["fc.weight"]}
    torch.testing.assert_close(PowerSGD(1).aggregate(both, lambda flat: flat)["a"], alone)


def test_starts_are_scaled_and_zero_columns_keep_the_last():
    q = torch.tensor([[0.0, 4.0], [0.0, -8.0]])
    assert next_start(q, torch.ones(2, 2)).tolist() == [[1, 0.5], [1, -1]]


def test_a_bad_gradient_is_refused_before_anything_is_sent():
    given = gradients(0)
    given["fc.weight"][1, 1] = float("nan")
    before = {name: bits(tensor) for name, tensor in given.items()}
    with pytest.raises(TensorError, match=r"'fc\.weight': element 41"):
        PowerSGD().aggregate(given, lambda flat: pytest.fail("nothing may be sent"))
    assert {name: bits(tensor) for name, tensor in given.items()} == before


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_what_is_beyond_the_range_is_refused_by_all_ranks_together(dtype):
    """A sum of columns like these is out of range; only rank 1 has them."""
    limit = torch.finfo(dtype).max
    generator = torch.Generator().manual_seed(4)
    wild = torch.where(torch.rand(40, 60, generator=generator) < 0.5, limit, -limit).to(dtype)
    given = [{"w": torch.ones(40, 60, dtype=dtype)}, {"w": wild}]
    before = [bits(each["w"]) for each in given]
    compressors = [PowerSGD(2), PowerSGD(2)]
    results = aggregate_over(2, given, compressors=compressors)
    assert [type(result) for result in results] == [TensorError, TensorError]
    assert str(results[0]) == str(results[1])
    assert [bits(each["w"]) for each in given] == before
    assert compressors[0].state_dict() == compressors[1].state_dict() == {}


def test_layouts_and_gradients_are_taken_as_they_are():
    plain, turned = gradients(0)["fc.weight"], gradients(0)["fc.weight"].T.contiguous().T
    one = PowerSGD(2).aggregate({"w": plain}, lambda flat: flat)["w"]
    other = PowerSGD(2).aggregate({"w": turned}, lambda flat: flat)["w"]
    torch.testing.assert_close(one, other)
    torch.testing.assert_close(plain, turned)
    with pytest.raises(TensorError, match="expanded"):
        PowerSGD().aggregate({"w": torch.ones(1).expand(20, 20)}, lambda flat: flat)


def test_compressing_alone_agrees_with_aggregating_alone():
    tensor = gradients(0)["conv.weight"]
    packet, result = PowerSGD(2), PowerSGD(2)
    for _ in range(3):
        decoded = packet.decompress(packet.compress(tensor, "w"))
        torch.testing.assert_close(decoded, result.aggregate({"w": tensor.clone()}, lambda flat: flat)["w"])
    assert torch.equal(packet.state_dict()["w"]["q"], result.state_dict()["w"]["q"])


def test_the_start_is_saved_and_loaded():
    first = PowerSGD(2)
    first.aggregate(gradients(0), lambda flat: flat)
    state = first.state_dict()
    assert set(state) == {"conv.weight", "fc.weight"}
    second = PowerSGD(2, seed=99)
    second.load_state_dict(state)
    state["fc.weight"]["q"].zero_()
    one, other = gradients(0, seed=1), gradients(0, seed=1)
    results = [c.aggregate(g, lambda flat: flat) for c, g in ((first, one), (second, other))]
    for name in SHAPES:
        assert bits(results[0][name]) == bits(results[1][name])


@pytest.mark.parametrize(
    "entry",
    [
        {},
        {"p": torch.zeros(3, 2)},
        {"q": torch.zeros(3, 2), "more": 1},
        {"q": 3},
        {"q": torch.zeros(3, 1)},
        {"q": torch.zeros(6)},
        {"q": torch.zeros(3, 2, dtype=torch.int64)},
        {"q": torch.full((3, 2), float("nan"))},
    ],
    ids=str,
)
def test_states_that_make_no_sense_are_refused(entry):
    with pytest.raises(HpctkError, match="'w'"):
        PowerSGD(2).load_state_dict({"w": entry})


def test_a_start_of_another_shape_is_refused_when_used():
    compressor = PowerSGD(2)
    compressor.load_state_dict({"w": {"q": torch.ones(7, 2)}})
    with pytest.raises(TensorError, match="shape"):
        compressor.compress(torch.ones(20, 30), "w")


@pytest.mark.parametrize("rank", [0, -1, 1.5, True, "2"], ids=repr)
def test_ranks_out_of_range_are_refused(rank):
    with pytest.raises(SettingError, match="rank="):
        PowerSGD(rank)
