"""Say what a training step will cost by every method on a network, and which to take: maybe none.

The step on one rank is given, or measured by running a training script for 16 steps. The network is a rate, a file of
`hpctk calibrate`, or, under mpirun, the ranks themselves: then network and methods are measured, which takes
about a minute, longer on slow links. Without any of these it is the file that is in use, or the figures of an ordinary
10 Gbit/s cluster.

Examples:
  hpctk advise --params 25e6 --step-seconds 0.12 --ranks 16 --rate 1gbit
  hpctk advise --script train.py --ranks 16 --rate 1gbit -- --epochs 1
  hpctk mpirun -n 4 hpctk advise --params 25e6 --step-seconds 0.12 --output cluster.json
  hpctk advise --params 25e6 --step-seconds 0.12 --calibration cluster.json --ranks 1024
  hpctk advise --params 25e6 --step-seconds 0.12 --ranks 8 --rate 1gbit --scale 8,64,512,4096 --plot scale.png
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctk.cli.core.table import bytes_text, seconds_text, table, wrapped
from hpctk.comm import environment, launcher
from hpctk.errors import SettingError

if TYPE_CHECKING:
    from hpctk.advise.predict import Prediction
    from hpctk.advise.question import Question
    from hpctk.advise.recommend import Advice


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    job = parser.add_argument_group("the job")
    job.add_argument("--params", type=float, metavar="N", help="trainable parameters, float32, such as 25e6")
    job.add_argument("--step-seconds", type=float, metavar="S", help="a step on one rank alone, optimizer included")
    job.add_argument("--script", type=Path, metavar="FILE", help="run 16 steps of a training script instead of both")
    job.add_argument("words", nargs="*", metavar="WORD", help="after --: words for the script")
    job.add_argument("--optimizer", default="sgd", metavar="sgd|adam", help="adam for all of its kin [sgd]")
    job.add_argument(
        "--overlap-share", type=float, default=0.5, metavar="X",
        help="part of the step behind which communication can hide; 0 where cores do both [0.5]",
    )  # fmt: skip
    job.add_argument("--periods", default="4,16,64", metavar="H,H", help="of methods with local steps [4,16,64]")
    job.add_argument("--densities", default="0.01", metavar="D,D", help="of methods that choose elements [0.01]")
    net = parser.add_argument_group("the network")
    net.add_argument("--ranks", type=int, metavar="P", help="ranks in all [those of mpirun, or 16]")
    net.add_argument("--per-node", type=int, metavar="M", help="ranks on each node, which share its link [1]")
    net.add_argument("--rate", metavar="RATE", help="of each node's link, such as 1gbit or 100mbit")
    net.add_argument("--latency", type=float, metavar="S", help="seconds of a round, whatever it carries")
    net.add_argument("--calibration", type=Path, metavar="FILE", help="a file of hpctk calibrate or of --output")
    net.add_argument("--output", type=Path, metavar="FILE", help="under mpirun: keep what was measured")
    out = parser.add_argument_group("what is printed")
    out.add_argument("--all", action="store_true", help="every schedule of every method, not the best alone")
    out.add_argument("--scale", metavar="P,P", help="also for these numbers of ranks, such as 8,64,512,4096")
    out.add_argument("--plot", type=Path, metavar="FILE", help="draw --scale (PNG; needs matplotlib)")
    out.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Print the advice, on rank 0. Collective over COMM_WORLD under mpirun."""
    # Not Slurm's own variables: the shell of an allocation has them, and is no rank.
    under_mpi = any(name.startswith(launcher.PREFIXES) for name in os.environ)
    scales = numbers(options.scale, int, "--scale") if options.scale else ()
    check(options, scales, under_mpi=under_mpi)
    if under_mpi:
        return among_ranks(options, scales)
    question = ask(options, ranks=16, per_node=1)
    text = calibration_text(options)
    print(answer(options, question, scales, text, origin(options, text)))
    return 0


