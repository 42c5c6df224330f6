"""The text of job scripts: golden files, quoting, and what is refused; no Slurm needed."""

import argparse
import contextlib
import io
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest
from jobs import ROOT, clean_environment
from slurm_cases import CASES, GOLDEN

from hpctk.cli import slurm as command_line
from hpctk.errors import SettingError
from hpctk.slurm.options import KINDS, Options, from_layers, known, read_site, seconds
from hpctk.slurm.render import render, sbatch_quoted, shell_quoted, template

NASTY = ["x; rm -rf ~", "$(touch owned)", "`touch owned`", "it's", 'say "hi"', "back\\slash", "a # b", "-n", "ä"]

# pytest-mpi takes a test whose name is "mpi" for one that needs MPI, and skips it.
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind}.sbatch")


def rendered(kind, *words):
    parser = argparse.ArgumentParser()
    command_line.add_arguments(parser)
    return render(command_line.resolved(parser.parse_args(["render", kind, "--site", "/dev/null", *words])))


def hpctk(*words, **environ):
    return subprocess.run(
        [sys.executable, "-m", "hpctk", "slurm", *words], capture_output=True, text=True, timeout=60,
        env=clean_environment(**environ), stdin=subprocess.DEVNULL,
    )  # fmt: skip


def bash(text, **environ):
    return subprocess.run(["bash", "-c", text], capture_output=True, text=True, env=clean_environment(**environ))


@every_kind
def test_golden(kind):
    assert rendered(kind, *CASES[kind]) == (GOLDEN / f"{kind}.sbatch").read_text()


@every_kind
def test_a_template_is_what_it_renders_to(kind):
    assert render(Options(kind)) == template(kind) == (ROOT / "slurm" / f"{kind}.sbatch").read_text()


@every_kind
def test_templates_are_for_every_site(kind):
    text = template(kind)
    assert text.startswith("#!/usr/bin/env bash\n")
    rest = text.partition("\n")[2]
    # /dev/null is the same everywhere.
    assert re.findall(r"(?<![\w$}.\"*/])/[\w.]+", rest.replace(">/dev/null", "")) == []
    assert re.findall(r"#SBATCH.*\$", text) == [], "sbatch expands no variables"
    for line in ("--open-mode=append", "--requeue", "--signal=B:USR1@180"):
        assert f"#SBATCH {line}\n" in text
    assert bash(f"bash -n <<'END_OF_SCRIPT'\n{text}\nEND_OF_SCRIPT").returncode == 0


@every_kind
def test_outside_of_slurm_it_says_what_it_is(tmp_path, kind):
    done = bash(f"cd {tmp_path}\n{template(kind)}")
    assert done.returncode == 2
    assert done.stderr == "this is a job script: submit it with sbatch\n"


def test_what_happens_at_the_time_limit_is_the_same_in_all():
    def end(kind):
        text = template(kind)
        text = text[text.index("restarts=${SLURM_RESTART_COUNT:-0}") :]
        # torchrun must ignore the signal, which its processes inherit: there it is sent again and again.
        text = re.sub(r"^    # Until they listen.*\n.*sleep 10 .*\n", "", text, flags=re.M)
        # torchrun's status says nothing, so there its processes leave a note.
        return re.sub(
            r'^if \[ "\$rc" -ne 0 \] && \[ -e "\$saved".*?\nfi\nrm -f "\$saved"\n', "", text, flags=re.M | re.S
        )

    assert len({end(kind) for kind in KINDS}) == 1


@pytest.mark.parametrize("name", NASTY)
def test_values_are_harmless_to_the_shell(tmp_path, name):
    text = render(Options("mpi", job_name=name, partition=name, run=name, venv=name, modules=("m" + name,)))
    # A table's lines may hold no quotes; what else they hold is as harmless.
    text += render(Options("array", table=(re.sub(r"""['"\\]""", "", name),), run=name))
    # With everything it calls replaced: only what the values themselves do is left.
    calls = "module() { :; }; source() { :; }; mkdir() { :; }; srun() { :; }; scontrol() { :; }; exit() { :; }; "
    done = subprocess.run(
        ["bash", "-c", calls + text], cwd=tmp_path, capture_output=True, text=True,
        env=clean_environment(SLURM_JOB_NAME=name, SLURM_JOB_ID="1", SLURM_JOB_NODELIST="n1", SLURM_ARRAY_TASK_ID="0"),
    )  # fmt: skip
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []


