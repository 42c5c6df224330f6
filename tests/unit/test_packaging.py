"""What centres are given fits the package: versions, dependencies, files that exist, scripts that parse."""

import ast
import configparser
import contextlib
import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet

import hpctk

ROOT = Path(__file__).parents[2]
PACKAGING = ROOT / "packaging"


def text(*path):
    return ROOT.joinpath(*path).read_text(encoding="utf-8")


def test_versions_are_the_same_everywhere():
    version = re.escape(hpctk.__version__)
    assert re.search(rf"^version: {version}$", text("CITATION.cff"), re.MULTILINE)
    assert re.search(rf"^    Version {version}$", text("packaging", "apptainer", "hpctk.def"), re.MULTILINE)
    assert re.search(rf'^    version\("{version}", tag="v{version}"\)$', text("packaging", "spack", "package.py"), re.M)
    assert [one.name for one in (PACKAGING / "module" / "hpctk").iterdir()] == [hpctk.__version__]
    assert re.search(r"^## (\S+) \(", text("CHANGELOG.md"), re.MULTILINE)[1] == hpctk.__version__
    for page in ("release.md", "centres.md", "install.md"):
        named = re.findall(r"hpctk(?:/|-| |/v|@)(\d+\.\d+\.\d+)|\bv(\d+\.\d+\.\d+)", text("docs", page))
        assert {one for pair in named for one in pair if one} == {hpctk.__version__}


YAML = [
    path for path in [*ROOT.glob(".*.yaml"), *ROOT.glob(".github/**/*.yml"), ROOT / "CITATION.cff"] if path.is_file()
]  # fmt: skip


@pytest.mark.parametrize("path", YAML, ids=[str(path.relative_to(ROOT)) for path in YAML])
def test_yaml_can_be_read(path):
    assert isinstance(yaml.safe_load(path.read_text(encoding="utf-8")), dict)


def test_the_citation_has_what_its_format_asks_for():
    """By hand what `cffconvert --validate`, which `launch/test --full` runs, says in full."""
    cited = yaml.safe_load(text("CITATION.cff"))
    assert {"cff-version", "message", "title", "authors", "version", "license"} <= cited.keys()
    assert cited["cff-version"] == "1.2.0"
    assert len(cited["references"]) >= 5
    for paper in cited["references"]:
        assert {"type", "title", "authors", "year"} <= paper.keys()
        assert all(author.keys() <= {"family-names", "given-names", "name"} for author in paper["authors"])


def test_the_workflow_calls_commands_that_exist():
    workflow = yaml.safe_load(text(".github", "workflows", "test.yml"))
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    called = {word for command in commands for word in command.split() if word.startswith("./")}
    assert called
    assert [word for word in sorted(called) if not (ROOT / word).is_file()] == []


def test_every_paper_of_a_method_is_cited():
    papers = set()
    for path in (ROOT / "hpctk" / "methods").glob("*.py"):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        if path.stem in ("adacons", "sasg", "saef", "grawa", "celgc"):
            papers |= set(re.findall(r"arXiv\s+(\d{4}\.\d{5})", docstring))
    assert len(papers) == 6
    assert set(re.findall(r"arXiv:(\d{4}\.\d{5})", text("CITATION.cff"))) == papers


def test_the_image_copies_files_that_exist():
    definition = text("packaging", "apptainer", "hpctk.def")
    files = re.search(r"^%files\n(.*?)^%", definition, re.DOTALL | re.MULTILINE)[1].split()[::2]
    assert "hpctk" in files
    assert [one for one in files if not (ROOT / one).exists()] == []


@pytest.mark.parametrize("section", ["post", "environment", "runscript", "test"])
def test_the_image_has_scripts_that_parse(section):
    definition = text("packaging", "apptainer", "hpctk.def") + "\n%"
    script = re.search(rf"^%{section}\n(.*?)^%", definition, re.DOTALL | re.MULTILINE)[1]
    subprocess.run(["sh", "-n"], input=script, text=True, check=True)


def test_spack_knows_what_the_package_needs():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    tree = ast.parse(text("packaging", "spack", "package.py"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "depends_on"]
    given = {ast.literal_eval(one.args[0]).partition("@")[0].removeprefix("py-") for one in calls}
    wanted = {re.match(r"[\w-]+", one)[0] for one in config["options"]["install_requires"].split()}
    assert wanted <= given


@pytest.mark.skipif(shutil.which("tclsh") is None, reason="not installed: tclsh (apt-get install tcl)")
def test_the_module_sets_what_a_job_needs():
    stand_ins = "".join(
        f"proc {name} {{args}} {{ puts \"{name} $args\" }}\n"
        for name in ("module-whatis", "conflict", "setenv", "prepend-path")
    )  # fmt: skip
    script = stand_ins + text("packaging", "module", "hpctk", hpctk.__version__)
    done = subprocess.run(
        ["tclsh"], input=script, text=True, capture_output=True, check=True, env={"PATH": "/usr/bin:/bin"}
    )
    prefix = f"/opt/hpctk/{hpctk.__version__}"
    assert done.stderr == ""
    assert {f"prepend-path PATH {prefix}/bin", "setenv OMP_NUM_THREADS 1", "conflict hpctk"} <= set(
        done.stdout.splitlines()
    )


def test_the_versions_of_python_that_are_claimed_are_tested():
    claimed = re.findall(r":: Python :: (3\.\d+)$", text("setup.cfg"), re.MULTILINE)
    stage = re.search(r"for version in (.*); do", text("launch", "test"))[1].split()
    assert claimed[0] == "3.11"
    assert set(claimed[1:]) <= set(stage)
    assert f"tested with {' and '.join(claimed)}" in text("docs", "install.md").replace(", ", " and ")


def test_what_is_pinned_runs_on_every_release_of_python_3_11():
    """Distributions keep the one they began with: Debian 12 has 3.11.2, for which soupsieve 4 is too new."""
    looked_at = []
    for line in text("launch", "constraints.txt").splitlines():
        name, _, version = line.partition("==")
        with contextlib.suppress(metadata.PackageNotFoundError):
            found = metadata.metadata(name)
            if found["Version"] == version:
                looked_at.append(name)
                assert SpecifierSet(found["Requires-Python"] or "").contains("3.11.0"), line
    assert "pytest" in looked_at


def test_the_workflow_runs_the_stages_of_the_tests():
    workflow = text(".github", "workflows", "test.yml")
    stages = re.search(r"stage: \[(.*)\]", workflow)[1].split(", ")
    default = re.search(r"\|\| stages=\((.*?)\)", text("launch", "test"))[1].split()
    assert stages == default
    assert "run: ./launch/test ${{ matrix.stage }}" in workflow