def check(options: argparse.Namespace, scales: Sequence[int], *, under_mpi: bool) -> None:
    """Raise SettingError for options that do not belong together."""
    if options.script is None and (options.params is None or options.step_seconds is None):
        raise SettingError("need --params N and --step-seconds S, or --script FILE, which measures both")
    if options.words and options.script is None:
        raise SettingError(f"unexpected {' '.join(options.words)}: words after -- are for --script")
    if options.plot is not None and not scales:
        raise SettingError("--plot draws what --scale 8,64,512 asks for: give it, too")
    if any(not 1 <= ranks <= 2**20 for ranks in scales):
        raise SettingError(f"--scale {options.scale}: need 1 to 1048576 ranks each")
    if options.latency is not None and not 0 <= options.latency < math.inf:
        raise SettingError(f"--latency {options.latency:g}: need seconds, 0 or more")
    if options.output is not None and not under_mpi:
        raise SettingError("--output keeps what was measured: start it with hpctk mpirun -n 2 or more")
    if under_mpi and (options.calibration or options.rate):
        raise SettingError("under mpirun the network is measured: leave out --calibration and --rate")


def numbers(text: str, kind: Any, option: str) -> tuple[Any, ...]:
    """Return what stands between commas."""
    try:
        return tuple(sorted({kind(word) for word in text.split(",")}))
    except ValueError:
        raise SettingError(f"{option} {text}: need numbers with commas between them") from None


def ask(options: argparse.Namespace, ranks: int, per_node: int) -> Question:
    """Return the question, with a measured step where a script is given."""
    from hpctk.advise.question import Question
    from hpctk.advise.step_probe import probe

    params, step_s = options.params, options.step_seconds
    if params is not None and (not math.isfinite(params) or params != int(params)):
        raise SettingError(f"--params {params:g}: need a whole number of parameters, such as 25e6")
    if options.script is not None:
        found, seconds = probe(options.script, options.words)
        params, step_s = params or found, step_s or seconds
    return Question(
        params=int(params),
        step_s=step_s,
        ranks=ranks if options.ranks is None else options.ranks,
        per_node=per_node if options.per_node is None else options.per_node,
        optimizer=options.optimizer,
        overlap_share=options.overlap_share,
        periods=numbers(options.periods, int, "--periods"),
        densities=numbers(options.densities, float, "--densities"),
    )


def calibration_text(options: argparse.Namespace) -> str:
    """Return the text of the calibration file, empty where none is asked for or in use."""
    from hpctk.collectives.tuning.calibration import read

    if options.calibration is not None:
        if not options.calibration.is_file():
            raise SettingError(f"--calibration {options.calibration}: no such file")
        return read(options.calibration)
    # A rate that is given is a question about another network than this one's.
    return "" if options.rate else read(environment.calibration_file())


def origin(options: argparse.Namespace, text: str) -> str:
    """Return where the figures of the network come from, in words."""
    if not text and not options.rate:
        return "an ordinary 10 Gbit/s cluster, not yours"
    source = options.calibration or environment.calibration_file()
    parts = [f"links of {options.rate}"] if options.rate else []
    return ", else ".join(parts + ([f"measured: {source}"] if text else ["ordinary figures"]))


def among_ranks(options: argparse.Namespace, scales: Sequence[int]) -> int:
    """Measure these ranks, then answer on rank 0. Collective over COMM_WORLD."""
    from hpctk.advise.local_work import into_calibration
    from hpctk.advise.measure import measure
    from hpctk.cli.calibrate import keep
    from hpctk.collectives.tuning.calibrate import calibrate
    from hpctk.comm.world import world

    here = world()
    if here.size == 1:
        raise SettingError("one rank has nobody to talk to: start it with mpirun -n 2 or more, or without mpirun")

    def report(line: str) -> None:
        if here.rank == 0:
            print(f"advise: {line}", file=sys.stderr, flush=True)

    text = into_calibration(calibrate(here, report).to_json(), measure(here, report))

    def conclude() -> str:
        if options.output is not None:
            keep(options.output, text)
        question = ask(options, here.size, max(len(ranks) for ranks in here.nodes))
        return answer(options, question, scales, text, f"measured on these {here.size} ranks")

    printed = here.run_on_root("the advice", conclude)
    if here.rank == 0:
        print(printed)
    return 0


