"""torchrun and the optimizer that goes by MPI: every process would train a model of its own, in silence."""

import textwrap

from jobs import run, torchrun

PROGRAM = """
    import torch
    import hpctk

    model = torch.nn.Linear(3, 1)
    opt = hpctk.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), hpctk.Mean(), model=model)
    model(torch.ones(1, 3)).sum().backward()
    opt.step()
    print("trained")
"""


def test_it_is_refused_and_says_what_to_use(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(PROGRAM))
    ended = run(torchrun(2, str(script)), timeout_s=90)
    assert ended.code != 0
    assert "trained" not in ended.output
    assert "torchrun started 2 processes (WORLD_SIZE), but MPI's COMM_WORLD has 1 rank" in ended.output
    assert "hpctk.ddp.DistributedOptimizer" in ended.output
