"""Ranks of a job that is to outlive ranks fail, all at the same moment: the job ends, and says with what."""

import sys
import textwrap

import pytest
from jobs import run

HPCTK = [sys.executable, "-m", "hpctk", "mpirun", "--with-ft", "-n"]
#: Where they abort at once half of the jobs of two ranks do not end: one of ten without the mend by chance.
JOBS = 4
PROGRAMS = {
    "all know hpctk": (
        "python",
        """
        import sys
        from hpctk.comm.world import world
        here = world()
        here.expect_losses()
        here.barrier("leaving")
        sys.exit(85)
        """,
        85,
    ),
    "none has come to it": (
        "python",
        """
        from mpi4py import MPI
        MPI.COMM_WORLD.Barrier()
        import nonexistent
        """,
        1,
    ),
    "hpctk run": (
        "hpctk run",
        """
        from mpi4py import MPI
        MPI.COMM_WORLD.Barrier()
        raise ValueError
        """,
        1,
    ),
}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", PROGRAMS)
def test_all_ranks_fail_at_once(kind, ranks, tmp_path):
    starter, program, status = PROGRAMS[kind]
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(program))
    for number in range(JOBS if ranks == 2 else 1):
        ended = run([*HPCTK, str(ranks), *starter.split(), str(script)], timeout_s=60)
        assert ended.code == status, (number, ended.output)


def test_who_fails_alone_ends_the_job_soon(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        "from hpctk.comm.world import world\nhere = world()\nhere.expect_losses()\nhere.barrier('beginning')\n"
        "if here.rank == 3:\n    raise ValueError('alone')\nhere.decide(done=True)\n"
    )
    ended = run([*HPCTK, "4", "python", str(script)], timeout_s=60)
    assert ended.code == 1, ended.output
    assert "ValueError: alone" in ended.output
    assert ended.seconds < 30
