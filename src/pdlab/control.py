# SPDX-License-Identifier: Apache-2.0
"""What is done to a running server beside sending it requests: stop it, ask it, tell it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

from pdlab.errors import LabError
from pdlab.pair import Server
from pdlab.process import group

SCHEDULER_TITLE = "sglang::scheduler"
# What /v1/loads calls the queues of a pair, and their short names.
QUEUES = {
    "bootstrap": "prefill_bootstrap_queue_reqs",
    "inflight": "prefill_inflight_queue_reqs",
    "prealloc": "decode_prealloc_queue_reqs",
    "transfer": "decode_transfer_queue_reqs",
    "retracted": "decode_retracted_queue_reqs",
}


@contextmanager
def stopped(server: Server) -> Iterator[None]:
    """The scheduler processes of `server` stand still while the body runs; HTTP goes on."""
    with _halted(schedulers(server)):
        yield


@contextmanager
def halted(server: Server) -> Iterator[None]:
    """All processes of `server` stand still while the body runs; its connections stay open."""
    with _halted(list(group(server.process.pid))):
        yield


@contextmanager
def _halted(pids: Sequence[int]) -> Iterator[None]:
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


async def load(server: Server) -> dict[str, int]:
    """Requests of a server by where they are, and the KV tokens in use, as it published last."""
    [rank, *_] = (await get(server, "/v1/loads"))["loads"]
    queues = rank.get("disaggregation") or {}
    return {
        "running": rank["num_running_reqs"],
        "waiting": rank["num_waiting_reqs"],
        "tokens": rank["num_used_tokens"],
        **{name: queues.get(key, 0) for name, key in QUEUES.items()},
    }


async def pools(server: Server) -> dict[str, int]:
    """Whatever a request can leave behind: queues, KV tokens, metadata rows, complaints.

    The scheduler checks its pools whenever it is at rest; complaints are its lines about a leak.
    """
    state = (await get(server, "/server_info"))["internal_states"][0]
    leaks = server.process.log.read_text(errors="replace").count("leak detected")
    rows = {f"rows {status}": count for status, count in state.get("metadata_slots", {}).items()}
    return {**await load(server), **rows, "leaks": leaks}


async def get(server: Server, path: str) -> Any:
    """What `server` answers to GET `path`; LabError when it refuses."""
    return await _call(server, "GET", path)


async def post(server: Server, path: str, **body: Any) -> Any:
    """What `server` answers to POST `path`; LabError when it refuses."""
    return await _call(server, "POST", path, json=body)


async def _call(server: Server, method: str, path: str, **more: Any) -> Any:
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, server.url + path, **more) as reply,
    ):
        if reply.status != 200:
            raise LabError(
                f"{server.process.name} refuses {method} {path}: "
                f"{reply.status} {(await reply.text())[:200]}"
            )
        return await reply.json(content_type=None)


def schedulers(server: Server) -> list[int]:
    """The processes of a server that run its scheduler loop, one for each rank."""
    titles = {
        pid: Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        for pid in group(server.process.pid)
    }
    found = [pid for pid, title in titles.items() if title.startswith(SCHEDULER_TITLE)]
    if not found:
        raise LabError(f"{server.process.name} has no process named {SCHEDULER_TITLE}")
    return found
