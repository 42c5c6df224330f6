"""What a checkpoint costs: saving and loading against a plain write of the same bytes, synced too.

Start it with `./launch/bench checkpoint --hosts 0 --ranks 2`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import _rig
import numpy as np
import torch

import hpctk
from hpctk.cli.core.table import bytes_text, seconds_text, table
from hpctk.comm.world import world


def main() -> None:
    parser = _rig.parser()
    parser.add_argument("--elements", type=float, default=25e6)
    parser.add_argument("--folder", type=Path, default=None, help="where to write [a temporary folder]")
    options = parser.parse_args()

    here = world()
    home = Path(here.run_on_root("making a folder", lambda: tempfile.mkdtemp(dir=options.folder)))
    rows = int(options.elements) // 1000
    model = torch.nn.Linear(1000, rows, bias=False)
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    opt = hpctk.DistributedOptimizer(base, hpctk.Mean(hpctk.TopK(0.01)), model=model)
    model.weight.grad = torch.randn_like(model.weight)
    opt.step()
    hpctk.save_checkpoint(home / "kept", opt, model)
    nbytes = next((home / "kept").glob(f"*/rank-{here.rank:05}.h5")).stat().st_size
    data = np.random.default_rng(here.rank).integers(0, 256, nbytes, np.uint8)

    def plain() -> None:
        target = home / f"plain-{here.rank}"
        with open(target, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    runs = {
        "plain": plain,
        "save": lambda: hpctk.save_checkpoint(home / "kept", opt, model),
        "load": lambda: hpctk.load_checkpoint(home / "kept", opt, model),
    }
    times = _rig.measure(here, runs, options.repeats)
    here.barrier()
    if here.rank == 0:
        shutil.rmtree(home)
        ratios = {name: seconds / times["plain"] for name, seconds in times.items()}
        shown = [[name, seconds_text(times[name]), f"{ratios[name]:.2f}"] for name in runs]
        print(f"{rows * 1000} parameters, {here.size} ranks, {bytes_text(nbytes)} each")
        print(table(["what", "seconds", "over plain"], shown))
        _rig.write(
            options.json,
            [
                {"name": name, "seconds": times[name], "ratio": ratios[name], "ranks": here.size, "bytes": nbytes}
                for name in runs
            ],
        )


if __name__ == "__main__":
    main()
