"""What hpctk's own methods, compressors and schedules are held to. Needs the package to be installed."""

from hpctk_example.star import STAR
from hpctk_example.threshold import Threshold

from hpctk.testing import check_compressor, check_method, check_schedule


def test_threshold():
    check_compressor(Threshold)


def test_local_clip():
    check_method("localclip", norm=0.5)


def test_mean_with_threshold():
    check_method("mean", compressor="threshold:0.02")


def test_star():
    check_schedule(STAR)
