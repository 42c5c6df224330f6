"""A torch without FSDP2 is named, where hpctk.fsdp is asked for."""

import sys

import pytest
import torch
import torch.distributed.fsdp

import hpctk
from hpctk.errors import SettingError


def test_a_torch_without_fsdp2_is_named(monkeypatch):
    monkeypatch.delattr(torch.distributed.fsdp, "FSDPModule", raising=False)
    monkeypatch.delitem(sys.modules, "hpctk.fsdp", raising=False)
    monkeypatch.delitem(vars(hpctk), "fsdp", raising=False)
    with pytest.raises(SettingError, match=f"needs FSDP2.*torch {torch.__version__.split('+')[0]}"):
        _ = hpctk.fsdp.attach
