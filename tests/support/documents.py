"""The blocks of README.md and docs/*.md: what tests run of them, and what the programs they show are run with.

```python   is run, with the names of CONTEXT that it uses
```diff     is a change to a script: both sides compile, the side after it is run
```sh       is commands: each is one that hpctk, launch/ or a program of OTHERS understands
```toml     is parsed
```         is output, or a drawing: no command
"""

from __future__ import annotations

import argparse
import ast
import configparser
import functools
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from hpctk.cli import COMMANDS, build_parser, main, quickstart
from hpctk.cli.launch import take_own

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

#: Programs that are not ours: nothing but their name is looked at.
OTHERS = {
    "apptainer", "apt-get", "cd", "export", "git", "h5dump", "module", "pre-commit", "reframe", "scancel", "source",
    "spack", "squeue", "twine",
}  # fmt: skip
#: Programs that start others.
STARTERS = {"mpirun", "srun", "torchrun"}
#: Scripts that are the reader's own.
YOURS = {"train.py", "train_ddp.py"}
#: Programs of launch/ that say by --help, or by the script itself, which options they know.
OWN_PATH = re.compile(r"(\./)?(launch|tests|benchmarks|examples)/\S+")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


@functools.cache
def all_blocks() -> tuple[Block, ...]:
    """Return every block of every page."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        fences = re.finditer(r"^```([\w{}-]*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        found += [Block(page, text[: one.start()].count("\n") + 1, one[1], one[2]) for one in fences]
    return tuple(found)


def blocks(language: str, page: Path | None = None) -> list[Block]:
    """Return the blocks of one language, or of none; of all pages or of one."""
    return [one for one in all_blocks() if one.language == language and page in (None, one.page)]


def sides(diff: str) -> tuple[str, str]:
    """Return the text before a change, and the text after it."""
    lines = [(line[:1], line[1:]) for line in diff.splitlines()]
    return tuple("\n".join(text for sign, text in lines if sign != other) for other in "+-")


def programs(*, horovod: bool) -> list[tuple[str, str]]:
    """Return place and text of every Python program that pages show, with Horovod or without."""
    found = [(str(one), one.text) for one in blocks("python")]
    found += [(str(one), sides(one.text)[1]) for one in blocks("diff")]
    return [one for one in found if bool(re.search(r"hvd|horovod|compression,", one[1])) == horovod]


# What programs are run with -------------------------------------------------------------------------------------------


def _model(_: dict):
    import torch

    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))


def _loader(_: dict):
    import torch

    return [(torch.randn(4, 8), torch.randint(4, (4,))) for _ in range(3)]


def _optimizer(names: dict):
    import torch

    return torch.optim.SGD(names["model"].parameters(), lr=0.1)


def _shared_optimizer(names: dict):
    import hpctk

    return hpctk.DistributedOptimizer(_optimizer(names), hpctk.Mean(), model=names["model"])


def _attached(names: dict):
    from torch.nn.parallel import DistributedDataParallel

    import hpctk

    return hpctk.ddp.attach(DistributedDataParallel(names["model"]), hpctk.Mean())


def _imported(module: str, name: str | None = None):
    def made(_: dict):
        found = __import__(module, fromlist=["x"])
        return getattr(found, name) if name else found

    return made


def _made(expression: str):
    def made(_: dict):
        import torch

        return eval(expression, {"torch": torch})

    return made


#: Name: what makes its value, from the names before it. Only those that a program uses are made.
CONTEXT = {
    "torch": _imported("torch"),
    "os": _imported("os"),
    "h5py": _imported("h5py"),
    "pandas": _imported("pandas"),
    "xarray": _imported("xarray"),
    "dist": _imported("torch.distributed"),
    "DistributedDataParallel": _imported("torch.nn.parallel", "DistributedDataParallel"),
    "hpctk": _imported("hpctk"),
    "model": _model,
    "loader": _loader,
    "criterion": _made("torch.nn.CrossEntropyLoss()"),
    "evaluate": _made("lambda model: model.eval()"),
    "base": _optimizer,
    "opt": _optimizer,
    "scheduler": lambda names: __import__("torch").optim.lr_scheduler.StepLR(names["opt"], 7),
    "attached": _attached,
    "epoch": _made("0"),
    "epochs": _made("2"),
    "dense_steps": _made("1"),
    "tensor": _made("torch.ones(10)"),
    "indices": _made("torch.tensor([1, 5])"),
    "values": _made("torch.tensor([1.0, 2.0])"),
    "size": _made("10"),
    "k": _made("2"),
}


def namespace(program: str) -> dict:
    """Return what a program takes for granted. Collective where that is an optimizer of all ranks."""
    used = {node.id for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Name)}
    if used & {"opt", "base", "scheduler", "attached", "evaluate"}:
        used |= {"model", "opt"}
    names: dict = {"__name__": "page"}
    for name, make in CONTEXT.items():
        if name in used:
            # Where a page speaks of an optimizer that is there already, it is one of hpctk's.
            shared = name == "opt" and re.match(r"(checkpoints = )?hpctk\.\w+\(.*\bopt, model", program)
            names[name] = _shared_optimizer(names) if shared else make(names)
    return names


# Commands -------------------------------------------------------------------------------------------------------------


def lines(text: str) -> list[list[str]]:
    """Return the words of every command of a block, without comments and without what it sets before them."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        if words:
            found.append(words)
    return found


