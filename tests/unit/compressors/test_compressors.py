"""Compressors as their users see them: settings, names, draws, state, residuals, devices."""

import ast
import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from compressor_cases import DTYPES, MAKERS, bits
from fake_gpu import fake_cuda
from jobs import clean_environment

import hpctk
from hpctk import compressors
from hpctk.collectives.compressed_mean import EXCHANGES
from hpctk.compressors import QSGD, ChunkTopK, Half, Identity, PowerSGD, RandomK, Residuals, Sign, TopK, by_name
from hpctk.compressors.core import draws
from hpctk.compressors.core.compressor import COMBINES
from hpctk.errors import HpctkError, SettingError, TensorError

KEYS = list(MAKERS)


def normal(*shape, seed=5, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# Settings.


@pytest.mark.parametrize(
    ("make", "word"),
    [
        *((lambda d=d: TopK(d), "density=") for d in (0, -0.1, 1.1, float("nan"), "0.1", True, None)),
        (lambda: RandomK(0), "density=0"),
        (lambda: TopK(0.1, keep=1), "keep="),
        (lambda: Half("float32"), "dtype='float32'"),
        (lambda: Half(16), "float16, bfloat16"),
        (lambda: ChunkTopK(5, 4), "k=5: need at most chunk=4"),
        (lambda: ChunkTopK(0), "k=0"),
        (lambda: ChunkTopK(codebook="mean"), "sigma, signed"),
        (lambda: QSGD(1), "bits=1"),
        (lambda: QSGD(9), "2 to 8"),
        (lambda: QSGD(4.0), "bits="),
        (lambda: QSGD(bucket=0), "bucket=0"),
        (lambda: QSGD(bucket=True), "bucket="),
        *((lambda s=s: RandomK(0.5, seed=s), "seed=") for s in (-1, 2**64, 0.5, True)),
        (lambda: QSGD(seed=-1), "seed=-1"),
        (lambda: PowerSGD(seed="a"), "seed='a'"),
        (lambda: Identity(exclude="*.bias"), "exclude="),
        (lambda: Identity(exclude=[1]), "exclude="),
        (lambda: Sign(min_elements=-1), "min_elements=-1"),
        (lambda: Sign(min_elements=1.0), "min_elements="),
    ],
)  # fmt: skip
def test_settings_out_of_range_are_refused(make, word):
    with pytest.raises(SettingError, match=word.replace(".", r"\.")):
        make()


def test_settings_are_complete_and_can_be_written_down():
    compressor = QSGD(3, bucket=64, seed=7, exclude=["*.bias", "head"], min_elements=10)
    expected = {
        "compressor": "QSGD", "bits": 3, "bucket": 64, "seed": 7, "exclude": ["*.bias", "head"], "min_elements": 10,
    }  # fmt: skip
    assert json.loads(json.dumps(compressor.settings())) == expected
    for make in MAKERS.values():
        one = make()
        values = dict(one.settings())
        assert values.pop("compressor") == type(one).__name__
        assert type(one)(**values).settings() == one.settings()


def test_names_show_what_differs_from_the_default():
    assert repr(TopK(0.01)) == "TopK(0.01)"
    assert repr(TopK(0.01, keep=True)) == "TopK(0.01, keep=True)"
    assert repr(Identity()) == "Identity()"
    assert repr(Half("bfloat16", min_elements=5)) == "Half(dtype='bfloat16', min_elements=5)"
    assert repr(Sign(exclude=["a"])) == "Sign(exclude=('a',))"


def test_spared_by_name_size_and_kind():
    compressor = Sign(exclude=["head.weight", "*.bias", "norm[12].*"], min_elements=10)
    big = torch.zeros(10)
    spared = [name for name in ("head.weight", "a.bias", "norm1.w", "norm3.w", "a.weight", "bias", "HEAD.weight")
              if compressor.is_excluded(name, big)]  # fmt: skip
    assert spared == ["head.weight", "a.bias", "norm1.w"]
    assert compressor.is_excluded("a.weight", torch.zeros(9))
    assert compressor.is_excluded("a.weight", torch.zeros(10, dtype=torch.int64))
    assert not Sign().is_excluded("a.bias", torch.zeros(0))
    # A name that looks like a pattern is still a name.
    assert Sign(exclude=["blocks[0]"]).is_excluded("blocks[0]", big)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("topk:0.01", "TopK(0.01)"),
        ("topk:1", "TopK(1.0)"),
        ("chunktopk:32", "ChunkTopK(k=32)"),
        ("randomk:1e-3", "RandomK(0.001)"),
        ("sign", "Sign()"),
        ("qsgd:8", "QSGD(bits=8)"),
        ("qsgd", "QSGD()"),
        ("powersgd:4", "PowerSGD(rank=4)"),
        ("powersgd", "PowerSGD()"),
        ("half", "Half()"),
        ("half:bfloat16", "Half(dtype='bfloat16')"),
        ("identity", "Identity()"),
    ],
)
def test_by_name(text, shown):
    assert repr(by_name(text)) == shown


