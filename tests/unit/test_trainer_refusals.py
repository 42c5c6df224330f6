"""What Lightning and Accelerate cannot do with a method is refused with the reason."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from jobs import clean_environment

import hpctk
from hpctk.errors import SettingError


def strategy(optimizers=1, method=None):
    made = hpctk.lightning.Strategy(hpctk.Mean() if method is None else method)
    made._optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1) for _ in range(optimizers)]
    return made


@pytest.mark.parametrize(
    ("optimizers", "automatic", "clip", "words"),
    [
        (2, True, None, "2 optimizers: hpctk.lightning.Strategy takes one"),
        (1, False, None, "automatic_optimization=False"),
        (1, True, 0.5, r"gradient_clip_val=0.5: SAEF exchanges no gradients.* hpctk.CELGC or hpctk.EPISODE"),
    ],
)
def test_what_lightning_cannot(optimizers, automatic, clip, words):
    trainer, module = SimpleNamespace(gradient_clip_val=clip), SimpleNamespace(automatic_optimization=automatic)
    with pytest.raises(SettingError, match=words):
        strategy(optimizers, hpctk.SAEF(hpctk.TopK(0.1)))._check(trainer, module)


def test_a_strategy_needs_a_method():
    with pytest.raises(SettingError, match="need a method such as"):
        hpctk.lightning.Strategy("saef")


def test_accelerate_needs_an_accelerator_and_objects_with_a_state():
    with pytest.raises(SettingError, match="need an accelerate.Accelerator"):
        hpctk.accelerate.keep(object(), None, None)
    with pytest.raises(SettingError, match="rates=3: need an object with state_dict"):
        hpctk.accelerate.keep(object(), None, None, rates=3)


def test_without_lightning_the_extra_is_named():
    program = "import sys; sys.modules['lightning'] = None\nimport hpctk\nhpctk.lightning\n"
    done = subprocess.run(
        [sys.executable, "-c", program], env=clean_environment(), capture_output=True, text=True, timeout=60
    )
    assert "pip install 'hpctk[lightning]'" in done.stderr
