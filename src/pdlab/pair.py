# SPDX-License-Identifier: Apache-2.0
"""A prefill server, a decode server and the router between them; or one aggregated server."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pdlab
from pdlab import ports, preflight, router
from pdlab.errors import LabError, NotReady
from pdlab.priority import put_schedulers_last
from pdlab.process import Command, Process, spawn, tail
from pdlab.settings import Device, Model, Placement, Role, Settings, environment, server_arguments
from pdlab.trees import Tree
from pdlab.warm import WarmInterpreter

SERVER = "sglang.launch_server"
# Imported once per tree; those that a release does not have are left out.
WARM_MODULES = (
    SERVER,
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.models.registry",
    "sglang.srt.speculative.eagle_worker_v2",
    "mooncake.engine",
)
# Anything that says a server listens; /health would cost a second on a stock server.
READY_PATHS = {"sglang": "/model_info", "router": "/readiness"}
NOTHING: Mapping[Role, Tree] = {}
POLL_S = 0.1
ANSWER_S = 5.0


@dataclass(frozen=True)
class Server:
    """A process that answers HTTP at `url` once `ready` does."""

    process: Process
    url: str
    ready: str

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + self.ready, timeout=ANSWER_S) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, OSError):
            return False


@dataclass(frozen=True)
class Pair:
    """Servers that are up. Requests go to `url`; an aggregated server is a pair of one."""

    url: str
    servers: tuple[Server, ...]
    seconds: float

    @property
    def decode(self) -> Server:
        """The server that decodes, whose health is probed."""
        return next(s for s in self.servers if s.process.name in ("decode", "aggregated"))

    @property
    def prefill(self) -> Server:
        """The server that prefills."""
        return next(s for s in self.servers if s.process.name in ("prefill", "aggregated"))

    @property
    def commands(self) -> tuple[tuple[str, ...], ...]:
        """The command line of each server."""
        return tuple(tuple(server.process.command.words()) for server in self.servers)

    def require_alive(self) -> None:
        """Raise ServerDied when one of the servers has ended by itself."""
        for server in self.servers:
            server.process.require_alive()


class Launcher:
    """Starts servers, warm where that is possible, and ends all of them when it is closed."""

    def __init__(
        self,
        device: Device,
        limit_s: float,
        directory: Path,
        cold: bool = False,
        more: Mapping[str, str] | None = None,
    ) -> None:
        """`directory` takes the logs; a server has `limit_s` seconds to get ready.

        `cold` starts each server in an interpreter of its own, as everywhere on a GPU. `more` is
        for the environment of all servers.
        """
        self.device = device
        self.limit_s = limit_s
        self.directory = directory
        self.more = more or {}
        self.cold = cold or device is Device.CUDA
        self._standin = preflight.standin_path(device)
        self._warm: dict[tuple[Path, ...], WarmInterpreter] = {}
        self._numbers = itertools.count(1)
        self._stack = ExitStack()

    def __enter__(self) -> Launcher:
        self.directory.mkdir(parents=True, exist_ok=True)
        # Short, for SGLang keeps Unix sockets in it, whose paths may have 107 characters.
        self._temporary = Path(tempfile.mkdtemp(prefix="pdlab-"))
        self._stack.callback(shutil.rmtree, self._temporary, ignore_errors=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def environment(self, tree: Tree, settings: Settings | None = None) -> Mapping[str, str]:
        """Environment of a server that runs from `tree`."""
        own = Path(pdlab.__file__).parent.parent
        path = (*tree.path, *self._standin, own)
        chosen = dict(settings.environment) if settings else {}
        return {**environment(self.device, path, self._temporary), **chosen, **self.more}

    def warm_up(self, *trees: Tree) -> None:
        """Begin to import the packages of `trees`, all at once, and return without waiting."""
        for tree in trees:
            if not self.cold and tree.path not in self._warm:
                log = self.directory / f"00-{tree.label}-import.log"
                warm = WarmInterpreter(WARM_MODULES, self.environment(tree), log, self.limit_s)
                self._stack.callback(warm.stop)
                self._warm[tree.path] = warm

    @contextmanager
    def pair(
        self,
        tree: Tree,
        settings: Settings,
        model: Model,
        port: int | None = None,
        others: Mapping[Role, Tree] = NOTHING,
    ) -> Iterator[Pair]:
        """Prefill, decode and router, ready for requests; `port` is the router's.

        `others`: the roles that run from another tree, as in a fleet that is half upgraded.
        """
        start = time.monotonic()
        with ExitStack() as stack:
            front = ports.require(port) if port is not None else None
            prefill_at, decode_at = self._placements(ports.free(5))
            prefill, decode = (
                self._server(stack, role, others.get(role, tree), settings, model, place)
                for role, place in ((Role.PREFILL, prefill_at), (Role.DECODE, decode_at))
            )
            self._wait(prefill, decode)
            if self.device is Device.CPU:
                put_schedulers_last(prefill.process.pid, decode.process.pid)
            assert prefill_at.bootstrap_port is not None
            entry = stack.enter_context(
                self.routed(tree, prefill, prefill_at.bootstrap_port, decode, front)
            )
            yield Pair(entry.url, (prefill, decode, entry), time.monotonic() - start)

    @contextmanager
    def routed(
        self,
        tree: Tree,
        prefill: Server,
        bootstrap_port: int,
        decode: Server,
        port: int | None = None,
    ) -> Iterator[Server]:
        """A router between two servers that are up; `port` is where it listens, if that matters."""
        numbers = ports.free(2)
        front = numbers.pop() if port is None else port
        command = Command(
            "router",
            "pdlab.router",
            router.arguments(front, numbers.pop(), prefill.url, bootstrap_port, decode.url),
            self.environment(tree),
        )
        with ExitStack() as stack:
            process = spawn(command, self._log(tree, "router"), self._temporary)
            stack.callback(process.stop)
            entry = Server(process, f"http://{ports.HOST}:{front}", READY_PATHS["router"])
            self._wait(entry, prefill, decode)
            yield entry

    @contextmanager
    def aggregated(self, tree: Tree, settings: Settings, model: Model) -> Iterator[Pair]:
        """One server that does both phases: the reference for tokens."""
        start = time.monotonic()
        with ExitStack() as stack:
            port, nccl_port = ports.free(2)
            place = Placement(port, nccl_port)
            server = self._server(stack, Role.AGGREGATED, tree, settings, model, place)
            self._wait(server)
            yield Pair(server.url, (server,), time.monotonic() - start)

    @contextmanager
    def joining(
        self, role: Role, tree: Tree, settings: Settings, model: Model
    ) -> Iterator[tuple[Server, int]]:
        """One more server beside a pair, and the bootstrap port it was given, for a prefill."""
        with ExitStack() as stack:
            port, nccl_port, bootstrap_port = ports.free(3)
            place = Placement(port, nccl_port, bootstrap_port)
            server = self._server(stack, role, tree, settings, model, place)
            self._wait(server)
            yield server, bootstrap_port

    def _placements(self, numbers: list[int]) -> tuple[Placement, Placement]:
        gpus = _gpus() if self.device is Device.CUDA else 0
        shares = gpus == 1
        prefill = Placement(numbers.pop(), numbers.pop(), numbers.pop(), 0, shares)
        return prefill, Placement(numbers.pop(), numbers.pop(), None, int(gpus > 1), shares)

    def _server(
        self,
        stack: ExitStack,
        role: Role,
        tree: Tree,
        settings: Settings,
        model: Model,
        place: Placement,
    ) -> Server:
        command = Command(
            role.value,
            SERVER,
            server_arguments(role, settings, model, self.device, place),
            self.environment(tree, settings),
        )
        log = self._log(tree, role.value)
        if self.cold:
            process = spawn(command, log, self._temporary)
        else:
            self.warm_up(tree)
            process = self._warm[tree.path].fork(command, log)
        stack.callback(process.stop)
        return Server(process, f"http://{ports.HOST}:{place.port}", READY_PATHS["sglang"])

    def _log(self, tree: Tree, name: str) -> Path:
        return self.directory / f"{next(self._numbers):02}-{tree.label}-{name}.log"

    def _wait(self, *servers: Server) -> None:
        """Return when all answer; raise when one ends, or when the time limit is over."""
        limit = time.monotonic() + self.limit_s
        waiting = list(servers)
        while waiting:
            for server in servers:
                server.process.require_alive()
            waiting = [server for server in waiting if not server.answers()]
            if waiting and time.monotonic() > limit:
                late = waiting[0].process
                raise NotReady(
                    f"{late.name} was not ready after {self.limit_s:g} s (--timeout gives more); "
                    f"the end of {late.log}:\n{tail(late.log)}"
                )
            time.sleep(POLL_S if waiting else 0)


def _gpus() -> int:
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise LabError("--device cuda, but nvidia-smi lists no GPU here") from error
    return len(listed.stdout.strip().splitlines())
