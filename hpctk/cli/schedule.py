"""Collective schedules: list them, draw one, or price them all. Starts no MPI.

Prices come from the calibration file where there is one (`hpctk calibrate`), else from the figures
of an ordinary 10 Gbit/s cluster.

Examples:
  hpctk schedule list
  hpctk schedule show ring --ranks 8
  hpctk schedule price --ranks 64 --bytes 100e6
  hpctk schedule price --ranks 65536 --bytes 1e9 --per-node 8 --json
  hpctk schedule price --kind sparse_allreduce --ranks 16 --bytes 100e6 --density 0.01
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from hpctk.cli.core.table import bytes_text, seconds_text, table
from hpctk.comm import environment
from hpctk.errors import SettingError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    commands = parser.add_subparsers(dest="what", metavar="list|show|price", required=True)
    one = commands.add_parser("list", help="all schedules, and what they are good for")
    one.add_argument("--json", action="store_true", help="print JSON")
    show = commands.add_parser("show", help="draw one as text: who sends which block to whom in every round")
    show.add_argument("name", help="a schedule; `hpctk schedule list` shows all")
    show.add_argument(
        "--kind",
        help="allreduce, reduce_scatter, allgather, broadcast, sparse_allreduce [the first it knows]",
    )
    price = commands.add_parser("price", help="rounds, volume and predicted time of every schedule")
    price.add_argument("--bytes", type=float, default=24e6, metavar="B", help="bytes of the tensor [24e6]")
    price.add_argument("--kind", default="allreduce", help="the collective [allreduce]")
    price.add_argument(
        "--density", type=float, default=0.01, metavar="D", help="of a sparse_allreduce of float32 [0.01]"
    )
    price.add_argument("--json", action="store_true", help="print JSON")
    for sub, ranks in ((show, 4), (price, 4)):
        sub.add_argument("--ranks", type=int, default=ranks, metavar="N", help=f"number of ranks [{ranks}]")
        sub.add_argument("--per-node", type=int, default=1, metavar="M", help="ranks on each node [1]")


def run(options: argparse.Namespace) -> int:
    """Print what was asked for."""
    print({"list": listed, "show": shown, "price": priced}[options.what](options))
    return 0


def listed(options: argparse.Namespace) -> str:
    """Return all schedules with their kinds and a line on each."""
    from hpctk.schedules.core.registry import SCHEDULES

    if options.json:
        entries = [
            {"name": name, "summary": entry.summary, "kinds": list(entry.builders)}
            for name, entry in SCHEDULES.items()
        ]
        return json.dumps(entries, indent=2)
    lines = [
        f"{name:<20} {entry.summary}\n{'':<20} {', '.join(entry.builders)}"
        for name, entry in SCHEDULES.items()
    ]
    lines.append(f"{'mpi':<20} MPI's own all-reduce; its bytes cannot be counted\n{'':<20} allreduce")
    lines.append(f"{'auto':<20} the fastest of these, by calibration (hpctk calibrate) or by price")
    return "\n".join(lines)


def shown(options: argparse.Namespace) -> str:
    """Return a drawing of one schedule."""
    from hpctk.schedules import SCHEDULES, build
    from hpctk.schedules.core.draw import draw

    nodes = nodes_of(options.ranks, options.per_node)
    known = SCHEDULES.get(options.name)
    kind = options.kind or (next(iter(known.builders)) if known else "allreduce")
    return draw(build(options.name, kind, options.ranks, nodes=nodes))


def priced(options: argparse.Namespace) -> str:
    """Return a table of prices, the cheapest first."""
    from hpctk.collectives.tuning.calibration import Calibration, read

    if options.bytes < 0 or options.bytes != int(options.bytes):
        raise SettingError(f"--bytes {options.bytes:g}: need a whole number of bytes, 0 or more")
    source = environment.calibration_file()
    text = read(source)
    known = Calibration.from_json(text) if text else Calibration()
    nodes = nodes_of(options.ranks, options.per_node)
    if options.kind == "sparse_allreduce":
        entries = sparse_prices(known, options.ranks, int(options.bytes) // 4, options.density, nodes)
    else:
        entries = prices(known, options.kind, options.ranks, int(options.bytes), nodes)
    if options.json:
        return json.dumps(entries, indent=2)
    rows = [
        [
            entry["name"],
            str(entry["rounds"]),
            bytes_text(entry["sent_bytes"]),
            bytes_text(entry["path_bytes"]),
            seconds_text(entry["seconds"]),
        ]
        for entry in entries
    ]
    head = f"{options.kind} of {bytes_text(options.bytes)} on {options.ranks} ranks, {options.per_node} on a node"
    origin = (
        f"figures measured on nodes of {list(known.layout)} ranks: {source}"
        if text
        else "figures of a 10 Gbit/s cluster: not yours"
    )
    columns = ["schedule", "rounds", "sent per rank", "one after the other", "predicted"]
    return f"{head}; {origin}\n\n{table(columns, rows)}"


def prices(known: Any, kind: str, ranks: int, nbytes: int, nodes: Any) -> list[dict[str, Any]]:
    """Return one entry per schedule that knows the kind, the cheapest first."""
    from hpctk.schedules import build
    from hpctk.schedules.core.registry import names

    entries = []
    for name in names(kind, with_nodes=True):
        plan = build(name, kind, ranks, nodes=nodes)
        volume, per_block = plan.volume, nbytes / plan.blocks
        entries.append(
            {
                "name": name,
                "rounds": volume.rounds,
                "messages": volume.messages,
                "sent_bytes": volume.sent * per_block,
                "path_bytes": volume.path * per_block,
                "seconds": known.seconds(plan, nbytes, nodes),
            }
        )
    return sorted(entries, key=lambda entry: entry["seconds"])


def sparse_prices(known: Any, ranks: int, n: int, density: float, nodes: Any) -> list[dict[str, Any]]:
    """Return one entry per way to sum sparse vectors of n float32, the cheapest first."""
    from hpctk.collectives.sparse_allreduce import offers

    if not 0 < density <= 1:
        raise SettingError(f"--density {density:g}: allowed are numbers above 0, at most 1")
    k = max(1, int(density * n)) if n else 0
    made = offers(ranks, n, k, None, 4, lambda plan, nbytes: float(known.seconds(plan, nbytes, nodes)))
    entries = [
        {
            "name": name,
            "rounds": sum(plan.volume.rounds for plan, _ in offer.stages),
            "messages": sum(plan.volume.messages for plan, _ in offer.stages),
            "sent_bytes": offer.sent_bytes,
            "path_bytes": sum(plan.volume.path * nbytes / plan.blocks for plan, nbytes in offer.stages),
            "seconds": offer.seconds,
        }
        for name, offer in made.items()
    ]
    return sorted(entries, key=lambda entry: entry["seconds"])


def nodes_of(ranks: int, per_node: int) -> list[range]:
    """Return the ranks of each node, filled one after the other."""
    if ranks < 1 or per_node < 1:
        raise SettingError(f"--ranks {ranks} --per-node {per_node}: need 1 or more of each")
    return [range(first, min(first + per_node, ranks)) for first in range(0, ranks, per_node)]
