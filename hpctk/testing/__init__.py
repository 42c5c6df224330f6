"""A test-kit for methods, compressors and schedules of other packages: the invariants that hpctk's own are held to.

    from hpctk.testing import check_compressor, check_method, check_schedule

    def test_threshold():
        check_compressor(lambda: Threshold(0.05))

    def test_local_clip():
        check_method("localclip", norm=0.5)

Each raises AssertionError with what does not hold. They need no test framework, and no MPI.
"""

from __future__ import annotations

from hpctk.testing.compressors import check_compressor
from hpctk.testing.methods import check_method
from hpctk.testing.schedules import check_schedule

__all__ = ["check_compressor", "check_method", "check_schedule"]
