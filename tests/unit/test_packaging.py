"""What centres are given fits the package: versions, dependencies, files that exist, scripts that parse."""

import ast
import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest

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


def test_every_paper_of_a_method_is_cited():
    papers = set()
    for path in (ROOT / "hpctk" / "methods").glob("*.py"):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        if path.stem in ("adacons", "sasg", "saef", "grawa", "celgc"):
            papers |= set(re.findall(r"arXiv\s+(\d{4}\.\d{5})", docstring))
    assert len(papers) == 5
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


def test_the_workflow_runs_the_stages_of_the_tests():
    workflow = text(".github", "workflows", "test.yml")
    stages = re.search(r"stage: \[(.*)\]", workflow)[1].split(", ")
    default = re.search(r"\|\| stages=\((.*?)\)", text("launch", "test"))[1].split()
    assert stages == default
    assert "run: ./launch/test ${{ matrix.stage }}" in workflow
