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
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from hpctk.cli.core.table import bytes_text, seconds_text, table, wrapped
from hpctk.comm import environment
from hpctk.errors import SettingError

if TYPE_CHECKING:
    from hpctk.collectives.tuning.calibration import Calibration
    from hpctk.schedules.core.plan import Plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    commands = parser.add_subparsers(dest="what", metavar="list|show|price", required=True)
    one = commands.add_parser("list", help="all schedules, and what they are good for")
    one.add_argument("--json", action="store_true", help="print JSON")
    show = commands.add_parser("show", help="draw one as text: who sends which block to whom in every round")
    show.add_argument("name", help="a schedule; `hpctk schedule list` shows all")
    show.add_argument(
        "--kind", help="allreduce, reduce_scatter, allgather, broadcast, sparse_allreduce [the first it knows]"
    )
    price = commands.add_parser("price", help="rounds, volume and predicted time of every schedule")
    price.add_argument("--bytes", type=float, default=24e6, metavar="B", help="bytes of the tensor [24e6]")
    price.add_argument("--kind", default="allreduce", help="the collective [allreduce]")
    price.add_argument(
        "--density", type=float, default=0.01, metavar="D", help="of a sparse_allreduce of float32 [0.01]"
    )
    price.add_argument("--json", action="store_true", help="print JSON")
    for sub in (show, price):
        sub.add_argument("--ranks", type=int, default=4, metavar="N", help="number of ranks [4]")
        sub.add_argument("--per-node", type=int, default=1, metavar="M", help="ranks on each node [1]")


def run(options: argparse.Namespace) -> int:
    """Print what was asked for."""
    print({"list": listed, "show": shown, "price": priced}[options.what](options))
    return 0


def listed(options: argparse.Namespace) -> str:
    """Return all schedules with their kinds and a line on each."""
    from hpctk.schedules.core.registry import SCHEDULES, SHARED_MEMORY, by_name, offered

    known = {name: by_name(name) for name in (*SCHEDULES, *offered())}
    entries = [(name, entry.summary, list(entry.builders)) for name, entry in known.items()]
    if options.json:
        keys = ("name", "summary", "kinds")
        return json.dumps([dict(zip(keys, entry, strict=True)) for entry in entries], indent=2)
    entries.append((SHARED_MEMORY, "through memory that all ranks share, without messages; on one node", ["allreduce"]))
    entries.append(("mpi", "MPI's own all-reduce; its bytes cannot be counted", ["allreduce"]))
    lines = [f"{name:<20} {summary}\n{'':<20} {', '.join(kinds)}" for name, summary, kinds in entries]
    lines.append(f"{'auto':<20} the fastest of these, by calibration (hpctk calibrate) or by price")
    return "\n".join(lines)


def shown(options: argparse.Namespace) -> str:
    """Return a drawing of one schedule."""
    from hpctk.schedules import SCHEDULES, build
    from hpctk.schedules.core.draw import draw
    from hpctk.schedules.core.registry import by_name, offered

    nodes = nodes_of(options.ranks, options.per_node)
    known = by_name(options.name) if options.name in (*SCHEDULES, *offered()) else None
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
    entries = sorted(prices(known, options), key=lambda entry: entry["seconds"])
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
    origin = "figures of a 10 Gbit/s cluster: not yours"
    if text:
        origin = f"figures measured on nodes of {list(known.layout)} ranks: {source}"
    head = f"{options.kind} of {bytes_text(options.bytes)} on {options.ranks} ranks, {options.per_node} on a node"
    columns = ["schedule", "rounds", "sent per rank", "one after the other", "predicted"]
    return f"{wrapped(f'{head}; {origin}')}\n\n{table(columns, rows)}"


def prices(known: Calibration, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield an entry for each way to do the collective."""
    from hpctk.schedules import build
    from hpctk.schedules.core.registry import names

    nbytes, nodes = int(options.bytes), nodes_of(options.ranks, options.per_node)
    if options.kind != "sparse_allreduce":
        for name in names(options.kind, with_nodes=True):
            plan = build(name, options.kind, options.ranks, nodes=nodes)
            sent = plan.volume.sent * nbytes / plan.blocks
            yield priced_entry(name, [(plan, nbytes)], sent, known.seconds(plan, nbytes, nodes))
        return
    # Brings torch, which takes seconds.
    from hpctk.collectives.sparse_allreduce import offers

    if not 0 < options.density <= 1:
        raise SettingError(f"--density {options.density:g}: allowed are numbers above 0, at most 1")
    n = nbytes // 4
    k = max(1, int(options.density * n)) if n else 0
    made = offers(options.ranks, n, k, None, 4, lambda plan, size: float(known.seconds(plan, size, nodes)))
    for name, offer in made.items():
        yield priced_entry(name, offer.stages, offer.sent_bytes, offer.seconds)


def priced_entry(name: str, stages: Iterable[tuple[Plan, float]], sent_bytes: float, seconds: float) -> dict[str, Any]:
    """Return what a way of one or more stages costs, each a plan and the bytes of its tensor."""
    return {
        "name": name,
        "rounds": sum(plan.volume.rounds for plan, _ in stages),
        "messages": sum(plan.volume.messages for plan, _ in stages),
        "sent_bytes": sent_bytes,
        "path_bytes": sum(plan.volume.path * nbytes / plan.blocks for plan, nbytes in stages),
        "seconds": seconds,
    }


def nodes_of(ranks: int, per_node: int) -> list[range]:
    """Return the ranks of each node, filled one after the other."""
    if ranks < 1 or per_node < 1:
        raise SettingError(f"--ranks {ranks} --per-node {per_node}: need 1 or more of each")
    return [range(first, min(first + per_node, ranks)) for first in range(0, ranks, per_node)]