def folders(lines):
    """Return the run's folder of each line of a sweep, as its job comes to it."""
    text = render(Options("array", job_name="sweep", table=tuple(lines)))
    calls = "mkdir() { :; }; srun() { printf 'folder %s\\n' \"$HPCTK_RUN\"; }; "
    found = []
    for i in range(len(lines)):
        done = bash(
            calls + text,
            SLURM_JOB_NAME="sweep", SLURM_JOB_ID="1", SLURM_JOB_NODELIST="n1", SLURM_ARRAY_TASK_ID=str(i),
        )  # fmt: skip
        assert done.stderr == ""
        found.append(re.search(r"^folder runs/sweep/(.+)$", done.stdout, re.M)[1])
    return found


def test_every_line_of_a_sweep_has_a_folder_of_its_own():
    plain = ["--method mean --seed 1", "--lr 0.05"]
    assert folders(plain) == ["method-mean-seed-1", "lr-0.05"]
    alike = [
        "--x 1", "--x -1", "--x --1", "--x=1", "-x 1", "x 1", "--lr 1e-3", "--lr 1e+3", "--lr 1e3", "--a b --c",
        "--a b-c", "--a b c", "--name ä", "--name ö", "ä", "ö", "..", "../..", f"--name {'a' * 300}",
        f"--name {'a' * 301}",
    ]  # fmt: skip
    found = folders(alike)
    assert len(set(found)) == len(alike)
    assert all("/" not in name and name not in (".", "..") and len(name) < 200 for name in found)
    # Wherever a line stands in a later table, its folder stays.
    assert folders([*plain, *reversed(alike)])[2:] == found[::-1]


def run_ddp(tmp_path, srun, text=None, **environ):
    """Start the job script of torchrun with an srun and an scontrol of the test's own; return the process."""
    for name, script in {"srun": srun, "scontrol": f'echo "$@" >>{tmp_path}/scontrol.said'}.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    environ = clean_environment(
        PATH=f"{tmp_path}:{os.environ['PATH']}", SLURM_JOB_NAME="ddp", SLURM_JOB_ID="7", SLURM_JOB_NODELIST="n1",
        SLURM_JOB_NUM_NODES="1", SLURM_CPUS_PER_TASK="1", **environ,
    )  # fmt: skip
    return subprocess.Popen(
        ["bash", "-c", template("ddp") if text is None else text], cwd=tmp_path, env=environ, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
    )  # fmt: skip


def test_torchruns_processes_hear_what_was_sent_before_they_listened(tmp_path):
    # As with torchrun: ignored at first, and 85 of the processes is 1 of srun.
    late = (
        "trap '' USR2; touch started; while [ ! -e listen ]; do sleep 0.05; done; "
        "trap ': >runs/ddp/saved-7; exit 1' USR2; for i in {1..200}; do sleep 0.05; done"
    )
    job = run_ddp(tmp_path, late, template("ddp").replace("sleep 10 ", "sleep 0.2 "))
    deadline = time.monotonic() + 60
    while not (tmp_path / "started").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    job.send_signal(signal.SIGUSR1)
    # The first signal is gone by then.
    while not job.stdout.readline().startswith("== USR1"):
        assert job.poll() is None
    time.sleep(0.1)
    (tmp_path / "listen").touch()
    said = job.communicate(timeout=60)[0]
    assert job.returncode == 85
    assert "== status 85: back into the queue" in said
    assert (tmp_path / "scontrol.said").read_text() == "requeue 7\n"