@pytest.mark.parametrize("text", ["", "top", "TopK:0.1", "topk 0.1", ":0.1", "none"])
def test_unknown_names_are_refused_with_what_is_known(text):
    with pytest.raises(SettingError) as caught:
        by_name(text)
    for form in ("identity", "half[:float16|bfloat16]", "topk:DENSITY", "qsgd[:BITS]", "powersgd[:RANK]", "sign"):
        assert form in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["topk", "topk:", "topk:x", "topk:0", "topk:2", "sign:1", "sign:", "identity:", "qsgd:", "qsgd:9", "qsgd:4.5",
     "half:float32", "half:", "powersgd:0", "randomk", "topk:0.1:0.2", "topk:nan"],
)  # fmt: skip
def test_wrong_values_are_refused_with_what_is_allowed(text):
    with pytest.raises(SettingError, match=f"{text.partition(':')[0]}.*allowed is"):
        by_name(text)


def test_every_compressor_is_registered_and_says_how_it_combines():
    assert set(compressors.COMPRESSORS.values()) == {type(make()) for make in MAKERS.values()}
    assert {name: kind.combines for name, kind in compressors.COMPRESSORS.items()} == {
        "identity": "summed", "half": "summed", "topk": "pairs", "chunktopk": "lists", "randomk": "summed",
        "sign": "signs", "qsgd": "gathered", "powersgd": "own",
    }  # fmt: skip


def test_what_a_compressor_declares_has_a_way_to_be_exchanged():
    assert set(EXCHANGES) == set(COMBINES)
    with pytest.raises(TypeError, match="Odd.combines must be one of summed, gathered"):
        type("Odd", (compressors.Compressor,), {"combines": "gatherd"})


def test_nobody_asks_of_which_class_a_compressor_is():
    """What a compressor is treated like is what it declares: a new one needs no change outside compressors/."""
    root = Path(hpctk.__file__).parent
    kinds = {kind.__name__ for kind in compressors.COMPRESSORS.values()} | {"SparseCompressor"}
    asked = []
    for path in root.rglob("*.py"):
        if path.is_relative_to(root / "compressors"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass"):
                looked_at = node.args[1:]
            elif isinstance(node, ast.Compare):
                # Of a class itself, or of its name.
                looked_at = [node.left, *node.comparators]
            elif isinstance(node, ast.MatchClass):
                looked_at = [node.cls]
            else:
                continue
            for part in (sub for item in looked_at for sub in ast.walk(item)):
                name = getattr(part, "id", getattr(part, "attr", getattr(part, "value", None)))
                if isinstance(name, str) and name in kinds:
                    asked.append(f"{path.relative_to(root)}:{node.lineno} asks for {name}")
    assert asked == []


def test_importing_compressors_does_not_import_numba():
    program = "import sys, hpctk.compressors; assert 'numba' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=clean_environment(), timeout=60
    )
    assert done.returncode == 0, done.stderr


# Draws.


def test_no_global_generator_is_touched():
    def states():
        return random.getstate(), str(np.random.get_state()), bits(torch.get_rng_state())

    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    before = states()
    for make in MAKERS.values():
        compressor, residual = make(), torch.zeros(20, 30)
        compressor.decompress(compressor.compress(normal(20, 30), "a"))
        compressor.feed(normal(20, 30), residual, "a")
    PowerSGD().aggregate({"w": normal(20, 30)}, lambda flat: flat)
    assert states() == before


@pytest.mark.parametrize("key", KEYS)
def test_two_alike_do_alike_whatever_the_global_seed(key):
    packets = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        compressor = MAKERS[key]()
        packets.append([compressor.compress(normal(20, 30), name) for name in ("a", "b", "a")])
    for one, other in zip(*packets, strict=True):
        assert bits(one.data) == bits(other.data)
        assert one.stamp == other.stamp


