# SPDX-License-Identifier: Apache-2.0
"""What decode asks a prefill's bootstrap server before it can send a request there, off the loop.

Three questions, each asked by one of the few threads that decode has for its HTTP to prefill: how
the prefill is laid out, on which data-parallel rank a room is, and where the ranks listen. The
loop looks at answers and waits for none, so a server that is silent, slow or lying costs the
requests that name it and no other.
"""

from __future__ import annotations

import functools
import http.client
import io
import logging
import math
import socket
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from json import dumps, loads
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from sglang.srt.disaggregation.common.conn import (
        CommonKVManager,
        CommonKVReceiver,
        PrefillServerInfo,
    )
    from sglang.srt.disaggregation.decode import DecodePreallocQueue, DecodeRequest
    from sglang.srt.managers.schedule_batch import Req

logger = logging.getLogger(__name__)

ANSWER_S = 3.0
"""Longest that a whole exchange may take, however the server spreads its bytes."""
MAX_ANSWER = 1 << 20
"""Bytes of an answer; a route is a few hundred."""
MOST_RANKS = 1 << 16
"""Ranks of one prefill over all its kinds of parallelism; more is not a size but a lie."""
AT_ONCE = 8
"""Questions under way at one time, half of the default number of threads."""

Pending = dict[str, list["DecodeRequest"]]


@dataclass(frozen=True)
class Answer:
    """What is read of a reply: as much of `requests.Response` as the callers use."""

    status_code: int
    text: str

    def json(self) -> Any:
        return loads(self.text)


@dataclass
class Lookups:
    """Questions by what they are about, and the routes that were answered, by address and URL."""

    asked: dict[tuple[Any, ...], Future[Any]] = field(default_factory=dict)
    routes: dict[str, dict[str, Answer | Exception]] = field(default_factory=dict)

    @classmethod
    def of(cls, manager: CommonKVManager) -> Lookups:
        """The lookups of a manager, made once."""
        made: Lookups = vars(manager).setdefault("prefill_lookups", cls())
        return made

    def answered(
        self, manager: CommonKVManager, key: tuple[Any, ...], ask: Callable[..., Any], *args: Any
    ) -> bool:
        """Whether the answer is there. When it was not asked for yet, it is now, or in its turn."""
        if key not in self.asked:
            under_way = sum(not future.done() for future in self.asked.values())
            if under_way < AT_ONCE:
                executor = manager._ensure_prefill_recompute_executor()
                self.asked[key] = executor.submit(ask, *args)
        return key in self.asked and self.asked[key].done()

    def keep(self, addresses: Iterable[str]) -> None:
        """Forget everything about addresses that no request waits for."""
        wanted = set(addresses)
        self.routes = {a: found for a, found in self.routes.items() if a in wanted}
        for key, future in list(self.asked.items()):
            if key[1] not in wanted and (future.done() or future.cancel()):
                del self.asked[key]


