"""Saving and loading a checkpoint against plain files of the same bytes, in one run, interleaved.

Start it with `./launch/bench checkpoint --hosts 0 --ranks 2`; it runs as an MPI job on one machine. Every rank has
parameters, momentum and the residuals of Mean(TopK). The plain way writes those arrays one after the other (tofile)
and synchronises the file; as a save does, it keeps the last two. Reading is from memory: the files have just been
written.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path

import _rig
import numpy as np
import torch

import hpctk
from hpctk.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from hpctk.cli.table import bytes_text, seconds_text, table
from hpctk.world import world


class Job:
    """A model in the middle of its training, and its bytes as plain files."""

    def __init__(self, here, n, tensors, folder):
        self.here, self.folder = here, folder
        rows = np.array_split(np.arange(n), tensors)
        generator = torch.Generator().manual_seed(here.rank)
        self.model = torch.nn.ParameterDict(
            {
                f"layer{i}": torch.nn.Parameter(torch.randn(len(row), generator=generator))
                for i, row in enumerate(rows)
            }
        )
        base = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.opt = hpctk.DistributedOptimizer(base, hpctk.Mean(hpctk.TopK(0.01)), model=self.model)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        self.opt.step()
        residuals = self.opt.local_state_dict()["residuals"].values()
        momentum = [state["momentum_buffer"] for state in base.state.values()]
        self.tensors = [x.detach().numpy() for x in (*self.model.parameters(), *momentum, *residuals)]
        self.nbytes = sum(x.nbytes for x in self.tensors)
        self.written = []

    def save(self):
        save_checkpoint(self.folder / "checkpoints", self.opt, self.model)

    def load(self):
        load_checkpoint(self.folder / "checkpoints", self.opt, self.model)

    def plain_write(self):
        target = self.folder / f"plain-{self.here.rank}-{len(self.written)}"
        with open(target, "wb") as file:
            for array in self.tensors:
                array.tofile(file)
            file.flush()
            os.fsync(file.fileno())
        self.written.append(target)
        if len(self.written) > 2:
            self.written[-3].unlink()

    def plain_read(self):
        with open(self.written[-1], "rb") as file:
            for array in self.tensors:
                np.copyto(array, np.fromfile(file, array.dtype, array.size))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--elements", type=float, default=25e6)
    parser.add_argument("--tensors", type=int, default=160)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write; a temporary one where not given")
    parser.add_argument("--only", help="names of contenders, with commas")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    here = world()
    # Ranks share the machine's cores.
    torch.set_num_threads(1)
    folder = Path(here.run_on_root("making a folder", lambda: tempfile.mkdtemp(dir=options.folder)))
    try:
        job = Job(here, int(options.elements), options.tensors, folder)
        runs = {
            "plain write": job.plain_write, "save": job.save, "plain read": job.plain_read, "load": job.load
        }  # fmt: skip
        seconds = _rig.measure(here, _rig.only(runs, options.only), options.repeats)
        nbytes = -here.minimum([-job.nbytes], "bench")[0]
        if here.rank == 0:
            show(here, nbytes, seconds, options)
    finally:
        here.barrier("the end of the benchmark")
        if here.rank == 0:
            shutil.rmtree(folder)


def show(here, nbytes, seconds, options):
    rivals = {"save": "plain write", "load": "plain read"}
    entries = []
    for name, value in seconds.items():
        rival = seconds.get(rivals.get(name, name), value)
        entries.append(
            {
                "name": name,
                "seconds": value,
                "times_the_plain_way": value / rival,
                "ranks": here.size,
                "bytes_per_rank": nbytes,
                "bytes_per_second": here.size * nbytes / value,
            }  # fmt: skip
        )
    print(
        f"{options.elements:.3g} float32 in {options.tensors} tensors, {here.size} ranks, {bytes_text(nbytes)} each"
    )
    rows = [
        [
            e["name"],
            seconds_text(e["seconds"]),
            f"{e['times_the_plain_way']:.2f}",
            bytes_text(e["bytes_per_second"]),
        ]
        for e in entries
    ]
    print(table(["contender", "median", "x plain", "per second"], rows), flush=True)
    if options.json:
        options.json.write_text(json.dumps(entries, indent=2) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("NUMBA_NUM_THREADS", "1")
    main()
