"""examples/train_lightning.py and train_accelerate.py as their readers start them, with the real packages."""

import re
import shutil

import pytest
from jobs import ROOT, run, torchrun

EXAMPLES = {name: str(ROOT / "examples" / f"train_{name}.py") for name in ("lightning", "accelerate")}
#: Ranks may write into one line.
SAID = re.compile(r"rank \d: (\d+) steps, loss ([\d.]+) to ([\d.]+), sent (\d+) bytes, model ([0-9a-f]{64})")


def trained(name, folder, *words):
    """Return what both ranks say: steps, first and last loss, bytes, digest of the model; and all the output."""
    ended = run(torchrun(2, EXAMPLES[name], "--folder", str(folder), *words), timeout_s=150, cwd=folder.parent)
    assert ended.code == 0, ended.output
    found = SAID.findall(ended.output)
    assert len(found) == 2, ended.output
    said = [(int(steps), float(first), float(last), int(sent), model) for steps, first, last, sent, model in found]
    return said, ended.output


@pytest.fixture(scope="module", params=EXAMPLES)
def runs(request, tmp_path_factory):
    """Return the trainer's name, what a training of two epochs said, and the folder of one of a single epoch."""
    folder = tmp_path_factory.mktemp(request.param)
    straight, _ = trained(request.param, folder / "straight", "--epochs", "2")
    trained(request.param, folder / "parts", "--epochs", "1")
    return request.param, straight, folder / "parts"


def test_a_resumed_training_comes_to_the_same_bits(runs):
    name, straight, parts = runs
    shutil.copytree(parts, parts.with_name("resumed"))
    resumed, _ = trained(name, parts.with_name("resumed"), "--epochs", "2", "--resume")
    assert len({one[-1] for one in (*straight, *resumed)}) == 1, "both ranks, straight and resumed"
    assert {one[0] for one in (*straight, *resumed)} == {16}
    assert all(last < first for _, first, last, _, _ in straight)
    dense_bytes = 4 * (16 * 64 + 64 + 64 * 4 + 4)
    assert all(0 < sent < 16 * dense_bytes / 2 for _, _, _, sent, _ in straight)


@pytest.mark.parametrize("runs", ["lightning"], indirect=True)
def test_without_residuals_lightning_says_so(runs):
    """And comes to other bits: else the test above would pass for the wrong reason."""
    name, straight, parts = runs
    shutil.rmtree(parts / "last.ckpt.hpctk")
    resumed, output = trained(name, parts, "--epochs", "2", "--resume")
    assert "without residuals or whatever else SAEF keeps" in output
    assert resumed[0][-1] != straight[0][-1]


def test_lightning_clips_what_all_ranks_have_come_to(tmp_path):
    job = ROOT / "tests" / "ddp" / "clipped_lightning.py"
    ended = run(torchrun(2, str(job)), timeout_s=150, cwd=tmp_path)
    assert ended.code == 0, ended.output
    said = re.findall(r"rank (\d): (\S+) apart, (\d) clipped", ended.output)
    assert sorted(rank for rank, _, _ in said) == ["0", "0", "1", "1"], ended.output
    assert all(float(far) < 1e-14 and clipped == "3" for _, far, clipped in said), ended.output