def check(words: list[str]) -> None:
    """Raise AssertionError, SettingError or SystemExit unless a command is one that is understood."""
    # A program of a certain environment is the program.
    program, rest = re.sub(r"^/\S+/bin/", "", words[0]), words[1:]
    if program == "hpctk":
        _check_hpctk(rest)
    elif OWN_PATH.fullmatch(program):
        _check_own(program, rest)
    elif program in ("python", "python3"):
        _check_python(rest)
    elif program == "pip":
        _check_pip(rest)
    elif program in STARTERS:
        _check_started(rest)
    else:
        assert program in OTHERS, f"{program}: what is that?"


def _check_started(words: list[str]) -> None:
    starts = [i for i, word in enumerate(words) if word in ("hpctk", "python") or word.endswith(".py")]
    starts += [i for i, word in enumerate(words) if OWN_PATH.fullmatch(word)]
    assert starts, f"{shlex.join(words)}: no program"
    program = words[min(starts) :]
    check(program if not program[0].endswith(".py") else ["python", *program])


def _check_python(words: list[str]) -> None:
    if words[:2] == ["-m", "mpi4py"]:
        words = words[2:]
    if words[0] == "-m":
        if words[1] == "hpctk":
            check(words[1:])
        assert words[1] in ("build", "hpctk", "sphinx", "pytest", "venv"), words
        return
    assert words[0] in YOURS or (ROOT / words[0]).is_file(), f"{words[0]}: no such file"


def _check_pip(words: list[str]) -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    extras = set(config["options.extras_require"])
    for named in re.findall(r"\[(.+?)\]", " ".join(words)):
        assert set(named.split(",")) <= extras, f"{named}: no such extra"


def _check_own(program: str, words: list[str]) -> None:
    path = ROOT / program
    assert path.is_file(), f"{program}: no such file"
    assert os.access(path, os.X_OK), f"{program} cannot be run"
    if path.name == "bind-gpu":
        check(words)
        return
    if path.name in ("cluster", "quickstart"):
        _check_hpctk([path.name, *words])
        return
    known = path.read_text(encoding="utf-8")
    for word in words[: words.index("--")] if "--" in words else words:
        if word.startswith("--"):
            assert word.split("=")[0] in known, f"{program} knows no {word}"


def _check_hpctk(words: list[str]) -> None:
    command = words[0]
    if command == "cluster":
        own = words[1 : words.index("--")] if "--" in words else words[1:]
        assert {word.split("=")[0] for word in own if word.startswith("--")} <= options_of(command), words
    elif command == "quickstart":
        check(["hpctk", "train", "digits", *quickstart.read(words[1:])[1]])
    elif command in ("mpirun", "horovodrun"):
        _check_started(take_own(command, words[1:])[1])
    elif command == "schedule":
        assert main(words) == 0, words
    elif command == "train" and "--list-methods" not in words:
        assert main([*words, "--check"]) == 0, words
    elif command == "slurm":
        _check_slurm(words[1:])
    else:
        build_parser(command).parse_args(words)


def _check_slurm(words: list[str]) -> None:
    from hpctk.cli import slurm
    from hpctk.slurm.render import render

    parser = argparse.ArgumentParser()
    slurm.add_arguments(parser)
    options = slurm.resolved(parser.parse_args([*words[:2], "--site", "/dev/null", *words[2:]]))
    render(options)
    check(words[words.index("--") + 1 :])


@functools.cache
def options_of(command: str) -> frozenset[str]:
    """Return every option of a command of hpctk, and of what is below it."""
    if command in ("cluster", "quickstart"):
        script = {"cluster": "launch/cluster.sh", "quickstart": "cli/quickstart.py"}[command]
        return frozenset(re.findall(r"--[a-z-]+", (ROOT / "hpctk" / script).read_text(encoding="utf-8")))

    def below(parser: argparse.ArgumentParser) -> set[str]:
        known: set[str] = set()
        for action in parser._actions:
            known |= set(action.option_strings)
            if isinstance(action, argparse._SubParsersAction):
                known = known.union(*map(below, action.choices.values()))
        return known

    return frozenset(below(build_parser(command)))


def inline_commands(page: Path) -> list[str]:
    """Return what stands in the text of a page as `hpctk ...` or `./launch/...`."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    spans = [" ".join(one.split()) for one in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose)]
    return [one for one in spans if re.match(r"hpctk [a-z]|(\./)?launch/[a-z]", one)]


def check_inline(text: str) -> None:
    """Raise AssertionError unless a command in running text, which may leave words out, has known names in it."""
    words = text.split()
    own = words[: words.index("--")] if "--" in words else words
    wanted = {word.strip("[],").split("=")[0] for word in own if word.strip("[],").startswith("--")}
    if words[0] == "hpctk":
        assert words[1] in COMMANDS, f"hpctk knows no {words[1]}"
        if words[1] not in ("mpirun", "horovodrun"):
            assert wanted <= options_of(words[1]), f"{text}: options"
    else:
        path = ROOT / words[0]
        assert path.is_file(), f"{words[0]}: no such file"
        if path.name == "cluster":
            assert wanted <= options_of(path.name), f"{text}: options"
        elif path.name not in ("mpirun", "horovodrun", "bench"):
            known = path.read_text(encoding="utf-8")
            assert all(word in known for word in wanted), f"{text}: options"
