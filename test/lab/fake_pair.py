# SPDX-License-Identifier: Apache-2.0
"""A pair whose servers are threads of the test: asked and told like SGLang's, in any state."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from pdlab.control import QUEUES
from pdlab.health import PATH
from pdlab.pair import Pair, Server
from pdlab.ports import HOST
from pdlab.process import Command, Process

TOKENS = (7, 8)
HEALTH = (PATH, "/health")


class FakeProcess(Process):
    """A process that a test sees stopped; there is nothing to end."""

    def __init__(self, name: str, log: Path) -> None:
        words = ("--disaggregation-bootstrap-port", "1")
        super().__init__(Command(name, "", words, {}), 0, log, lambda: self.code)
        self.code: int | None = None

    def stop(self, *_: Any, **__: Any) -> None:
        self.code = 0


class FakeServer:
    """Answers every path; what it says is what the test sets, what it was told is kept."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.load = dict.fromkeys(("running", *QUEUES), 0)
        self.rows = {"free": 4}
        self.health = 200
        self.tokens = TOKENS
        self.told: list[tuple[str, Any]] = []
        log = folder / f"{name}.log"
        log.touch()
        self.process = FakeProcess(name, log)

    def paths(self) -> list[str]:
        """What it was told beside requests and questions about its state."""
        asked = ("/generate", "/v1/loads", "/server_info", "/model_info", "/flush_cache", *HEALTH)
        return [path for path, _ in self.told if path not in asked]

    async def answer(self, request: web.Request) -> web.Response:
        """The reply to any request."""
        body = await request.json() if request.can_read_body else None
        self.told.append((request.path, body))
        if request.path in HEALTH:
            return web.json_response({}, status=self.health)
        queues = {key: self.load[name] for name, key in QUEUES.items()}
        rank = {"num_running_reqs": self.load["running"], "num_waiting_reqs": 0}
        said: dict[str, Any] = {
            "/generate": {
                "output_ids": self.tokens,
                "meta_info": {"finish_reason": {"type": "length"}},
            },
            "/model_info": {"model_path": "weights"},
            "/server_info": {"internal_states": [{"metadata_slots": self.rows}]},
            "/v1/loads": {"loads": [{**rank, "num_used_tokens": 0, "disaggregation": queues}]},
        }
        return web.json_response(said.get(request.path, {}))

    @contextmanager
    def serving(self) -> Iterator[Server]:
        """The server, up on a port of its own."""
        loop = asyncio.new_event_loop()

        async def start() -> tuple[web.AppRunner, int]:
            app = web.Application()
            app.router.add_route("*", "/{path:.*}", self.answer)
            runner = web.AppRunner(app)
            await runner.setup()
            await web.TCPSite(runner, HOST, 0).start()
            return runner, runner.addresses[0][1]

        runner, port = loop.run_until_complete(start())
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        try:
            yield Server(self.process, f"http://{HOST}:{port}", "")
        finally:
            asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()


class FakePair:
    """Prefill and decode; requests go to decode's URL, as through a router."""

    def __init__(self, folder: Path) -> None:
        self.prefill, self.decode = FakeServer("prefill", folder), FakeServer("decode", folder)

    @contextmanager
    def up(self) -> Iterator[Pair]:
        """The pair while it serves."""
        with ExitStack() as stack:
            servers = [stack.enter_context(one.serving()) for one in (self.prefill, self.decode)]
            yield Pair(servers[1].url, tuple(servers), 0.0)
