"""The bundled tasks by themselves: data, orders, verdicts; expected values by plain numpy."""

import gzip
import math

import idx_files
import numpy as np
import pytest
import torch

from hpctk.errors import HpctkError, SettingError
from hpctk.methods.mean import Mean
from hpctk.methods.saef import SAEF
from hpctk.tasks import fashion
from hpctk.tasks.core.result import Curve, mean_curve
from hpctk.tasks.digits import Digits, DigitsSettings
from hpctk.tasks.fashion import Fashion, FashionSettings
from hpctk.tasks.lm import LanguageModel, LanguageModelSettings, manual
from hpctk.tasks.regression import Regression, RegressionSettings


def loaded(task):
    task.load()
    return task


class Places(Digits):
    """Digits whose batches are the places of the images."""

    def pick(self, indices):
        return indices.tolist()


def seen(task, ranks, epoch, first=0):
    """Return the places that an epoch shows from sample `first` on, step by step, rank by rank."""
    step = task.step_samples(ranks)
    starts = range(first, task.samples - step + 1, step)
    return [place for done in starts for rank in range(ranks) for place in task.batch(rank, ranks, epoch, done)]


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_an_epoch_shows_every_image_at_most_once(ranks):
    task = loaded(Places(DigitsSettings(batch=16)))
    places = seen(task, ranks, 0)
    assert len(set(places)) == len(places) == task.samples // (16 * ranks) * 16 * ranks
    assert places != seen(task, ranks, 1)


def test_another_number_of_ranks_goes_on_with_the_images_that_were_not_seen():
    task = loaded(Places(DigitsSettings(batch=10)))
    before, after = seen(task, 4, 0)[:400], seen(task, 3, 0, first=400)
    assert not set(before) & set(after)
    assert len(before) + len(after) > task.samples - 30


def test_a_seed_decides_model_and_order():
    tasks = [loaded(Places(DigitsSettings(seed=seed))) for seed in (1, 1, 2)]
    state = torch.random.get_rng_state()
    models = [torch.cat([p.flatten() for p in task.model().parameters()]) for task in tasks]
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(models[0], models[1])
    assert not torch.equal(models[0], models[2])
    assert tasks[0].batch(0, 2, 0, 0) == tasks[1].batch(0, 2, 0, 0) != tasks[2].batch(0, 2, 0, 0)


def test_too_few_samples_for_one_step():
    with pytest.raises(SettingError, match="batch=1000: 2 ranks need 2000 samples for one step, there are 1497"):
        loaded(Digits(DigitsSettings(batch=1000))).check(2, Mean())


@pytest.mark.parametrize("packed", [True, False], ids=["gzip", "plain"])
def test_fashion_reads_a_folder(tmp_path, packed):
    folder = idx_files.write(tmp_path / "data", packed=packed)
    task = loaded(Fashion(FashionSettings(data=str(folder))))
    images, labels = idx_files.images_and_labels(480, 480)
    assert task.samples == 480
    shown, named = task.pick(torch.tensor([3, 7]))
    np.testing.assert_allclose(shown.numpy()[:, 0], (images[[3, 7]] / 255 - 0.2860) / 0.3530, rtol=1e-5, atol=1e-6)
    assert named.tolist() == labels[[3, 7]].tolist()


@pytest.mark.parametrize(("model", "parameters"), [("mlp", 203_530), ("cnn", 105_866)])
def test_fashion_networks(tmp_path, model, parameters):
    folder = idx_files.write(tmp_path / "data", packed=False)
    task = loaded(Fashion(FashionSettings(data=str(folder), model=model)))
    network = task.model()
    assert sum(p.numel() for p in network.parameters()) == parameters
    verdict = task.evaluate(network.eval())
    with torch.no_grad():
        scores = network(task.test.images.float().sub(0.2860 * 255).div(0.3530 * 255).unsqueeze(1))
    chances = scores.softmax(1)[torch.arange(60), task.test.labels]
    assert verdict["test loss"] == pytest.approx(float(-chances.log().mean()), rel=1e-4)
    assert verdict["accuracy"] == pytest.approx(float((scores.argmax(1) == task.test.labels).float().mean()))


def test_a_missing_file_says_both_ways_to_get_it(tmp_path):
    with pytest.raises(HpctkError, match="no train-images-idx3-ubyte or .*--data DIR.*apt-get install dataset-fashion"):
        loaded(Fashion(FashionSettings(data=str(tmp_path))))


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("train-labels-idx1-ubyte", idx_files.idx(np.zeros(479)), "480 train images and 479 labels"),
        ("train-labels-idx1-ubyte", idx_files.idx(np.full(480, 10)), "train label 10, allowed are 0 to 9"),
        ("t10k-images-idx3-ubyte", idx_files.idx(np.zeros((60, 8, 8))), "t10k images of 8x8 pixels, need 28x28"),
        ("t10k-images-idx3-ubyte", gzip.compress(b"\0\0\x08\x03", mtime=0)[:-2], "damaged or cut short"),
    ],
)
def test_files_that_do_not_fit_together(tmp_path, name, content, wanted):
    folder = idx_files.write(tmp_path / "data", packed=False)
    (folder / name).write_bytes(content)
    with pytest.raises(HpctkError, match=wanted):
        loaded(Fashion(FashionSettings(data=str(folder))))