def test_two_slurms_on_a_machine_do_not_meet(tmp_path):
    """Job numbers are a Slurm's own, and jobs of torchrun meet at a port and under a name."""
    said = [
        run_ddp(tmp_path, 'echo "$@"', SLURM_CONF=conf).communicate(timeout=60)[0]
        for conf in ("/a/slurm.conf", "/b/slurm.conf")
    ]
    for pattern in (r"--rdzv-id=7-(\d+) ", r" (2\d{4}) --nnodes=1 "):
        first, second = (re.search(pattern, text)[1] for text in said)
        assert first != second


@pytest.mark.parametrize("word", [*NASTY, "", "{run}", "a{run}b", "{run}/$HOME", "'{run}'", "*", "{other}"])
def test_words_of_the_command_arrive_unchanged(word):
    done = bash(f"run='my run'; printf '%s|' {shell_quoted(word)}")
    assert done.stdout == word.replace("{run}", "my run") + "|"


@pytest.mark.parametrize("value", NASTY)
def test_sbatch_values_stand_in_double_quotes(value):
    quoted = sbatch_quoted(value)
    if quoted != value:
        assert re.fullmatch(r'"(?:[^"\\]|\\.)*"', quoted)
        assert re.sub(r"\\(.)", r"\1", quoted[1:-1]) == value


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["hpctk", "train", "digits"], 'python -m mpi4py -m hpctk train digits --run "$run" --resume'),
        (["hpctk", "train", "digits", "--run", "r"], "python -m mpi4py -m hpctk train digits --run r"),
        (["python", "train.py"], "python -m mpi4py train.py"),
        (["hpctk", "run", "train.py"], "hpctk run train.py"),
        (["hpctk", "calibrate"], "python -m mpi4py -m hpctk calibrate"),
        (["./a.out", "-x"], "./a.out -x"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_programs_get_what_they_need(words, line):
    assert f"\ncommand=({line})\n" in render(Options("mpi", command=tuple(words)))


def test_torchrun_starts_programs_as_they_are():
    assert "\ncommand=(python train.py)\n" in render(Options("ddp", command=("python", "train.py")))


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"kind": "mpx"}, "allowed are mpi, mpirun, horovod, ddp, gpu, array"),
        ({"nodes": 0}, "nodes=0: need a whole number from 1 to"),
        ({"nodes": "2"}, "nodes='2'"),
        ({"time": "soon"}, "need MINUTES, MINUTES:SECONDS"),
        ({"time": "1:2:3:4"}, "need MINUTES, MINUTES:SECONDS"),
        ({"time": "00:03:00"}, "not longer than warning_s=180"),
        ({"time": "60", "warning_s": 3600}, "not longer than warning_s=3600"),
        ({"mem": "much"}, "such as 16G"),
        ({"mpi": "pmix; x"}, "`srun --mpi=list`"),
        ({"mail_type": "FAIL"}, "needs mail"),
        ({"mail": "me@x", "mail_type": "NEVER"}, "of NONE, BEGIN"),
        ({"mail": "me@x", "mail_type": 3}, "mail_type=3: need one or more, with commas, of NONE"),
        ({"mail": "me@x", "mail_type": ["END"]}, "mail_type=['END']: need one or more"),
        ({"mail": "me@x, you@x"}, "need one address"),
        ({"time": 60}, "time=60: need MINUTES"),
        ({"partition": 7}, "partition=7: need a text of 1 to 200"),
        ({"job_name": "a/b"}, "may neither hold /"),
        ({"job_name": ".."}, "made of dots"),
        ({"job_name": "a\nb"}, "in one line"),
        ({"partition": "a\n#SBATCH --x"}, "in one line"),
        ({"sbatch": ("--open-mode=truncate",)}, "the template needs its own"),
        ({"sbatch": ("exclusive",)}, "need --OPTION"),
        ({"sbatch": ("--x=1\n2",)}, "printable"),
        ({"gpus_per_node": 2}, "mpi has no such option, only gpu, ddp, horovod have; mpi knows job_name, nodes"),
        ({"table": ("--seed 1",)}, "only array has"),
        ({"kind": "array", "command": ("hpctk",)}, "a sweep needs its lines"),
        ({"kind": "array", "table": ('--name "a b"',)}, "neither quotes nor a backslash"),
        ({"kind": "array", "table": ("--name it's",)}, "neither quotes nor a backslash"),
        ({"kind": "array", "table": ("--name a\\ b",)}, "neither quotes nor a backslash"),
        ({"kind": "array", "table": ("--seed 1", "--seed 2", "--seed  1")}, "stands there twice"),
        ({"modules": "gcc"}, "need a list of texts"),
        ({"command": ("python", "a\0b")}, "command: 'a\\x00b' holds a NUL byte"),
        ({"setup": ("ulimit\0",)}, "setup=('ulimit\\x00',): need a list of texts of printable characters"),
        ({"run": "runs/\0"}, "need a text of 1 to 200 printable characters"),
    ],
    ids=lambda value: ", ".join(f"{k}={v!r}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_wrong_options_are_named_with_what_is_allowed(given, complaint):
    with pytest.raises(SettingError) as caught:
        Options(**{"kind": "mpi", **given})
    assert complaint in str(caught.value)


def test_unknown_options_list_the_known_ones():
    with pytest.raises(SettingError, match="no option 'node' for mpi: known are job_name, nodes, "):
        from_layers("mpi", {"node": 2})
    done = hpctk("render", "mpi", "--node", "2")
    assert done.returncode == 2
    assert "unknown: --node; did you mean --nodes? known are --help, --job-name, --nodes" in done.stderr
    assert "--gpus-per-node" not in done.stderr


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90", 5400), ("1:30", 90), ("2:00:00", 7200), ("1-12", 129600), ("1-0:30", 88200), ("2-1:1:1", 176461)],
)
def test_time_limits(text, expected):
    assert seconds(text) == expected


