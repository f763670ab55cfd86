# SPDX-License-Identifier: Apache-2.0
"""A warm interpreter: SGLang imported once, servers forked from it.

Importing SGLang costs some ten seconds of processor time in each of a server's three processes;
a pair on two cores spends half a minute on nothing else. `WarmInterpreter` starts this module as a
process that imports first and then forks a copy of itself per server. The copy runs
`python -m MODULE ARGUMENTS` as usual, and the server's own subprocesses are forked from it too
instead of imported anew. For servers on the CPU only: CUDA does not survive a fork.

Requests and replies are JSON lines on standard input and output:

    {"fork": [module, arguments, environment, log]}    -> {"pid": pid}
    {"poll": pid}                                       -> {"code": exit code or null}
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import runpy
import select
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pdlab.errors import NotReady, ServerDied
from pdlab.process import Command, Process, end_with_parent, tail


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
        command = Command("warm interpreter", "pdlab.warm", modules, self.environment)
        with log.open("wb") as output:
            self._child = subprocess.Popen(
                command.words(),
                cwd=log.parent,
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        self.process = Process(command, self._child.pid, log, self._child.poll)

    def fork(self, command: Command, log: Path) -> Process:
        """Start a command in a copy of this interpreter, with all output in `log`."""
        request = [command.module, command.arguments, dict(command.environment), str(log)]
        pid: int = self._ask({"fork": request})["pid"]
        codes: list[int] = []  # a process can be reaped only once

        def poll() -> int | None:
            if not codes and (code := self._ask({"poll": pid})["code"]) is not None:
                codes.append(code)
            return codes[0] if codes else None

        return Process(command, pid, log, poll)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        stdin, stdout = self._child.stdin, self._child.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(json.dumps(request).encode() + b"\n")
            stdin.flush()
            if not select.select([stdout], [], [], self.limit_s)[0]:
                raise NotReady(
                    f"SGLang was not imported after {self.limit_s:g} s (--timeout gives more); "
                    f"the end of {self.log}:\n{tail(self.log)}"
                )
            reply = stdout.readline()
        except OSError:
            reply = b""
        if not reply:
            raise ServerDied(
                f"{self.process.name} cannot import SGLang; the end of {self.log}:\n"
                + tail(self.log)
            )
        answer: dict[str, Any] = json.loads(reply)
        return answer

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
    for name in sys.argv[1:]:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:  # an optional module that this release does not have
                raise
    gc.freeze()  # keeps the collector from touching, hence copying, what the copies share
    for line in sys.stdin:
        request = json.loads(line)
        if "fork" in request:
            answer: dict[str, Any] = {"pid": _fork(replies.fileno(), *request["fork"])}
        else:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = {"code": os.waitstatus_to_exitcode(status) if pid else None}
        print(json.dumps(answer), file=replies, flush=True)


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
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _become(arguments: list[str], environment: dict[str, str], log: str) -> None:
    """Turn the copy into what a fresh interpreter would be: session, output, environment."""
    os.setsid()
    end_with_parent()
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