@pytest.mark.skipif(
    not fashion.DEBIAN.is_dir(), reason="not installed: Fashion-MNIST (apt-get install dataset-fashion-mnist)"
)
def test_the_real_data():
    task = loaded(Fashion(FashionSettings()))
    assert (len(task.train.labels), len(task.test.labels)) == (60_000, 10_000)
    assert torch.bincount(task.train.labels).tolist() == [6000] * 10
    # What `prepared` subtracts and divides by.
    pixels = task.train.images.double() / 255
    assert (float(pixels.mean()), float(pixels.std())) == pytest.approx((0.2860, 0.3530), abs=1e-4)


def test_the_language_model_sees_each_byte_but_the_held_out(tmp_path):
    text = bytes(i * 7 % 251 for i in range(1001))
    (tmp_path / "text").write_bytes(text)
    task = loaded(LanguageModel(LanguageModelSettings(data=str(tmp_path / "text"), window=10)))
    assert (task.samples, task.windows) == (90, 100)
    windows = task.pick(torch.arange(90))
    assert bytes(windows[:, :-1].flatten().tolist()) == text[:900]
    assert bytes(windows[:, 1:].flatten().tolist()) == text[1:901]


def test_bits_per_byte_of_a_model_that_knows_nothing(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(256)) * 8)
    task = loaded(LanguageModel(LanguageModelSettings(data=str(tmp_path / "text"), window=16)))

    def indifferent(text):
        return torch.zeros(*text.shape, 256)

    verdict = task.evaluate(indifferent)
    assert verdict == pytest.approx({"bits per byte": 8, "perplexity": 256}, rel=1e-5)


def test_a_text_that_is_too_short(tmp_path):
    (tmp_path / "text").write_bytes(b"short")
    with pytest.raises(HpctkError, match="text: 5 bytes, need at least 641 for windows of 64"):
        loaded(LanguageModel(LanguageModelSettings(data=str(tmp_path / "text"))))


def test_the_manual_is_there():
    assert len(manual()) > 300_000
    assert b'The "import" statement' in manual()


def test_regression_is_judged_by_the_expected_loss():
    task = loaded(Regression(RegressionSettings()))
    model = task.model()
    w = model.weight.detach().numpy()[0].astype(np.float64)
    assert (w.min() > -5) & (w.max() < 5) & (w.std() > 2.5)
    x = np.random.default_rng(0).random((4000, 1000))
    losses = 0.5 * (x @ w) ** 2
    spread = losses.std() / math.sqrt(len(losses))
    assert task.evaluate(model)["expected loss"] == pytest.approx(losses.mean(), abs=5 * spread)


def test_regression_draws_fresh_data_for_every_rank_and_step():
    task = loaded(Regression(RegressionSettings(global_batch=8)))
    assert task.samples // task.step_samples(4) == 500
    batches = [task.batch(rank, 2, 0, done) for rank in (0, 1) for done in (0, 16)]
    assert batches[0].shape == (2, 4, 1000)
    assert all(float(one.min()) >= 0 and float(one.max()) <= 1 for one in batches)
    assert len({float(one.sum()) for one in batches}) == 4
    assert torch.equal(batches[0], task.batch(0, 2, 0, 0))


def test_regression_refuses_what_it_cannot_do():
    with pytest.raises(SettingError, match="global_batch=128: need a multiple of the 3 ranks"):
        loaded(Regression(RegressionSettings())).check(3, Mean())
    import hpctk

    method = SAEF(hpctk.TopK(0.1))
    with pytest.raises(SettingError, match="step_size='oracle' needs .*SAEF does not. Give --step-size fixed"):
        loaded(Regression(RegressionSettings())).check(2, method)
    loaded(Regression(RegressionSettings(step_size="fixed"))).check(2, method)


def test_a_curve_is_means_of_equal_numbers_of_steps():
    curve = Curve(every=2)
    for step in range(1, 6):
        curve.add(step, step / 10, step * 100, float(step))
    assert (curve.steps, curve.losses, curve.sent_bytes) == ([2, 4], [1.5, 3.5], [200, 400])
    assert (curve.pending, curve.last_loss) == ([5.0], 3.5)


def test_the_mean_curve_has_the_points_that_all_ranks_share():
    one = {"steps": [2, 4, 6], "seconds": [1.0, 2.0, 3.0], "sent_bytes": [10, 20, 30], "losses": [3.0, 2.0, 1.0]}
    two = {"steps": [2, 4], "seconds": [1.5, 1.8], "sent_bytes": [8, 22], "losses": [5.0, 0.0]}
    assert mean_curve([one, two]) == {
        "steps": [2, 4], "seconds": [1.5, 2.0], "sent_bytes": [10, 22], "losses": [4.0, 1.0]
    }  # fmt: skip
    assert mean_curve([one, {**two, "steps": [3, 5]}]) == one