def test_defaults_of_a_site(tmp_path):
    file = tmp_path / "site.toml"
    file.write_text('partition = "batch"\nmpi = "pmi2"\nmodules = ["gcc"]\n[gpu]\npartition = "a100"\nnodes = 4\n')
    assert read_site(file, "mpi") == {"partition": "batch", "mpi": "pmi2", "modules": ["gcc"]}
    # mpirun has no srun to tell about MPI.
    assert read_site(file, "mpirun") == {"partition": "batch", "modules": ["gcc"]}
    assert read_site(file, "gpu")["partition"] == "a100"
    done = hpctk("render", "gpu", "--nodes", "2", HPCTK_SLURM_SITE=str(file))
    assert "#SBATCH --partition=a100\n" in done.stdout
    assert "#SBATCH --nodes=2\n" in done.stdout
    assert "\nmodule load gcc\n" in done.stdout
    assert "\nmpi=pmi2\n" in done.stdout


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('partitoin = "x"', "no option 'partitoin': known are account, "),
        ("[gpus]\nnodes = 1", "no kind [gpus]: known are mpi, "),
        ("nodes = 0", "nodes=0"),
        ("[array]\ntable = ['x']", "no option 'table'"),
        ("nodes =", "is not TOML"),
        ("modules = 'gcc'", "modules='gcc': need a list"),
        ("mail = 'me@x'\nmail_type = 3", "mail_type=3: need one or more"),
    ],
    ids=["unknown", "kind", "range", "of a job", "no TOML", "no list", "no text"],
)
def test_mistakes_in_a_sites_file_are_named(tmp_path, text, complaint):
    file = tmp_path / "site.toml"
    file.write_text(text)
    with pytest.raises(SettingError, match=re.escape(str(file))) as caught:
        read_site(file, "mpi")
    assert complaint in str(caught.value)


def test_a_sites_file_that_is_not_there():
    done = hpctk("render", "mpi", "--site", "nowhere.toml")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "hpctk slurm: nowhere.toml: cannot be read (No such file or directory)\n"
    assert hpctk("render", "mpi", HPCTK_SLURM_SITE="nowhere.toml").stderr == done.stderr
    assert hpctk("render", "mpi", HPCTK_SLURM_SITE="", XDG_CONFIG_HOME="nowhere").returncode == 0


