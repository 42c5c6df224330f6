"""What reading the statistics of many ranks costs: seconds and memory of merging, loading and reporting.

Start it with `./launch/bench stats`; it is a single process without MPI. The ranks never were: their files are made
here (tests/support/stats_files.py). Each contender runs in a process of its own, whose peak memory the system tells.

- `merge:view`, `merge:copy`: `hpctk merge` with virtual datasets, and with the rows themselves;
- `load`: `hpctk.stats.load` with all tables but calls;
- `load:copy`: the same from the merged copy;
- `report`: `hpctk report`, where there is that command.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import _rig

from hpctk.cli import COMMANDS
from hpctk.cli.core.table import bytes_text, seconds_text, table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from stats_files import write_many

#: What must not be exceeded with a thousand ranks.
LIMITS_S = {"merge:view": 60, "merge:copy": 60, "report": 10}
LIMIT_BYTES = 1e9
LOAD = "import sys, hpctk.stats as s; s.load(sys.argv[1], ('steps', 'summary', 'peers', 'sizes'))"


def main() -> None:
    parser = _rig.parser(repeats=3)
    parser.add_argument("--size", type=int, default=1000, help="ranks that never were")
    parser.add_argument("--steps", type=int, default=500, help="steps of each; two calls in every one")
    parser.add_argument("--folder", type=Path, default=None, help="where to write [a temporary folder]")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        run = Path(folder) / "run"
        began = time.perf_counter()
        write_many(run, options.size, steps=options.steps, missing=[options.size // 2], running=[options.size // 3])
        nbytes = sum(path.stat().st_size for path in run.rglob("*.h5"))
        made = time.perf_counter() - began
        print(f"bench: made {options.size - 1} files, {bytes_text(nbytes)}, in {made:.1f} s", file=sys.stderr)
        hpctk = [sys.executable, "-m", "hpctk"]
        view, copy = str(Path(folder) / "view.h5"), str(Path(folder) / "copy.h5")
        runs = {
            "merge:view": [*hpctk, "merge", str(run), "--virtual", "--force", "-o", view],
            "merge:copy": [*hpctk, "merge", str(run), "--copy", "--force", "-o", copy],
            "load": [sys.executable, "-c", LOAD, str(run)],
            "load:copy": [sys.executable, "-c", LOAD, copy],
        }
        if "report" in COMMANDS:
            runs["report"] = [*hpctk, "report", str(run)]
        seconds, memory = {name: [] for name in runs}, {name: [] for name in runs}
        for repeat in range(options.repeats):
            print(f"bench: repeat {repeat + 1} of {options.repeats}", file=sys.stderr)
            for name, command in runs.items():
                spent, peak = measured(command)
                seconds[name].append(spent)
                memory[name].append(peak)

    results = [
        {
            "name": name,
            "seconds": median(seconds[name]),
            "memory_bytes": max(memory[name]),
            "limit_s": LIMITS_S.get(name),
            "ranks": options.size,
            "steps": options.steps,
            "bytes": nbytes,
        }
        for name in runs
    ]
    print(
        f"{options.size} ranks, {options.steps} steps, {bytes_text(nbytes)}; memory at most {bytes_text(LIMIT_BYTES)}"
    )
    rows = [
        [
            one["name"],
            seconds_text(one["seconds"]),
            f"{one['limit_s']} s" if one["limit_s"] else "",
            bytes_text(one["memory_bytes"]),
        ]
        for one in results
    ]
    print(table(["what", "seconds", "at most", "peak memory"], rows))
    _rig.write(options.json, results)


def measured(command: list[str]) -> tuple[float, int]:
    """Return seconds and peak memory of a command; end where it fails."""
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    errors = process.stderr.read().decode() if process.stderr else ""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"bench: {' '.join(command)} failed:\n{errors}")
    return time.perf_counter() - began, usage.ru_maxrss * 1024


if __name__ == "__main__":
    main()
