"""What the pages show can be typed: commands exist and take these options, programs compile, settings are TOML."""

import re
import subprocess
import tomllib

import documents
import pytest
from documents import ROOT, blocks

import hpctk
from hpctk.cli import COMMANDS
from hpctk.errors import SettingError

SHELL, PLAIN = blocks("sh"), blocks("")
API = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md"))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder that holds the file which one of the commands reads."""
    (table,) = (one.text for one in PLAIN if one.text.startswith("# rates.txt"))
    (tmp_path / "rates.txt").write_text(table)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_there_are_commands_on_the_pages_of_the_guide():
    named = {one.page.name for one in SHELL}
    assert {"README.md", "install.md", "choose.md", "ways-in.md", "slurm.md", "report.md", "commands.md"} <= named


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_commands_are_understood(block, folder):
    subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
    if re.match(r"for ", block.text):
        return
    for words in documents.lines(block.text):
        if words[-1] == "--help":
            words = words[:-1]
        documents.check(words)


@pytest.mark.parametrize(
    "words",
    [
        "hpctk raport runs/7",
        "hpctk report runs/7 --htlm report.html",
        "hpctk train digits --method safe",
        "hpctk mpirun -n 4 hpctk train digits --set period=1",
        "hpctk mpirun -n 4",
        "hpctk slurm submit mpi --nods 2 -- hpctk train digits",
        "hpctk slurm submit mpi --nodes 2 -- hpctk train digits --method safe",
        "./launch/quickstrat",
        "./launch/setup --with-horovd",
        "pip install hpctk[mpl]",
        "python examples/trane.py",
        "frobnicate",
    ],
)
def test_wrong_commands_are_found(words, folder):
    with pytest.raises((AssertionError, SettingError, SystemExit)) as caught:
        status = documents.check(words.split())
        assert status is not None, "understood"
    assert "understood" not in str(caught.value)


@pytest.mark.parametrize("page", documents.PAGES, ids=lambda page: page.name)
def test_commands_in_running_text_exist(page):
    for text in documents.inline_commands(page):
        documents.check_inline(text)


@pytest.mark.parametrize("block", PLAIN, ids=str)
def test_what_has_no_language_is_no_command(block):
    """Else nobody would look whether it works."""
    assert not re.search(r"^(\$ )?(hpctk |\./launch/|launch/|python |pip |torchrun )", block.text, re.MULTILINE)


@pytest.mark.parametrize("block", blocks("toml"), ids=str)
def test_settings_are_toml(block):
    assert tomllib.loads(block.text)


def test_programs_compile():
    for place, program in documents.programs(horovod=True) + documents.programs(horovod=False):
        compile(program, place, "exec")


def test_every_command_is_on_its_page():
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert [name for name in COMMANDS if f"hpctk {name}" not in page] == []


def test_every_public_name_is_in_the_reference():
    public = [f"hpctk.{name}" for name in hpctk.__all__ if name != "__version__"]
    public += [f"hpctk.ops.{name}" for name in vars(hpctk.ops) if not name.startswith("_") and name != "annotations"]
    public += [f"hpctk.ddp.{name}" for name in hpctk.ddp.__all__]
    public += ["hpctk.horovod.Compression", "hpctk.horovod.DistributedOptimizer", "hpctk.stats.load"]
    shown = set(re.findall(r"^\.\. auto\w+:: (\S+)$", API, re.MULTILINE))
    # It is in hpctk.ops, too, and described there.
    shown.add("hpctk.allreduce")
    assert [name for name in public if name not in shown] == []


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_links_lead_somewhere(name):
    """Sphinx looks at those of the pages."""
    links = re.findall(r"\]\(([^)#]+)", (ROOT / name).read_text(encoding="utf-8"))
    assert [one for one in links if not (ROOT / one).exists()] == []
