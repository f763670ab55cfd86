# SPDX-License-Identifier: Apache-2.0
"""A warm interpreter: SGLang imported once, servers forked from it.

Importing SGLang costs some ten seconds of processor time in each of a server's three processes;
a pair on two cores spends half a minute on nothing else. `WarmInterpreter` starts this module as a
process that imports first and then forks a copy of itself per server. The copy runs
`python -m MODULE ARGUMENTS` as usual, and the server's own subprocesses are forked from it too
instead of imported anew. For servers on the CPU only: CUDA does not survive a fork.

Requests and replies are JSON lines on standard input and output; a reply has its request's number:

    {"number": n, "fork": [module, arguments, environment, log]}  ->  {"number": n, "pid": pid}
    {"number": n, "poll": pid}                     ->  {"number": n, "code": exit code or null}
"""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import multiprocessing
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pdlab.errors import NotReady, ServerDied
from pdlab.process import Command, Process, lead_group, tail

READ_BYTES = 4096
# The signals that make the lab end what it started.
UNWINDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class WarmInterpreter:
    """The client side: starts the interpreter and forks servers from it."""

    def __init__(
        self, modules: tuple[str, ...], environment: Mapping[str, str], log: Path, limit_s: float
    ) -> None:
        """Start importing `modules` and return at once; the first fork waits for the imports.

        An answer that takes longer than `limit_s` seconds is an error.
        """
        self.environment = dict(environment)
        self.log = log
        self.limit_s = limit_s
        self._numbers = itertools.count()
        self._read = b""
        command = Command("warm interpreter", "pdlab.warm", modules, self.environment)
        with log.open("wb") as output:
            self._child = subprocess.Popen(
                command.words(),
                bufsize=0,
                cwd=log.parent,
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                preexec_fn=lead_group,
            )
        self.process = Process(command, self._child.pid, log, self._child.poll)

    def fork(self, command: Command, log: Path) -> Process:
        """Start a command in a copy of this interpreter, with all output in `log`."""
        request = [command.module, command.arguments, dict(command.environment), str(log)]
        pid: int = self._ask({"fork": request})["pid"]

        def poll() -> int | None:
            code: int | None = self._ask({"poll": pid})["code"]
            return code

        return Process(command, pid, log, poll)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        number = next(self._numbers)
        self._write(json.dumps({"number": number, **request}).encode() + b"\n")
        while line := self._line():
            reply: dict[str, Any] = json.loads(line)
            # A signal may have come between an earlier request and its reply.
            if reply["number"] == number:
                return reply
        raise ServerDied(
            f"{self.process.name} cannot import SGLang; the end of {self.log}:\n{tail(self.log)}"
        )

    def _write(self, line: bytes) -> None:
        assert self._child.stdin is not None
        # Half a request would spoil all that follow it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, UNWINDING)
        try:
            with suppress(BrokenPipeError):
                while line:
                    line = line[self._child.stdin.write(line) :]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _line(self) -> bytes:
        """The next line of the output, without its end; empty at the end of the output."""
        assert self._child.stdout is not None
        while b"\n" not in self._read:
            if not select.select([self._child.stdout], [], [], self.limit_s)[0]:
                raise NotReady(
                    f"SGLang was not imported after {self.limit_s:g} s (--timeout gives more); "
                    f"the end of {self.log}:\n{tail(self.log)}"
                )
            part = self._child.stdout.read(READ_BYTES)
            if not part:
                return b""
            self._read += part
        line, _, self._read = self._read.partition(b"\n")
        return line

    def stop(self) -> None:
        """End the interpreter; the servers forked from it end with it."""
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None
            pipe.close()
        self.process.stop()


def main() -> None:
    """Import the modules named on the command line, then answer requests until the input ends."""
    # Whatever an import prints must not get among the replies.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    first, *others = sys.argv[1:]
    importlib.import_module(first)
    for name in others:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            # A release need not have all of them; what they import it must have.
            if not f"{name}.".startswith(f"{error.name}."):
                raise
    with suppress(ImportError):
        import setproctitle

        setproctitle.getproctitle()  # finds the title's place, which a cleared environment hides
    gc.freeze()  # keeps the collector from touching, hence copying, what the copies share
    codes: dict[int, int | None] = {}  # of the copies, None while they run
    for line in sys.stdin:
        request = json.loads(line)
        if "fork" in request:
            pid = _fork(replies.fileno(), *request["fork"])
            codes[pid] = None
            answer: dict[str, Any] = {"pid": pid}
        else:
            pid = request["poll"]
            if codes[pid] is None:
                ended, status = os.waitpid(pid, os.WNOHANG)
                codes[pid] = os.waitstatus_to_exitcode(status) if ended else None
            answer = {"code": codes[pid]}
        print(json.dumps({"number": request["number"], **answer}), file=replies, flush=True)


def _fork(
    replies: int, module: str, arguments: list[str], environment: dict[str, str], log: str
) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.close(replies)
        _become(arguments, environment, log)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _become(arguments: list[str], environment: dict[str, str], log: str) -> None:
    """Turn the copy into what a fresh interpreter would be: group, output, environment."""
    lead_group()
    null = os.open(os.devnull, os.O_RDONLY)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # TMPDIR may be another one
    sys.argv[1:] = arguments
    _fork_instead_of_spawn()


def _fork_instead_of_spawn() -> None:
    set_start_method = multiprocessing.set_start_method

    def choose(method: str | None, force: bool = False) -> None:
        set_start_method("fork" if method == "spawn" else method, force=force)

    multiprocessing.set_start_method = choose


if __name__ == "__main__":
    main()