def test_random_k_takes_the_same_indices_on_every_rank():
    ranks = [RandomK(0.1, seed=3) for _ in range(3)]
    for rank, compressor in enumerate(ranks):
        compressor.set_rank(rank)
    seen = []
    for step in range(3):
        given = [normal(50, seed=10 * step + rank) for rank in range(3)]
        packets = [c.compress(g, "w") for c, g in zip(ranks, given, strict=True)]
        assert len({packet.stamp for packet in packets}) == 1
        total = compressors.Packet(
            sum(packet.data for packet in packets), packets[0].shape, packets[0].dtype, packets[0].stamp
        )
        mask = ranks[0].decompress(packets[0]) != 0
        assert mask.sum() == 5
        for compressor in ranks:
            torch.testing.assert_close(compressor.decompress(total), sum(given) * mask)
        seen.append(mask)
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


def test_random_k_differs_by_name_and_seed():
    one = RandomK(0.1)
    packets = {name: one.compress(torch.ones(1000), name) for name in ("a", "b")}
    masks = [one.decompress(packet) for packet in packets.values()]
    masks.append(RandomK(0.1, seed=1).decompress(packets["a"]))
    assert not any(torch.equal(x, y) for x, y in ((masks[0], masks[1]), (masks[0], masks[2])))
    # An older packet is still read as it was written.
    one.compress(torch.ones(1000), "a")
    assert torch.equal(one.decompress(packets["a"]), masks[0])


def test_random_k_counts_calls_that_raise():
    good, bad = RandomK(0.5), RandomK(0.5)
    good.compress(torch.ones(8), "w")
    with pytest.raises(TensorError):
        bad.compress(torch.full((8,), float("nan")), "w")
    assert good.compress(torch.ones(8), "w").stamp == bad.compress(torch.ones(8), "w").stamp


@pytest.mark.parametrize(("k", "n"), [(0, 0), (1, 1), (3, 10), (5, 10), (6, 10), (10, 10), (2, 1000), (900, 1000)])
def test_subsets_are_uniform(k, n):
    counts = np.zeros(n)
    rounds = 1500
    for draw in range(rounds):
        chosen = draws.subset(draws.stream(1, draws.stamp("w", draw)), k, n)
        assert len(chosen) == k
        assert (np.diff(chosen) > 0).all()
        counts[chosen] += 1
    share = k / n if n else 0
    # Six standard deviations.
    assert (abs(counts - rounds * share) <= 6 * np.sqrt(rounds * share * (1 - share)) + 1e-9).all()


def test_subsets_are_pairwise_uniform():
    counts = np.zeros((6, 6))
    for draw in range(5000):
        chosen = draws.subset(draws.stream(2, draws.stamp("w", draw)), 3, 6)
        counts[np.ix_(chosen, chosen)] += 1
    pairs = counts[~np.eye(6, dtype=bool)] / 5000
    assert abs(pairs - 0.2).max() < 6 * np.sqrt(0.2 * 0.8 / 5000)


def test_the_streams_are_what_they_always_were():
    """Checkpoints and mixed clusters depend on them: a change here is a change of the format."""
    assert draws.stamp("w", 3) == 476252946 << 32 | 3
    assert draws.stream(7, draws.stamp("w", 3), rank=2).random_raw(2).tolist() == [
        12887369486670379235,
        16010242602617005116,
    ]
    assert draws.subset(draws.stream(0, draws.stamp("layer", 0)), 5, 100).tolist() == [14, 26, 44, 74, 78]


def test_qsgd_is_unbiased():
    tensor = normal(64)
    compressor = QSGD(3, bucket=32)
    rounds = 3000
    decoded = torch.stack([compressor.decompress(compressor.compress(tensor, "w")) for _ in range(rounds)])
    # The rounding's standard deviation is at most half a level.
    level = tensor.reshape(2, 32).norm(dim=1).repeat_interleave(32) / 3
    assert ((decoded.mean(0) - tensor).abs() <= 6 * level / 2 / rounds**0.5).all()
    # Each value is one of the two levels around it.
    assert ((decoded - tensor).abs() <= level * (1 + 1e-6)).all()


def test_qsgd_draws_anew_by_rank_call_and_name():
    seated = []
    for rank in range(2):
        compressor = QSGD()
        compressor.set_rank(rank)
        seated.append(compressor)
    tensor = normal(1000)
    packets = [seated[0].compress(tensor, "w"), seated[0].compress(tensor, "w"), seated[0].compress(tensor, "v")]
    packets.append(seated[1].compress(tensor, "w"))
    assert len({bits(packet.data) for packet in packets}) == 4


def test_qsgd_keeps_what_is_exact_exact():
    tensor = torch.zeros(512)
    tensor[100] = -3.0
    for width in range(2, 9):
        assert torch.equal(QSGD(width).decompress(QSGD(width).compress(tensor)), tensor)


