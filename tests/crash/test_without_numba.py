"""Training without numba comes to the recorded digests, as with it."""

import pytest
from jobs import ROOT, mpirun, run

#: One of each kind of kernel: selected, quantised, signs, halves, sparse sums, updates.
CASES = "topk or qsgd or sign or half or saef or sasg"


@pytest.mark.full
def test_golden_digests_at_two_ranks():
    words = ["python", "-m", "mpi4py", "-m", "pytest", "--with-mpi", "-q", "tests/mpi/test_golden.py"]
    path = f"{ROOT}/tests/support/without_numba:{ROOT}"
    ended = run(mpirun(2, *words, "-k", f"over_mpi and ({CASES})"), 400, PYTHONPATH=path)
    assert ended.code == 0, ended.output
    assert " passed" in ended.output