def test_a_table_from_a_file(tmp_path):
    file = tmp_path / "table"
    file.write_text("# methods\n--method mean --seed 1\n\n--method saef --lr 0.01\n")
    text = rendered("array", "--table", str(file), "--", "hpctk", "train", "digits")
    assert "table=(\n    '--method mean --seed 1'\n    '--method saef --lr 0.01'\n)\n" in text
    assert "#SBATCH --array=0-1\n" in text
    file.write_text("\n")
    with pytest.raises(SettingError, match="has no line"):
        rendered("array", "--table", str(file))
    with pytest.raises(SettingError, match="give one of them"):
        rendered("array", "--table", str(file), "--methods", "mean")


def test_submit_without_slurm_says_so_and_writes_nothing(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "hpctk", "slurm", "submit", "mpi"], capture_output=True, text=True, cwd=tmp_path,
        env=clean_environment(PATH=str(tmp_path), PYTHONPATH=str(ROOT)), timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("hpctk slurm: no sbatch here: submit on a login node")
    assert list(tmp_path.iterdir()) == []


def test_submit_to_a_slurm_that_is_gone_says_so_at_once(tmp_path):
    fake = tmp_path / "sbatch"
    fake.write_text("#!/bin/sh\nexec sleep 60\n")
    fake.chmod(0o755)
    done = hpctk("submit", "mpi", PATH=f"{tmp_path}:/usr/bin:/bin", SLURM_CONF=str(tmp_path / "gone"))
    assert done.returncode == 2
    assert "gone: no such file; is that Slurm down?" in done.stderr


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        ("echo 'sbatch: fatal: Could not establish a configuration source' >&2; exit 1", "finds no configuration"),
        ("echo 'sbatch: error: Batch job submission failed: No' >&2; exit 1", "does not take this job: Batch job"),
        ("test $1 = --test-only || { echo 'sbatch: error: full' >&2; exit 1; }", "sbatch failed: full. The script is"),
        ("exit 3", "it does not say why"),
    ],
    ids=["no configuration", "refused", "refused later", "silent"],
)
def test_what_sbatch_says_is_passed_on(tmp_path, script, complaint):
    fake = tmp_path / "sbatch"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    done = hpctk("submit", "mpi", "--run", str(tmp_path / "run"), PATH=f"{tmp_path}:/usr/bin:/bin", SLURM_CONF="")
    assert done.returncode == 2
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr


def test_submit_says_where_to_look(tmp_path):
    fake = tmp_path / "sbatch"
    fake.write_text("#!/bin/sh\ntest $1 = --test-only || echo '17;cluster'\n")
    fake.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_CONF": "", "HPCTK_SLURM_SITE": "/dev/null"}
    done = hpctk("submit", "mpi", "--job-name", "a b", "--run", str(tmp_path / "r"), **environ)
    assert done.returncode == 0, done.stderr
    for line in (
        "job         17\n",
        "log         a b-17.out\n",
        f"run         {tmp_path}/r\n",
        f"{tmp_path}/r/stats; ",
    ):
        assert line in done.stdout
    assert '#SBATCH --job-name="a b"\n' in (tmp_path / "r" / "job.sbatch").read_text()


def test_every_option_has_its_word_on_the_command_line():
    for kind in KINDS:
        with pytest.raises(SystemExit), contextlib.redirect_stdout(io.StringIO()) as shown:
            rendered(kind, "--help")
        flags = set(re.findall(r"^  --([a-z-]+)", shown.getvalue(), re.MULTILINE))
        names = {name.replace("_", "-").replace("modules", "module") for name in known(kind)}
        extra = {"table", "methods", "seeds"} if kind == "array" else set()
        assert flags == names | {"site"} | extra


def test_the_example_fits_a_slurm_on_one_machine():
    (line,) = [line for line in command_line.__doc__.splitlines() if "render mpi --nodes" in line]
    words = shlex.split(line.partition(" render mpi ")[2])
    text = rendered("mpi", *words)
    assert "#SBATCH --nodes=1\n" in text
    assert "#SBATCH --ntasks-per-node=2\n" in text