# State.


@pytest.mark.parametrize("key", KEYS)
def test_a_restarted_compressor_goes_on_where_it_was(key):
    first = MAKERS[key]()
    for name in ("a", "b", "a"):
        first.compress(normal(20, 30), name)
    second = MAKERS[key]()
    second.load_state_dict(first.state_dict())
    assert str(second.state_dict()) == str(first.state_dict())
    for name in ("a", "b", "c"):
        assert bits(first.compress(normal(20, 30), name).data) == bits(second.compress(normal(20, 30), name).data)


def test_draws_are_counted_by_name():
    for compressor in (RandomK(0.5), QSGD()):
        for name in ("a", "b", "a"):
            compressor.compress(torch.ones(4), name)
        assert compressor.state_dict() == {"a": {"draws": 2}, "b": {"draws": 1}}


@pytest.mark.parametrize("entry", [{}, {"draw": 1}, {"draws": 1, "more": 1}, {"draws": -1}, {"draws": 0.5}], ids=str)
def test_wrong_states_are_refused(entry):
    for compressor in (RandomK(0.5), QSGD()):
        with pytest.raises(HpctkError, match="'w'"):
            compressor.load_state_dict({"w": entry})
    with pytest.raises(HpctkError, match=r"Sign\(\) remembers nothing"):
        Sign().load_state_dict({"w": entry})


def test_residuals_start_at_zero_and_stay():
    kept = Residuals()
    weight = normal(3, 4).T
    residual = kept.of("w", weight)
    assert residual.is_contiguous()
    assert residual.shape == (4, 3)
    assert not residual.any()
    residual += 1
    assert kept.of("w", weight) is residual
    assert kept.of("b", torch.zeros(2, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert kept.names() == ["w", "b"]
    assert kept.nbytes == 12 * 4 + 2 * 2


def test_residuals_refuse_another_shape_or_dtype():
    kept = Residuals()
    kept.of("w", torch.zeros(3))
    for like in (torch.zeros(4), torch.zeros(3, dtype=torch.float64), torch.zeros(3, 1)):
        with pytest.raises(TensorError, match=r"'w' is .*residual float32 \(3,\)"):
            kept.of("w", like)


def test_residuals_are_saved_and_loaded_as_copies():
    first, second = Residuals(), Residuals()
    packet = first.feed(TopK(0.1), "w", normal(30))
    assert TopK(0.1).decompress(packet).count_nonzero() == 3
    second.of("gone", torch.zeros(1))
    second.load_state_dict(first.state_dict())
    assert second.names() == ["w"]
    assert bits(second.of("w", torch.zeros(30))) == bits(first.of("w", torch.zeros(30)))
    first.of("w", torch.zeros(30)).zero_()
    assert second.of("w", torch.zeros(30)).any()
    for wrong in (3, torch.zeros(3, dtype=torch.int64)):
        with pytest.raises(TensorError, match="'w'"):
            second.load_state_dict({"w": wrong})
    assert second.names() == ["w"]


# Devices: the way through kernels.device gives the same bytes.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("key", KEYS)
def test_a_device_writes_the_same_bytes(key, dtype):
    here, there = MAKERS[key](), MAKERS[key]()
    for shape in ((), (0,), (7,), (20, 33)):
        tensor = normal(*shape, dtype=dtype)
        packet, other = here.compress(tensor), there.compress(fake_cuda(tensor.clone()))
        assert bits(packet.data) == bits(other.data.as_subclass(torch.Tensor))
        decoded = there.decompress(compressors.Packet(fake_cuda(packet.data), packet.shape, dtype, packet.stamp))
        assert torch.equal(decoded.as_subclass(torch.Tensor), here.decompress(packet))
        residual, left = torch.ones(shape, dtype=dtype), torch.ones(shape, dtype=dtype)
        packet = here.feed(tensor, residual)
        other = there.feed(fake_cuda(tensor.clone()), fake_cuda(left))
        assert bits(packet.data) == bits(other.data.as_subclass(torch.Tensor))
        assert bits(residual) == bits(left)


def test_a_device_refuses_what_is_not_finite():
    for make in MAKERS.values():
        residual = torch.ones(5)
        with pytest.raises(TensorError, match="'w': element 3 of 5"):
            make().feed(fake_cuda(torch.tensor([0.0, 1.0, 2.0, float("nan"), 4.0])), fake_cuda(residual), "w")
        assert residual.tolist() == [1] * 5
