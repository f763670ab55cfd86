# SPDX-License-Identifier: Apache-2.0
"""Fresh virtual environments that hold just what a test names, without a package index."""

from __future__ import annotations

import os
import subprocess
import venv
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from seam.wheels import cache

SEAM_NEEDS = ("packaging", "rich", "pygments", "markdown-it-py", "mdurl")
"""The requirements of the package, and theirs."""


class Environment:
    """An environment with `pip`; packages come from this interpreter's or from `wheels`."""

    def __init__(self, folder: Path, packages: Iterable[str], wheels: Path) -> None:
        venv.create(folder, with_pip=True)
        self.bin = folder / "bin"
        self.variables = {
            **os.environ,
            "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_FIND_LINKS": str(wheels),
            "PIP_NO_INDEX": "1",
            "SEAM_CACHE": str(cache()),
        }
        self.variables.pop("PYTHONPATH", None)
        self._site = next((folder / "lib").glob("python*/site-packages"))
        self.lend(packages)

    def lend(self, packages: Iterable[str]) -> None:
        """Have packages of this interpreter, as links to their files, where they are not there."""
        for package in packages:
            distribution = metadata.distribution(package)
            files = distribution.files or ()
            for name in {file.parts[0] for file in files if file.parts[0] != ".."}:
                if not (self._site / name).exists():
                    (self._site / name).symlink_to(str(distribution.locate_file(name)))

    def run(
        self, commands: str, folder: Path, status: int = 0, **more: str
    ) -> subprocess.CompletedProcess[str]:
        """Run the commands of a user's shell in `folder`; they must end with `status`."""
        run = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", commands],
            cwd=folder,
            env={**self.variables, **more},
            capture_output=True,
            text=True,
        )
        assert run.returncode == status, f"{commands}\n{run.stdout}\n{run.stderr}"
        return run
