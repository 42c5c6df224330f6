"""examples/train_ddp.py as its readers start it."""

import re

import pytest
from jobs import ROOT, run, torchrun

EXAMPLE = str(ROOT / "examples" / "train_ddp.py")


@pytest.mark.parametrize("method", ["topk", "mgrawa"])
def test_example(method):
    ended = run(torchrun(2, EXAMPLE, "--method", method, "--epochs", "8"), timeout_s=120)
    assert ended.code == 0, ended.output
    found = re.search(
        rf"{method} on 2 processes: accuracy ([\d.]+) after (\d+) steps, rank 0 sent (\d+) bytes", ended.output
    )
    assert found, ended.output
    accuracy, steps, sent = float(found[1]), int(found[2]), int(found[3])
    assert accuracy > 0.9
    # 1497 images in 2 shares of whole batches of 16.
    assert steps == 8 * (748 // 16)
    dense_bytes = 4 * (64 * 128 + 128 + 128 * 64 + 64 + 64 * 10 + 10)
    assert 0 < sent < steps * dense_bytes / 4