def answer(options: argparse.Namespace, question: Question, scales: Sequence[int], text: str, source: str) -> str:
    """Return what is printed; draw the picture where one is asked for."""
    from dataclasses import replace

    from hpctk.advise.evidence import load, nearest
    from hpctk.advise.local_work import from_calibration
    from hpctk.advise.predict import at_scales, fastest, predict
    from hpctk.advise.question import at_rate, bits_per_second
    from hpctk.advise.recommend import UNKNOWN, recommend
    from hpctk.collectives.tuning.calibration import Calibration

    known = Calibration.from_json(text) if text else Calibration()
    if options.rate:
        # Measured times belong to the links they were measured on; factors are the engine's.
        machine = at_rate(known.machine, bits_per_second(options.rate), question.per_node)
        known = replace(known, machine=machine, layout=(), measured={})
    if options.latency is not None:
        known = replace(known, machine=replace(known.machine, latency_s=options.latency), layout=(), measured={})
    local = from_calibration(text)
    predictions = predict(question, known, local)
    advice = recommend(predictions)
    rate = 8 * question.per_node / known.machine.byte_s if known.machine.byte_s else math.inf
    seen = nearest(question, rate, load())
    curve = at_scales(question, known, local, scales)
    if options.plot is not None:
        picture(options.plot, curve, question)
    shown = predictions if options.all else fastest(predictions)
    if options.json:
        document = {
            "question": asdict(question),
            "network": source,
            "predictions": [asdict(entry) for entry in predictions],
            "recommended": {**asdict(advice.choice), "verdict": advice.verdict, "reasons": advice.reasons},
            "scale": [{"ranks": ranks, "predictions": [asdict(e) for e in row]} for ranks, row in curve.items()],
            "nearest_measurement": None if seen is None else asdict(seen),
            "unknown": UNKNOWN,
        }
        return json.dumps(document, indent=2)
    parts = [heading(question, source), steps_table(shown), advised(advice)]
    if curve:
        parts.insert(2, scale_table(curve))
    if options.plot is not None:
        parts.append(f"drawn in {options.plot}")
    parts.append("Not known here:\n" + "\n".join(wrapped(f"- {line}", "  ") for line in UNKNOWN))
    if seen is not None:
        parts.append(wrapped(f"Measured nearest to this: {seen.text}"))
    return "\n\n".join(parts)


def heading(question: Question, source: str) -> str:
    """Return what was asked."""
    return wrapped(
        f"{question.params:,} parameters ({bytes_text(question.dense_bytes)}), {seconds_text(question.step_s)} a step "
        f"alone, {question.ranks} ranks, {question.per_node} on a node; network: {source}"
    )


def steps_table(entries: Sequence[Prediction]) -> str:
    """Return the predictions, the shortest step first."""
    rows = [
        [
            entry.name,
            entry.schedule,
            seconds_text(entry.seconds),
            seconds_text(entry.compute_s),
            seconds_text(entry.local_s),
            seconds_text(entry.exposed_s),
            bytes_text(entry.sent_bytes),
            bytes_text(entry.memory_bytes),
        ]
        for entry in sorted(entries, key=lambda entry: entry.seconds)
    ]
    head = ["method", "schedule", "step", "compute", "compress", "exposed", "sent a step", "memory"]
    return table(head, rows)


def scale_table(curve: Mapping[int, Sequence[Prediction]]) -> str:
    """Return the seconds of a step by method and number of ranks."""
    order = sorted(curve[max(curve)], key=lambda entry: entry.seconds)
    found = {ranks: {entry.name: entry.seconds for entry in entries} for ranks, entries in curve.items()}
    rows = [[entry.name, *(seconds_text(found[ranks][entry.name]) for ranks in curve)] for entry in order]
    return table(["a step on ... ranks", *map(str, curve)], rows)


def advised(advice: Advice) -> str:
    """Return the recommendation, its code and its reasons."""
    lines = [f"Take: {advice.verdict}", "", *(f"    {line}" for line in advice.choice.code.split("; ")), ""]
    return "\n".join([*lines, "because", *(wrapped(f"- {reason}", "  ") for reason in advice.reasons)])


def picture(target: Path, curve: Mapping[int, Sequence[Prediction]], question: Question) -> None:
    """Draw the curve. Raise SettingError where matplotlib is missing, or the file cannot be written."""
    from hpctk.advise.picture import draw

    try:
        draw(curve, f"{question.params:,} parameters, {seconds_text(question.step_s)} a step alone", target)
    except ImportError:
        raise SettingError("--plot needs matplotlib: pip install 'hpctk[plot]'") from None
    except (OSError, ValueError) as error:
        raise SettingError(f"--plot {target}: {error}") from None
