# SPDX-License-Identifier: Apache-2.0
"""Build `.venv` from the pinned requirement files: `make setup`.

Runs on a bare Python before anything is installed, so it uses the standard library alone. Does
nothing when `.venv` already is what the requirement files ask for; goes on where it was stopped.
"""

from __future__ import annotations

import ctypes.util
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
REQUIREMENTS = ROOT / "requirements"
MARK = VENV / ".setup"  # the digest of what the environment was built from

PYTHON = (3, 11)  # the interpreter SGLang 0.5.23's wheel is built for
DISK_GB = 12.0  # environment 8, built trees and wheels 3, what pip unpacks 1
# Debian package -> the library it brings.
LIBRARIES = {
    "libibverbs1": "ibverbs",
    "librdmacm1": "rdmacm",
    "libnuma1": "numa",
    "libcurl4": "curl",
}
# The report page's test looks at it in a browser; the first is the one that set-up installs.
BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")


class SetupError(Exception):
    """Set-up can't go on; the message says what is wrong and what to do."""


def check_machine() -> None:
    """Refuse a machine on which the steps below can't succeed, before the first download."""
    have = sys.version_info[:2]
    if have != PYTHON:
        raise SetupError(
            f"Python {PYTHON[0]}.{PYTHON[1]} is needed, this is {have[0]}.{have[1]} "
            f"({sys.executable}). Name another one: make setup PYTHON=/path/to/python3.11"
        )
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise SetupError(
            f"the lab runs on Linux x86_64, this is {platform.system()} {platform.machine()}. "
            "The series and `seam` run anywhere: pip install sglang-pd-series"
        )
    if shutil.which("git") is None:
        raise SetupError("git is not installed. Debian: apt-get install git")
    if not os.access(ROOT, os.W_OK):
        raise SetupError(f"{ROOT} is not writable for user {os.getuid()}: check its owner")
    if not VENV.exists() and (free := shutil.disk_usage(ROOT).free / 1e9) < DISK_GB:
        raise SetupError(f"{DISK_GB:.0f} GB of disk are needed at {ROOT}, {free:.1f} GB are free")


def install_libraries() -> str:
    """Install the shared libraries Mooncake loads, or name their packages when not root."""
    missing = [package for package, name in LIBRARIES.items() if not ctypes.util.find_library(name)]
    if not missing:
        return "all there"
    if not _may_install():
        raise SetupError(
            f"missing system packages: {' '.join(missing)}. "
            f"Install them and run again: sudo apt-get install -y {' '.join(missing)}"
        )
    _apt_install(missing)
    return " ".join(missing)


def install_browser() -> str:
    """Install a browser for one test, which is skipped without; never a reason to stop."""
    if any(map(shutil.which, BROWSERS)):
        return "there"
    wanted = BROWSERS[0]
    said = f"none: the report page's test is skipped. Debian: sudo apt-get install -y {wanted}"
    if not _may_install():
        return said
    try:
        _apt_install([wanted])
    except SetupError:
        return said
    return wanted


def _may_install() -> bool:
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


def _apt_install(packages: list[str]) -> None:
    command = ["apt-get", "install", "-y", "-q", "--no-install-recommends", *packages]
    if subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode:
        _run(["apt-get", "update", "-q"])  # a fresh machine has no package lists yet
        _run(command)


def create_venv() -> str:
    """Create the virtual environment unless it is there and its interpreter starts."""
    python = VENV / "bin" / "python"
    if python.exists() and subprocess.run([python, "-c", "import pip"]).returncode == 0:
        return "kept"
    venv.create(VENV, with_pip=True, clear=VENV.exists())
    return str(VENV.relative_to(ROOT))


def pip_install(*args: str) -> str:
    """`pip install` in the environment; its progress bar is shown on a terminal."""
    quiet = [] if sys.stdout.isatty() else ["-q"]
    _run([str(VENV / "bin" / "python"), "-m", "pip", "install", *quiet, *args])
    return ""


def digest() -> str:
    """What the environment is built from."""
    files = [*sorted(REQUIREMENTS.glob("*.txt")), ROOT / "pyproject.toml", Path(__file__)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _run(command: list[str]) -> None:
    """Run a command; its output is passed through on a terminal, else shown when it fails."""
    show = sys.stdout.isatty()
    done = subprocess.run(
        command, cwd=ROOT, text=True, capture_output=not show, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        tail = "" if show else "\n" + "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise SetupError(f"`{' '.join(command)}` failed with exit code {done.returncode}{tail}")


def main() -> int:
    if MARK.exists() and MARK.read_text() == digest():
        print("setup: .venv is up to date")
        return 0
    lab, torch = str(REQUIREMENTS / "lab.txt"), str(REQUIREMENTS / "torch.txt")
    steps = [
        ("system libraries", install_libraries),
        ("a browser to test the report page with", install_browser),
        ("virtual environment", create_venv),
        ("SGLang, router, transfer engine, tests", lambda: pip_install("--no-deps", "-r", lab)),
        ("torch and its CUDA libraries (5.5 GB)", lambda: pip_install("-r", torch)),
        ("this project", lambda: pip_install("--no-deps", "--no-build-isolation", "-e", str(ROOT))),
    ]
    try:
        check_machine()
        begin = time.monotonic()
        for number, (name, step) in enumerate(steps, 1):
            print(f"setup [{number}/{len(steps)}] {name} …", flush=True)
            since = time.monotonic()
            said = step()
            print(f"      {time.monotonic() - since:5.0f} s  {said}", flush=True)
        MARK.write_text(digest())
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup: stopped; run it again to go on", file=sys.stderr)
        return 130
    print(f"setup: ready after {time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
