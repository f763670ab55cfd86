# SPDX-License-Identifier: Apache-2.0
"""A scheduler stands still exactly as long as it is told to, and a server's refusal is an error."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from pdlab import process
from pdlab.control import get, halted, load, stopped
from pdlab.errors import LabError
from pdlab.pair import Server
from pdlab.process import Command, Process, group, spawn

SERVER = """
import subprocess, sys, time
if sys.argv[1:]:
    subprocess.Popen([sys.argv[1], "600"], executable="/bin/sleep")
time.sleep(600)
"""
TITLE = "sglang::scheduler_TP0"


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[dict[str, Server]]:
    """One server that has a scheduler process, and one that has none."""
    (tmp_path / "lasting.py").write_text(SERVER)
    path = os.pathsep.join([str(tmp_path), str(Path(process.__file__).parent.parent)])
    started: dict[str, Server] = {}
    for name, words in {"decode": (TITLE,), "router": ()}.items():
        command = Command(name, "lasting", words, {**os.environ, "PYTHONPATH": path})
        started[name] = Server(spawn(command, tmp_path / f"{name}.log", tmp_path), "", "")
    yield started
    for server in started.values():
        server.process.stop()


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def scheduler_state(server: Server) -> str:
    """The kernel's letter for what the scheduler does, once there is one."""
    while True:
        for pid in group(server.process.pid):
            if Path(f"/proc/{pid}/cmdline").read_text().startswith(TITLE):
                return state(pid)
        time.sleep(0.02)


def wait_for(state: str, server: Server) -> None:
    while scheduler_state(server) != state:
        time.sleep(0.02)


def test_a_scheduler_stands_still_in_the_body_and_goes_on_after_it(
    servers: dict[str, Server],
) -> None:
    wait_for("S", servers["decode"])
    with stopped(servers["decode"]):
        wait_for("T", servers["decode"])
    wait_for("S", servers["decode"])
    with pytest.raises(ZeroDivisionError), stopped(servers["decode"]):
        wait_for("T", servers["decode"])
        raise ZeroDivisionError
    wait_for("S", servers["decode"])


def test_a_whole_server_stands_still_in_the_body_and_goes_on_after_it(
    servers: dict[str, Server],
) -> None:
    wait_for("S", servers["decode"])
    with halted(servers["decode"]):
        wait_for("T", servers["decode"])
        assert set(map(state, group(servers["decode"].process.pid))) == {"T"}
    wait_for("S", servers["decode"])


def test_a_server_may_be_ended_while_its_scheduler_stands_still(
    servers: dict[str, Server],
) -> None:
    wait_for("S", servers["decode"])
    with stopped(servers["decode"]):
        servers["decode"].process.stop()
    servers["decode"].process.require_alive()  # it ended, not by itself


def test_a_server_without_a_scheduler_cannot_be_stopped(servers: dict[str, Server]) -> None:
    with (
        pytest.raises(LabError, match="router has no process named sglang::scheduler"),
        stopped(servers["router"]),
    ):
        pass


def test_the_load_is_read_by_queue_and_a_refusal_says_what_was_refused(tmp_path: Path) -> None:
    rank = {"num_running_reqs": 3, "num_waiting_reqs": 7, "num_used_tokens": 99}
    queues = {"decode_prealloc_queue_reqs": 4, "decode_transfer_queue_reqs": 2}

    async def loads(_: web.Request) -> web.StreamResponse:
        return web.json_response({"loads": [{**rank, "disaggregation": queues}]})

    async def run() -> None:
        app = web.Application()
        app.router.add_get("/v1/loads", loads)
        async with TestServer(app) as listening:
            command = Command("decode", "", (), {})
            url = str(listening.make_url("")).rstrip("/")
            server = Server(Process(command, 0, tmp_path / "log", lambda: None), url, "")
            found = await load(server)
            assert (found["running"], found["prealloc"], found["transfer"]) == (3, 4, 2)
            assert (found["retracted"], found["tokens"]) == (0, 99)
            with pytest.raises(LabError, match=r"decode refuses GET /nothing: 404"):
                await get(server, "/nothing")

    asyncio.run(run())