def off_the_loop(ensure: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate `DecodePreallocQueue._ensure_prefill_info`: addresses are ready once all is known.

    Ranks may see answers at different times: a request counts as connected by the vote on its
    receivers, whose minimum waits for the last rank, and fails with the first that gives up.
    """

    @functools.wraps(ensure)
    def ensuring(
        queue: DecodePreallocQueue, by_address: Pending
    ) -> tuple[Pending, list[DecodeRequest]]:
        manager, lookups = queue.kv_manager, Lookups.of(queue.kv_manager)
        tries = queue._ensure_retry_count
        ready: Pending = {}
        remaining: list[DecodeRequest] = []
        for address in sorted(by_address, key=lambda each: tries.get(each, 0)):  # new ones first
            requests = by_address[address]
            known = address in manager.prefill_info_table
            ask = manager.try_ensure_parallel_info
            if not known and not lookups.answered(manager, ("info", address), ask, address):
                remaining += requests
                continue
            try:
                found, again = ensure(queue, {address: requests})
            except RuntimeError as error:  # the two ends cannot work together
                _forget_tries(queue, address)
                _refuse(manager, requests, str(error))
                continue
            remaining += again
            if address in found:
                met, unmet = _met(queue, lookups, address, requests)
                remaining += unmet
                if met:
                    ready[address] = met
            elif not again:
                reason = f"prefill {address} did not say how it is laid out: is it running there?"
                _refuse(manager, requests, reason)
        lookups.keep(by_address)
        for address in [each for each in tries if each not in by_address]:
            _forget_tries(queue, address)
        return ready, remaining

    return ensuring


def ensured(manager: CommonKVManager, address: str) -> bool:
    """What the lookup of a prefill's layout came to; RuntimeError when it cannot be a pair."""
    future = Lookups.of(manager).asked.pop(("info", address), None)
    if future is None:
        return address in manager.prefill_info_table
    try:
        return bool(future.result())
    except Exception as error:  # of another server's making, and none may end the loop
        raise RuntimeError(f"prefill {address} cannot serve this decode server: {error}") from error


def check_sizes(info: PrefillServerInfo) -> None:
    """Refuse a layout with sizes below one or beyond reason, before anything is derived from it."""
    sizes = [int(size) for size in (info.attn_tp_size, info.attn_cp_size, info.pp_size)]
    sizes.append(int(info.dp_size))
    if min(sizes) < 1 or math.prod(sizes) > MOST_RANKS:
        raise ValueError(f"tensor, context, pipeline and data parallel sizes of {sizes}")


def connected_rank(queue: DecodePreallocQueue, req: Req) -> int | None:
    """Prefill's rank for a request, if its routes are known as well; else None, and it waits."""
    from sglang.srt.disaggregation.decode import _bootstrap_addr

    rank: int | None = queue._resolve_prefill_dp_rank(req)
    if rank is None or not _connected(queue.kv_manager, _bootstrap_addr(req), rank):
        return None
    return rank


def route(receiver: CommonKVReceiver, url: str) -> Answer:
    """The route that was looked up under `url`; raises what the lookup raised."""
    found = Lookups.of(receiver.kv_mgr).routes.get(receiver.bootstrap_addr, {}).get(url)
    if found is None:
        raise LookupError(f"{url} was not asked for")
    if isinstance(found, Exception):
        raise found
    return found


def get(url: str, timeout: float = ANSWER_S) -> Answer:
    """GET `url`; TimeoutError when the whole answer is not there after `timeout` seconds."""
    return _exchange("GET", url, None, min(timeout, ANSWER_S))


def post(url: str, json: Any, timeout: float = ANSWER_S) -> Answer:
    """POST a value as JSON to `url`, under the same limit."""
    return _exchange("POST", url, dumps(json).encode(), min(timeout, ANSWER_S))


def _met(
    queue: DecodePreallocQueue, lookups: Lookups, address: str, requests: list[DecodeRequest]
) -> tuple[list[DecodeRequest], list[DecodeRequest]]:
    """Requests whose rank and routes are known, and the others."""
    _place(queue, lookups, address, requests)
    manager = queue.kv_manager
    met, unmet, used = [], [], set()
    for request in requests:
        rank = queue._resolve_prefill_dp_rank(request.req)
        if rank is not None and _connected(manager, address, rank):
            met.append(request)
            continue
        key = ("routes", address, rank)
        if rank is not None and lookups.answered(manager, key, _routes, manager, address, rank):
            lookups.routes.setdefault(address, {}).update(lookups.asked[key].result())
            used.add(key)
            met.append(request)
        else:
            unmet.append(request)
    for key in used:  # routes change when a prefill is restarted: asked anew after this
        del lookups.asked[key]
    return met, unmet


def _place(
    queue: DecodePreallocQueue, lookups: Lookups, address: str, requests: list[DecodeRequest]
) -> None:
    """Ask on which data-parallel rank the rooms are whose number does not say it."""
    unplaced = [each.req for each in requests if queue._resolve_prefill_dp_rank(each.req) is None]
    info = queue.kv_manager.prefill_info_table.get(address)
    if not unplaced or info is None:
        return
    from sglang.srt.disaggregation.common.conn import CommonKVReceiver

    rooms, key = [req.bootstrap_room for req in unplaced], ("ranks", address)
    ask = CommonKVReceiver.query_prefill_dp_ranks
    if not lookups.answered(queue.kv_manager, key, ask, address, rooms):
        return
    found = lookups.asked.pop(key).result()
    ranks = found if isinstance(found, dict) else {}
    for req in unplaced:
        rank = ranks.get(str(req.bootstrap_room))
        if isinstance(rank, int) and 0 <= rank < info.dp_size:
            req.disagg_prefill_dp_rank = rank


def _routes(manager: CommonKVManager, address: str, rank: int) -> dict[str, Answer | Exception]:
    """Where the ranks of a prefill listen, by the URL that says it; after a failure no more."""
    info = manager.prefill_info_table.get(address)
    if info is None:
        return {}
    urls = [
        f"http://{address}/route?prefill_dp_rank={rank}&prefill_cp_rank={cp}"
        f"&target_tp_rank={tp}&target_pp_rank={pp}"
        for cp in info.target_cp_ranks
        for tp in info.target_tp_ranks
        for pp in info.target_pp_ranks
    ]
    found: dict[str, Answer | Exception] = {}
    for url in urls:
        try:
            found[url] = _checked_route(get(url))
        except (OSError, ValueError, http.client.HTTPException) as error:
            return {**dict.fromkeys(urls, error), **found}
    return found


def _checked_route(answer: Answer) -> Answer:
    """The answer, if it is an error or holds an address; else ValueError."""
    if answer.status_code == 200:
        route = answer.json()
        known = isinstance(route, dict) and isinstance(route.get("rank_ip"), str)
        if not known or not 0 < int(route.get("rank_port", 0)) < 1 << 16:
            raise ValueError(f"not a route: {answer.text[:80]}")
    return answer


def _connected(manager: CommonKVManager, address: str, rank: int) -> bool:
    """Whether a receiver finds the routes to `rank` of the prefill where it looks first."""
    info = manager.prefill_info_table.get(address)
    return info is not None and all(
        f"{address}_{rank}_{cp}_{info.target_tp_rank}" in manager.connection_pool
        for cp in info.target_cp_ranks
    )


def _refuse(manager: CommonKVManager, requests: list[DecodeRequest], reason: str) -> None:
    logger.error("%d requests fail: %s", len(requests), reason)
    for request in requests:
        if request.kv_receiver is not None:  # None once it has left the queue
            request.kv_receiver.abort()
            manager.record_failure(request.req.bootstrap_room, reason)


def _forget_tries(queue: DecodePreallocQueue, address: str) -> None:
    queue._ensure_retry_count.pop(address, None)
    queue._ensure_last_attempt_time.pop(address, None)


class _Received:
    """Bytes that were received, as the socket that `http.client` reads a response from."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def makefile(self, *_: Any) -> io.BytesIO:
        return io.BytesIO(self.data)


def _exchange(method: str, url: str, body: bytes | None, limit_s: float) -> Answer:
    """One request over a connection of its own, with one limit for all of it.

    A limit for each read, which is what HTTP libraries have, is none against a server that sends
    a byte at a time.
    """
    end = time.monotonic() + limit_s
    parts = urlsplit(url)
    target = parts.path + (f"?{parts.query}" if parts.query else "")
    head = f"{method} {target} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
    if body is not None:
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    where = (parts.hostname or "", parts.port or 80)
    received = b""
    with socket.create_connection(where, timeout=limit_s) as connection:
        connection.sendall(head.encode("ascii") + b"\r\n" + (body or b""))
        while True:
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"no whole answer from {parts.netloc} in {limit_s:g} s")
            connection.settimeout(left)
            chunk = connection.recv(65536)
            received += chunk
            if not chunk:
                break
            if len(received) > MAX_ANSWER:
                raise ValueError(f"{parts.netloc} answers with more than {MAX_ANSWER} bytes")
    response = http.client.HTTPResponse(_Received(received), method=method)  # type: ignore[arg-type]
    response.begin()
    return Answer(response.status, response.read().decode(errors="replace"))
