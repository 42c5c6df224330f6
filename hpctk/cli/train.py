"""Train a bundled job on the ranks of this MPI job by one method or several, and say what it cost.

Examples:
  mpirun -n 4 python -m mpi4py -m hpctk train digits --method all
  mpirun -n 4 python -m mpi4py -m hpctk train digits --method saef --set compressor=sign --set server=sign
  mpirun -n 2 python -m mpi4py -m hpctk train digits --method mean:topk:0.01,celgc --epochs 5 --json result.json
  hpctk train --list-methods
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpctk.cli.progress import Progress
from hpctk.cli.table import bytes_text, table
from hpctk.errors import SettingError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options; None means the task's own default."""
    parser.add_argument(
        "task", nargs="?", choices=["digits"], help="digits: 1797 handwritten digits, bundled"
    )
    parser.add_argument("--method", default="mean", help="a method, several with commas, or all [mean]")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of the method; may be repeated",
    )
    parser.add_argument(
        "--list-methods", action="store_true", help="print all methods, one line each, and stop"
    )
    parser.add_argument("--epochs", type=int, help="passes over the data [20]")
    parser.add_argument("--batch", type=int, help="images per rank and step [16]")
    parser.add_argument("--lr", type=float, help="learning rate of SGD [0.1]")
    parser.add_argument("--momentum", type=float, help="momentum of SGD [0.9]")
    parser.add_argument("--seed", type=int, help="of the model and of the order of the data [1]")
    parser.add_argument(
        "--schedule", help="how dense tensors are averaged; hpctk schedule list shows all [ring]"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the result of every rank to FILE")


def run(options: argparse.Namespace) -> int:
    """Train, then print the table on rank 0. Collective over COMM_WORLD."""
    if options.list_methods:
        print(listed())
        return 0
    if options.task is None:
        raise SettingError("say what to train: hpctk train digits (or --list-methods)")
    from hpctk.tasks.recipes import readable, recipes
    from hpctk.tasks.train import RANGES, Settings, train_digits
    from hpctk.world import world

    given = {name: getattr(options, name) for name in (*RANGES, "schedule")}
    settings = Settings(**{name: value for name, value in given.items() if value is not None})
    chosen = recipes(options.method, overrides(options.set))
    methods = {recipe.name: readable(recipe.make()) for recipe in chosen}
    here = world()
    everyone: list[dict[str, Any]] = []
    for recipe in chosen:
        bar = Progress(f"{recipe.name} on {here.size} ranks") if here.rank == 0 else None

        def on_step(step: int, total: int, loss: float, bar: Progress | None = bar) -> None:
            if bar is not None:
                bar.step(step, total, f"loss {loss:.3f}")

        result = train_digits(here, settings, recipe, on_step)
        texts = here.gather_texts(json.dumps(asdict(result)), "gathering the results")
        everyone += [{"rank": rank, **json.loads(text)} for rank, text in enumerate(texts)]
    document = {
        "ranks": here.size, "settings": asdict(settings), "methods": methods, "results": everyone
    }  # fmt: skip
    if options.json is not None:
        target: Path = options.json
        here.run_on_root(
            "writing the result", lambda: target.write_text(json.dumps(document, indent=2) + "\n")
        )
    if here.rank == 0:
        print(shown(everyone))
    return 0


def overrides(texts: list[str]) -> dict[str, str]:
    """Return the settings that KEY=VALUE texts give."""
    pairs = [text.partition("=") for text in texts]
    for key, equals, _ in pairs:
        if not key or not equals:
            raise SettingError(f"--set {key}: need KEY=VALUE, such as --set period=16")
    return {key: value for key, _, value in pairs}


def listed() -> str:
    """Return all methods, one line each, and how compressors are written."""
    from hpctk.tasks.recipes import compressor_forms, summaries

    lines = [f"{name:<10} {summary}" for name, summary in summaries()]
    lines.append(f"{'all':<10} mean and the five methods, one after the other")
    return "\n".join(lines) + f"\n\nmean:COMPRESSOR averages with one of: {compressor_forms()}"


def shown(results: list[dict[str, Any]]) -> str:
    """Return a table with a line for each method."""
    by_method: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        by_method.setdefault(result["method"], []).append(result)
    rows = []
    for name, ranks in by_method.items():
        sent = [one["sent_bytes"] for one in ranks]
        rows.append(
            [
                name,
                f"{ranks[0]['accuracy']:.1%}",
                str(ranks[0]["steps"]),
                f"{sum(one['rounds'] for one in ranks) / len(ranks):.0f}",
                "MPI does not tell" if None in sent else bytes_text(max(sent)),
                f"{max(one['seconds'] for one in ranks):.1f}",
            ]
        )
    return table(["method", "accuracy", "steps", "rounds", "sent per rank", "seconds"], rows)
