# SPDX-License-Identifier: Apache-2.0
"""Requests sent to a server or a pair, and what came of each."""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp

REQUEST_LIMIT_S = 300.0
# The first words of a vocabulary are control tokens: padding, start, end.
FIRST_WORD = 3
STREAM_PREFIX = b"data:"
STREAM_END = b"[DONE]"
ENDED_EARLY = "the reply ended before the request was finished"


@dataclass(frozen=True)
class Cancel:
    """The client gives up `after_s` seconds: it closes its connection, or makes an abort call."""

    after_s: float
    by_call: bool = False


@dataclass(frozen=True)
class Request:
    """A prompt in token ids and how many tokens to generate, greedily, whatever they are."""

    prompt: tuple[int, ...]
    new_tokens: int
    stream: bool = False
    cancel: Cancel | None = None

    def body(self) -> dict[str, Any]:
        """The body of POST /generate."""
        sampling = {"max_new_tokens": self.new_tokens, "temperature": 0, "ignore_eos": True}
        return {"input_ids": self.prompt, "sampling_params": sampling, "stream": self.stream}

    @property
    def key(self) -> tuple[tuple[int, ...], int]:
        """Requests with equal keys have equal tokens."""
        return self.prompt, self.new_tokens


@dataclass(frozen=True)
class Outcome:
    """What one request gave. Times are in seconds from sending; None where nothing was said.

    `first_token_s` is known of a streamed request only. `host_tokens`: those of `cached_tokens`
    that the host cache had.
    """

    tokens: tuple[int, ...] = ()
    accept_length: float | None = None
    retractions: int = 0
    cached_tokens: int = 0
    host_tokens: int = 0
    latency_s: float = 0.0
    first_token_s: float | None = None
    status: int | None = None
    error: str | None = None
    cancelled: bool = False

    @property
    def ok(self) -> bool:
        return self.error is None


def random_requests(
    seed: int,
    vocab: int,
    lengths: Iterable[int],
    new_tokens: int,
    shared: int = 0,
    stream_every: int = 0,
) -> tuple[Request, ...]:
    """One request per length with words drawn at random; the same arguments give the same ones.

    The first `shared` words of every prompt are the same. Every `stream_every`-th is streamed.
    """
    words = random.Random(seed)

    def prompt(length: int) -> tuple[int, ...]:
        return tuple(words.randrange(FIRST_WORD, vocab) for _ in range(length))

    prefix = prompt(shared)
    return tuple(
        Request(
            prefix + prompt(length - shared),
            new_tokens,
            bool(stream_every) and number % stream_every == 0,
        )
        for number, length in enumerate(lengths, 1)
    )


async def send_all(
    url: str,
    requests: Sequence[Request],
    concurrency: int | None = None,
    limit_s: float = REQUEST_LIMIT_S,
    servers: Sequence[str] = (),
) -> list[Outcome]:
    """Send all requests, at most `concurrency` at once, and return their outcomes in order.

    Abort calls go to `servers`, those behind `url` where that is a router.
    """
    slots = asyncio.Semaphore(concurrency or max(1, len(requests)))

    async def one(request: Request) -> Outcome:
        async with slots:
            if request.cancel:
                return await _send_and_cancel(session, url, request, servers or (url,))
            return await send(session, url, request)

    connector = aiohttp.TCPConnector(limit=0)
    limit = aiohttp.ClientTimeout(total=limit_s)
    async with aiohttp.ClientSession(connector=connector, timeout=limit) as session:
        return list(await asyncio.gather(*map(one, requests)))


async def _send_and_cancel(
    session: aiohttp.ClientSession, url: str, request: Request, servers: Sequence[str]
) -> Outcome:
    """Send a request whose client gives up; one that was answered before is as any other."""
    assert request.cancel
    name = uuid.uuid4().hex
    start = time.monotonic()
    sending = asyncio.ensure_future(send(session, url, request, name))
    if (await asyncio.wait([sending], timeout=request.cancel.after_s))[0]:
        return sending.result()
    if request.cancel.by_call:
        calls = [session.post(f"{server}/abort_request", json={"rid": name}) for server in servers]
        for reply in await asyncio.gather(*calls):
            reply.release()
        return replace(await sending, cancelled=True)
    sending.cancel()
    await asyncio.wait([sending])
    gone = "the client closed the connection"
    return Outcome(latency_s=time.monotonic() - start, error=gone, cancelled=True)


async def send(
    session: aiohttp.ClientSession, url: str, request: Request, name: str | None = None
) -> Outcome:
    """Send one request; a failure of any kind is an outcome with `error` set, never raised."""
    watch = _Watch(request.stream)
    body = request.body() | ({"rid": name} if name else {})
    try:
        async with session.post(f"{url}/generate", json=body) as reply:
            if reply.status != 200:
                message = _message(await reply.read())
                return watch.outcome(status=reply.status, error=f"{reply.status}: {message}")
            if request.stream:
                async for event in _events(reply.content):
                    watch.see(event)
            else:
                watch.see(await reply.json(content_type=None))
            return watch.outcome(status=reply.status)
    except asyncio.TimeoutError:
        return watch.outcome(error=f"no complete reply in {session.timeout.total:g} s")
    except (aiohttp.ClientError, ValueError) as error:
        return watch.outcome(error=f"{type(error).__name__}: {error}")


@dataclass
class _Watch:
    """Collects the events of one reply and the times at which they came."""

    stream: bool
    start: float = field(default_factory=time.monotonic)
    first_token_s: float | None = None
    last: dict[str, Any] = field(default_factory=dict)

    def see(self, event: dict[str, Any]) -> None:
        if "output_ids" not in event:
            raise ValueError(_message(json.dumps(event).encode()))
        self.last = event
        if self.stream and self.first_token_s is None and event["output_ids"]:
            self.first_token_s = time.monotonic() - self.start

    def outcome(self, status: int | None = None, error: str | None = None) -> Outcome:
        meta = self.last.get("meta_info", {})
        reason = meta.get("finish_reason") or {}
        if error is None and reason.get("type") == "abort":
            error = f"aborted: {reason.get('message', 'no reason given')}"
        if error is None and not reason:
            error = ENDED_EARLY
        return Outcome(
            tokens=tuple(self.last.get("output_ids", ())),
            accept_length=meta.get("spec_accept_length"),
            retractions=meta.get("num_retractions") or 0,
            cached_tokens=meta.get("cached_tokens") or 0,
            host_tokens=(meta.get("cached_tokens_details") or {}).get("host") or 0,
            latency_s=time.monotonic() - self.start,
            first_token_s=self.first_token_s,
            status=status,
            error=error,
        )


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """The events of a server-sent stream up to its end mark."""
    rest = b""
    async for chunk in content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            data = line.removeprefix(STREAM_PREFIX).strip()
            if line.startswith(STREAM_PREFIX) and data != STREAM_END:
                yield json.loads(data)


def _message(body: bytes) -> str:
    """The message inside an error reply, whichever of the known shapes it has."""
    text = body.decode(errors="replace").strip()
    try:
        error = json.loads(text).get("error", text)
        return str(error.get("message", error)) if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError):
        return text or "empty reply"
