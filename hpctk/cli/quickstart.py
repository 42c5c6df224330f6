"""Train on this machine by plain averaging and by the five methods, on the bundled handwritten digits: no download.

Prints what each reached and cost, and draws it. Ctrl-C stops it; started again, it goes on where it was. Everything is
kept in runs/quickstart of the current folder. Other options are those of `hpctk train digits`.

Examples:
  hpctk quickstart
  hpctk quickstart --ranks 2 --fresh
  hpctk quickstart --fresh --method mean,saef --epochs 5
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from hpctk.cli import NO_MPI4PY, Parser
from hpctk.cli.launch import Own, own_venv, prepare
from hpctk.errors import SettingError

RUN = Path("runs", "quickstart")
HPCTK = [sys.executable, "-m", "hpctk"]
#: What others call the number of ranks.
AS_MPIRUN_SAYS = ("-n", "-np", "--np", "--rank", "--nproc", "--nproc-per-node")


def main(name: str, words: Sequence[str]) -> int:
    """Start the ranks and wait for them; return their exit status."""
    options, rest = read(words)
    if importlib.util.find_spec("mpi4py") is None:
        raise SettingError(NO_MPI4PY)
    # Before anything is written: it says so where there is no mpirun.
    prepare("mpirun", Own(), ["true"], os.environ, own_venv())
    # Held by this process and its ranks; the kernel lets go of it when the last of them ends, however that may be.
    with lock():
        # Words that make no sense are said once, before anything is removed, instead of by mpirun and its ranks.
        if rest:
            going_on = [] if options.fresh else ["--run", str(RUN), "--resume"]
            checked = subprocess.run(
                [*HPCTK, "train", "digits", "--check", *going_on, *rest], stdout=subprocess.DEVNULL, check=False
            )
            if checked.returncode != 0:
                return checked.returncode
        return train(options.ranks, rest, fresh=options.fresh)


def read(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of this command, and the words for `hpctk train digits`."""
    parser = Parser(
        prog="hpctk quickstart", description=__doc__, allow_abbrev=False,
        usage="hpctk quickstart [--ranks N] [--fresh] [OPTION OF `hpctk train digits` ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--ranks", default="4", metavar="N", help="so many ranks on this machine [4]")
    parser.add_argument("--fresh", action="store_true", help=f"remove {RUN} and start anew")
    options, rest = super(Parser, parser).parse_known_args(list(words))
    if not options.ranks.isdecimal() or not 1 <= int(options.ranks) <= 9999:
        raise SettingError(f"--ranks '{options.ranks}': a number of ranks, such as 4")
    for word in rest:
        if word.partition("=")[0] in AS_MPIRUN_SAYS:
            raise SettingError(f"{word}: the number of ranks is --ranks N")
        if word.partition("=")[0] in ("--run", "--resume"):
            raise SettingError(f"{word}: the run is in {RUN}; for others use hpctk train digits")
    return options, rest


def lock() -> IO[str]:
    """Return the file of the lock, open. Raise SettingError if another quickstart is at work in this folder."""
    path = RUN.with_suffix(".lock")
    try:
        path.parent.mkdir(exist_ok=True)
        file = path.open("a+")
    except OSError as error:
        raise SettingError(
            f"{path.absolute()}: cannot be written ({error.strerror}): start it in a folder of yours"
        ) from None
    os.set_inheritable(file.fileno(), True)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.truncate(0)
        print(os.getpid(), file=file, flush=True)
    except BlockingIOError:
        holder = path.read_text().strip()
        # A script that has become this process may have taken it before.
        if holder != str(os.getpid()):
            # Nothing stands there while the other one writes it down.
            process = f" (process {holder})" if holder else ""
            raise SettingError(
                f"another quickstart{process} is at work in this folder: wait for it, or take another folder"
            ) from None
    except OSError:
        # A file system without locks.
        pass
    return file


def train(ranks: str, rest: list[str], *, fresh: bool) -> int:
    """Train in RUN, or go on there; return the exit status."""
    if fresh:
        shutil.rmtree(RUN, ignore_errors=True)
    if (RUN / "result.json").exists():
        print(f"quickstart: the run in {RUN} is complete: this is its result. --fresh trains again.", flush=True)
    elif (RUN / "settings.toml").exists():
        print(f"quickstart: going on with the run in {RUN}. --fresh starts anew.", flush=True)
    else:
        # Words of an earlier start are in its settings; only the first start needs them.
        by_all = not any(word.partition("=")[0] == "--method" for word in rest)
        rest = ["--checkpoint-minutes", "0.05", *rest, *(["--method", "all"] if by_all else [])]
    # Otherwise every rank would compile the same kernels at once.
    subprocess.run([sys.executable, "-m", "hpctk.kernels.warm"], check=True)
    training = ["train", "digits", "--run", str(RUN), "--resume", "--picture", str(RUN / "picture.png"), *rest]
    words = ["-n", ranks, sys.executable, "-m", "mpi4py", *HPCTK[1:], *training]
    added, line = prepare("mpirun", Own(), words, os.environ, own_venv())
    # Not closed: the ranks hold the lock, too.
    job = subprocess.Popen(line, env={**os.environ, **added}, close_fds=False)
    signal.signal(signal.SIGTERM, lambda *_: job.terminate())
    try:
        status = job.wait()
    except KeyboardInterrupt:
        # mpirun got it, too, and ends the ranks.
        job.wait()
        print("\nquickstart: stopped. The same command goes on from the last checkpoint.", file=sys.stderr)
        return 130
    if status != 0 and (RUN / "settings.toml").exists():
        print(
            f"quickstart: ended with status {status}. Started again it goes on in {RUN}; --fresh starts anew.",
            file=sys.stderr,
        )
    return status if status >= 0 else 128 - status
