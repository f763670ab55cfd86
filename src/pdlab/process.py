# SPDX-License-Identifier: Apache-2.0
"""A started server: its own process group, its own log, and an end that leaves nothing behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pdlab.errors import LabError, ServerDied

TAIL_LINES = 25
TAIL_BYTES = 64 * 1024
LINE_WIDTH = 200
GONE_LIMIT_S = 15.0
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Command:
    """`python -m module arguments` under a name, with the environment it needs."""

    name: str
    module: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]

    def words(self) -> list[str]:
        """The command line that starts it in an interpreter of its own."""
        return [sys.executable, "-m", self.module, *self.arguments]


@dataclass
class Process:
    """A running command. `pid` leads a process group; `poll` reaps it and gives its exit code.

    `ended`: it was ended on purpose.
    """

    command: Command
    pid: int
    log: Path
    poll: Callable[[], int | None]
    ended: bool = False

    @property
    def name(self) -> str:
        return self.command.name

    def require_alive(self) -> None:
        """Raise ServerDied, with the end of the log, when the process has ended by itself."""
        code = self.poll()
        if code is not None and not self.ended:
            raise ServerDied(
                f"{self.name} ended by itself ({_reason(code)}); the end of {self.log}:\n"
                + tail(self.log)
            )

    def stop(self) -> None:
        """End the whole group and take away the shared memory that it had mapped.

        Lab servers hold nothing worth a graceful end, and SGLang's takes five seconds and leaves
        its shared memory behind all the same.
        """
        self.ended = True
        shared = set(_shared_memory(self.pid))
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        limit = time.monotonic() + GONE_LIMIT_S
        while self.poll() is None or any(group(self.pid)):
            if time.monotonic() > limit:
                raise LabError(f"{self.name} (process group {self.pid}) cannot be ended")
            time.sleep(0.02)
        for path in shared:
            path.unlink(missing_ok=True)


def spawn(command: Command, log: Path, directory: Path) -> Process:
    """Start a command in an interpreter of its own, in `directory`, with all output in `log`."""
    with log.open("wb") as output:
        child = subprocess.Popen(
            command.words(),
            cwd=directory,
            env=dict(command.environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=lead_group,
        )
    return Process(command, child.pid, log, child.poll)


def lead_group() -> None:
    """Make this process lead a group that ends as one, and end it with its parent.

    No session of its own: Linux shares processor time among sessions first (autogroups), and in
    one of several on few cores, a process that sleeps most of the time can wait seconds for a
    turn while the schedulers spin.
    """
    os.setpgid(0, 0)
    end_with_parent()


def end_with_parent() -> None:
    """Have the kernel end this process when its parent does, however that ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def group(leader: int) -> Iterator[int]:
    """The live processes of a process group; those that have ended and wait for their parent not
    among them."""
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            stat = Path(entry.path, "stat").read_text()
        except OSError:
            continue
        state, _, number = stat.rpartition(")")[2].split()[:3]
        if int(number) == leader and state not in "ZX":
            yield int(entry.name)


def tail(log: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log, each indented and cut to a readable width."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        text = ""
    last = [line[:LINE_WIDTH] for line in text.splitlines() if line.strip()][-lines:]
    return "\n".join(f"    {line}" for line in last or ["(the log is empty)"])


def _reason(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    return f"ended by {signal.Signals(-code).name}"


def _shared_memory(leader: int) -> Iterator[Path]:
    for pid in group(leader):
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue
        for line in maps.splitlines():
            if "/dev/shm/" in line and not line.endswith("(deleted)"):
                yield Path(line[line.index("/dev/shm/") :])
