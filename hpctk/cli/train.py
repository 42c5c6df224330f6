"""Train a bundled job on the ranks of this MPI job, and say what it cost.

Examples:
  mpirun -n 4 python -m mpi4py -m hpctk train digits
  mpirun -n 2 python -m mpi4py -m hpctk train digits --epochs 5 --schedule rotation --json result.json
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from hpctk.cli.progress import Progress
from hpctk.cli.table import bytes_text, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options; None means the task's own default."""
    parser.add_argument("task", choices=["digits"], help="digits: 1797 handwritten digits, bundled")
    parser.add_argument("--epochs", type=int, help="passes over the data [20]")
    parser.add_argument("--batch", type=int, help="images per rank and step [16]")
    parser.add_argument("--lr", type=float, help="learning rate [0.1]")
    parser.add_argument("--seed", type=int, help="of the model and of the order of the data [1]")
    parser.add_argument("--schedule", help="how gradients are averaged; hpctk schedule list shows all [ring]")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the result of every rank to FILE")


def run(options: argparse.Namespace) -> int:
    """Train, then print the table on rank 0. Collective over COMM_WORLD."""
    from hpctk.tasks.train import RANGES, Settings, train_digits
    from hpctk.world import world

    given = {name: getattr(options, name) for name in (*RANGES, "schedule")}
    settings = Settings(**{name: value for name, value in given.items() if value is not None})
    here = world()
    bar = Progress(f"digits on {here.size} ranks") if here.rank == 0 else None

    def on_step(step: int, total: int, loss: float) -> None:
        if bar is not None:
            bar.step(step, total, f"loss {loss:.3f}")

    result = train_digits(here, settings, on_step)
    everyone = [
        json.loads(text) for text in here.gather_texts(json.dumps(asdict(result)), "gathering the results")
    ]
    document = {"ranks": here.size, "settings": asdict(settings), "results": everyone}
    if options.json is not None:
        target: Path = options.json
        here.run_on_root(
            "writing the result", lambda: target.write_text(json.dumps(document, indent=2) + "\n")
        )
    if here.rank == 0:
        sent = [one["sent_bytes"] for one in everyone]
        shown = "MPI does not tell" if None in sent else bytes_text(max(sent))
        head = ["method", "accuracy", "seconds", "steps", "sent per rank"]
        row = [result.method, f"{result.accuracy:.1%}", f"{result.seconds:.1f}", str(result.steps), shown]
        print(table(head, [row]))
    return 0
