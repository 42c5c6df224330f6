"""Names of earlier versions still work for a release, and say what they are called now."""

import pytest

import hpctk


def test_there_are_few_public_names():
    # A method or a compressor brings one more; nothing else should.
    offered = {*hpctk.methods.METHODS, *(kind.__name__ for kind in hpctk.compressors.COMPRESSORS.values())}
    assert len(set(hpctk.__all__) - offered) <= 14


@pytest.mark.parametrize("name", hpctk._RENAMED)
def test_a_renamed_function(name):
    with pytest.warns(DeprecationWarning, match=f"hpctk.{name} is hpctk.{hpctk._RENAMED[name]} now"):
        function = getattr(hpctk, name)
    assert function is getattr(hpctk.ops, hpctk._RENAMED[name].removeprefix("ops."))
    assert name not in hpctk.__all__


def test_the_setting_feedback():
    with pytest.warns(DeprecationWarning, match="error_feedback= now"):
        method = hpctk.Mean(hpctk.TopK(0.1), feedback=False)
    assert method.error_feedback is False
    assert "feedback" not in method.settings()
    assert hpctk.Mean().error_feedback


def test_every_exception_is_public():
    for name in ("HpctkError", "SettingError", "TensorError", "MismatchError", "PeerError", "Stopped"):
        assert issubclass(getattr(hpctk, name), BaseException)
        assert name in hpctk.__all__
