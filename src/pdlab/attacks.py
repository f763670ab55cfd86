# SPDX-License-Identifier: Apache-2.0
"""What a hostile client or peer does to a pair: one function for each way."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import zmq
import zmq.asyncio

from pdlab.ports import HOST
from pdlab.settings import Role, Settings
from pdlab.traffic import FIRST_WORD

FEW_TOKENS = 4
SHORT = {"max_new_tokens": 8}
# --num-reserved-decode-tokens where nobody says otherwise.
SGLANG_RESERVE = 512
GIVE_UP_S, BETWEEN_S = 0.05, 0.2
# Longer than any limit that a server has in the scenario, so that it is the server that ends it.
HOSTILE_LIMIT_S = 25.0
# Decode gives a silent address up after a minute; who asked for it leaves before.
SILENCE_S = 5.0
# What ZeroMQ keeps for a peer that takes nothing, and some.
MORE_THAN_HELD = 1200


@dataclass(frozen=True)
class Answer:
    """What a hostile request got; `status` is None when nothing came in time."""

    status: int | None
    text: str


@dataclass
class Field:
    """A pair under attack, how to get at each of its ends, and what it answered."""

    front: str
    prefill: str
    decode: str
    bootstrap_port: int
    vocab: int
    pool: int
    session: aiohttp.ClientSession
    rogue: str = ""
    rogue_port: int = 0
    answers: list[Answer] = field(default_factory=list)
    draw: random.Random = field(default_factory=lambda: random.Random(23))

    def prompt(self, length: int) -> list[int]:
        """Random words."""
        return [self.draw.randrange(FIRST_WORD, self.vocab) for _ in range(length)]

    def room(self) -> int:
        """A room that nobody else has."""
        return self.draw.getrandbits(62) + 1

    def body(self, prompt: Sequence[int] = (5, 6, 7), **top: Any) -> dict[str, Any]:
        """A request for both ends; `top` replaces fields, those that are ... are left out."""
        sampling = {"max_new_tokens": FEW_TOKENS, "temperature": 0, "ignore_eos": True}
        whole = {
            "input_ids": list(prompt),
            "sampling_params": sampling | top.pop("sampling_params", {}),
            "bootstrap_host": HOST,
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": self.room(),
            **top,
        }
        return {name: value for name, value in whole.items() if value is not ...}

    async def post(
        self, url: str, body: Any, path: str = "/generate", leave_s: float = HOSTILE_LIMIT_S
    ) -> Answer:
        """One hostile request; whatever comes of it is an answer, and noted.

        A client that leaves earlier than it must is owed none.
        """
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        kind = {"Content-Type": "application/json"}
        limit = aiohttp.ClientTimeout(total=leave_s)
        try:
            sent = self.session.post(url + path, data=data, headers=kind, timeout=limit)
            async with sent as reply:
                answer = Answer(reply.status, (await reply.read()).decode(errors="replace"))
        except (aiohttp.ClientError, asyncio.TimeoutError, ValueError) as error:
            answer = Answer(None, type(error).__name__)
        if answer.status is not None or leave_s == HOSTILE_LIMIT_S:
            self.answers.append(answer)
        return answer

    async def both(self, at_prefill: Any, at_decode: Any = None) -> list[Answer]:
        """The two halves of a request, as a router sends them."""
        at_decode = at_prefill if at_decode is None else at_decode
        halves = self.post(self.prefill, at_prefill), self.post(self.decode, at_decode)
        return list(await asyncio.gather(*halves))


@dataclass(frozen=True)
class Rogue:
    """A server that joins the pair and does not fit it: which half it is, and how it differs."""

    role: Role
    drafts: bool = True
    page_size: int | None = None
    fixture: str | None = None
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Attack:
    """`act` does its worst once, and returns when all its requests are answered.

    `takes_share`: it takes a share of memory or time that any client may take, so that the others'
    latency says nothing of a fault. `changes`: settings that it is about, in place of the
    scenario's.
    """

    name: str
    act: Callable[[Field], Awaitable[object]]
    rogue: Rogue | None = None
    takes_share: bool = False
    changes: Mapping[str, Any] = field(default_factory=dict)

    def settings(self, scenario: Settings) -> Settings:
        """What the pair runs with under this attack."""
        return replace(scenario, **self.changes)


def prompt_that_leaves(*spare: int) -> Callable[[Field], Awaitable[None]]:
    """Prompts, one after the other, that leave so many tokens of decode's pool to the others.

    Less than what decode keeps free for each request is too few on stock, though the prompt fits.
    """

    async def act(field: Field) -> None:
        for few in spare:
            prompt = field.prompt(field.pool - few)
            await field.post(field.front, {"input_ids": prompt, "sampling_params": SHORT})

    return act


async def hogs(field: Field) -> None:
    """Two that together take more than half of the pool, so that others are retracted."""
    sampling = {"max_new_tokens": field.pool // 3, "ignore_eos": True}
    bodies = [{"input_ids": field.prompt(40), "sampling_params": sampling} for _ in range(2)]
    await asyncio.gather(*(field.post(field.front, body) for body in bodies))


async def silent_prefill(field: Field) -> None:
    """A prefill that takes the connection and says nothing; one that says a byte at a time."""

    async def silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    async def trickling(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not writer.is_closing():
            writer.write(b"H")
            await writer.drain()
            await asyncio.sleep(0.2)

    async with _listener(silent) as first, _listener(trickling) as second:
        ports = first, second, 1  # nobody listens on the last
        bodies = [field.body(bootstrap_port=port) for port in ports for _ in range(2)]
        await asyncio.gather(
            *(field.post(field.decode, body, leave_s=SILENCE_S) for body in bodies)
        )


async def lying_prefill(field: Field) -> None:
    """A prefill that answers every question with nonsense, each time another."""
    layout = {"attn_tp_size": 1, "attn_cp_size": 1, "dp_size": 1, "pp_size": 1, "page_size": 1}
    said: list[bytes] = [
        b"[[[[",
        b"null",
        json.dumps({**layout, "dp_size": 0}).encode(),
        json.dumps({**layout, "attn_tp_size": -4}).encode(),
        json.dumps({**layout, "attn_tp_size": 2**40}).encode(),
        json.dumps({**layout, "kv_cache_dtype": "auto"}).encode(),
    ]

    def answering(text: bytes) -> Any:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n"
            writer.write(head.encode() + text)
            await writer.drain()
            writer.close()

        return answer

    async def ask(text: bytes) -> None:
        async with _listener(answering(text)) as port:
            await field.post(field.decode, field.body(bootstrap_port=port))

    await asyncio.gather(*map(ask, said))


async def samples(field: Field) -> None:
    """Several answers to one prompt."""
    bodies = [
        {"input_ids": field.prompt(8), "sampling_params": {"max_new_tokens": 4, "n": n}}
        for n in (2, 4, 2, 4, 2, 4)
    ]
    for body in bodies:
        await field.post(field.front, body)


async def bad_fields(field: Field) -> None:
    """Rooms and addresses that are none, at both ends."""
    wrong: list[dict[str, Any]] = [
        {"bootstrap_room": room} for room in (-1, -7, 0, 2**64, "x", 1.5, None, [3])
    ]
    wrong += [{"bootstrap_host": host} for host in ("", "no such host", "a/b", 5, ...)]
    wrong += [{"bootstrap_port": port} for port in (-1, 70_000, "x", ...)]
    bodies = [field.body(**each) for each in wrong]
    await asyncio.gather(*(field.both(body) for body in bodies))


async def same_room(field: Field) -> None:
    """Two prompts in one room, at once."""
    for _ in range(3):
        room = field.room()
        bodies = [field.body(field.prompt(n), bootstrap_room=room) for n in (12, 12, 30)]
        await asyncio.gather(*(field.both(body) for body in bodies))


async def other_prompt(field: Field) -> None:
    """The two halves of a request have prompts of different length, or different words."""
    prompt = field.prompt(40)
    for other in (prompt[:36], [*prompt, 9, 9, 9, 9], field.prompt(40)):
        body = field.body(prompt)
        wrong = {**body, "input_ids": other}
        answers = await field.both(body, wrong)
        if answers[1].status == 200:
            field.answers.append(Answer(None, "decode answered a prompt that prefill never had"))


async def half_requests(field: Field) -> None:
    """Only one half of a request is ever sent."""
    for url in (field.prefill, field.decode):
        await asyncio.gather(*(field.post(url, field.body(field.prompt(40))) for _ in range(4)))


async def no_tokens(field: Field) -> None:
    """Tokens and sampling values that no model has."""
    wrong: list[dict[str, Any]] = [
        {"input_ids": ids}
        for ids in ([field.vocab + 88, 5, 6], [5, -1, 7], [2**40], [], [[5], []], ["x"], None)
    ]
    wrong += [
        {"input_ids": [5, 6, 7], "sampling_params": {name: value}}
        for name, value in (
            ("temperature", -1),
            ("temperature", 1e400),
            ("top_k", 2**40),
            ("top_p", 7),
            ("max_new_tokens", -5),
            ("n", 0),
            ("n", 10**9),
            ("stop_token_ids", [2**40]),
            ("logit_bias", {str(2**40): 1.0}),
        )
    ]
    wrong += [{"input_ids": [5, 6], "return_logprob": True, "top_logprobs_num": 10**9}]
    await asyncio.gather(*(field.post(field.front, body) for body in wrong))
    await field.both(field.body(input_ids=[field.vocab + 88, 5, 6]))


async def gone_clients(field: Field) -> None:
    """Clients that are gone a moment after they have asked, at one end or at both."""

    async def ask(url: str, body: Any) -> None:
        limit = aiohttp.ClientTimeout(total=field.draw.uniform(0, GIVE_UP_S))
        try:
            async with field.session.post(f"{url}/generate", json=body, timeout=limit) as reply:
                await reply.read()
        except (aiohttp.ClientError, asyncio.TimeoutError):
            pass

    for _ in range(10):
        bodies = [field.body(field.prompt(40)) for _ in range(4)]
        await asyncio.gather(
            *(ask(url, body) for body in bodies for url in (field.prefill, field.decode))
        )
        await asyncio.sleep(BETWEEN_S)


async def odd_messages(field: Field) -> None:
    """Frames that mean nothing, to the port where prefill hears what decode says."""
    await _tell_prefill(field, ODD_FRAMES)


async def dead_addresses(field: Field) -> None:
    """Requests given up by a decode server that has gone, more than a socket holds for it."""
    frames = (b"ABORT", b"%d", HOST.encode(), b"1", b"1")
    given_up = [
        tuple(part % field.room() if part == b"%d" else part for part in frames)
        for _ in range(MORE_THAN_HELD)
    ]
    await _tell_prefill(field, given_up)


async def _tell_prefill(field: Field, messages: Sequence[Sequence[bytes]]) -> None:
    query = "prefill_dp_rank=0&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0"
    bootstrap = f"http://{HOST}:{field.bootstrap_port}"
    async with field.session.get(f"{bootstrap}/route?{query}") as reply:
        port = (await reply.json())["rank_port"]
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.connect(f"tcp://{HOST}:{port}")
    try:
        for frames in messages:
            await socket.send_multipart([*frames])
        await asyncio.sleep(0.2)
    finally:
        socket.close()
        await asyncio.to_thread(context.term)  # good clients are served by this thread


ODD_FRAMES: tuple[tuple[bytes, ...], ...] = (
    (b"\xff\xfe",),
    (b"",),
    (b"None",),
    (b"12",),
    (b"twelve", b"h", b"1", b"session"),
    (b"None", HOST.encode(), b"1", b"session", b"\x01"),
    (b"12", HOST.encode(), b"1", b"session", b"\x00" * 3, b"x", b"", b"one"),
    (b"ABORT", b"x", b"y", b"z"),
    (b"77", HOST.encode(), b"1", b"nobody:1", b"\x00" * 4, b"0", b"", b"1", b"0", b"", b""),
)


def through_rogue(role: Role) -> Callable[[Field], Awaitable[object]]:
    """Requests whose other half is at the server that does not fit."""

    async def act(field: Field) -> None:
        port = field.rogue_port if role is Role.PREFILL else field.bootstrap_port
        urls = field.rogue, field.decode if role is Role.PREFILL else field.prefill
        bodies = [field.body(field.prompt(n), bootstrap_port=port) for n in (3, 40, 40, 17)]
        await asyncio.gather(*(field.post(url, body) for body in bodies for url in urls))

    return act


@asynccontextmanager
async def _listener(talk: Any) -> AsyncIterator[int]:
    """A port on which `talk` answers; connections end with the block."""
    tasks: set[asyncio.Task[None]] = set()

    async def talking(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        tasks.add(task)
        try:
            await talk(reader, writer)
        except (OSError, EOFError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(talking, HOST, 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()


OTHER_KV = {
    role: Rogue(role, flags=("--kv-cache-dtype", "bfloat16"))
    for role in (Role.PREFILL, Role.DECODE)
}
ATTACKS = (
    Attack(
        "H-0 prompt that the reserve has no room beside",
        prompt_that_leaves(SGLANG_RESERVE - 12, -1),
        changes={"decode_reserved_tokens": SGLANG_RESERVE},
    ),
    Attack("H-0 prompt that nearly fills the pool", prompt_that_leaves(40), takes_share=True),
    Attack("H-1 silent prefill", silent_prefill),
    Attack("H-1 lying prefill", lying_prefill),
    Attack("H-2 n above 1", samples),
    Attack(
        "H-4 decode without draft", through_rogue(Role.DECODE), Rogue(Role.DECODE, drafts=False)
    ),
    Attack(
        "H-4 prefill without draft", through_rogue(Role.PREFILL), Rogue(Role.PREFILL, drafts=False)
    ),
    Attack("H-5 two that take the pool", hogs),
    Attack("H-6 bad bootstrap fields", bad_fields),
    Attack("H-7 one room for three", same_room),
    Attack("H-8 another prompt at each end", other_prompt),
    Attack(
        "H-9 prefill with other pages",
        through_rogue(Role.PREFILL),
        Rogue(Role.PREFILL, page_size=16),
    ),
    Attack("H-9 prefill with another KV type", through_rogue(Role.PREFILL), OTHER_KV[Role.PREFILL]),
    Attack("H-9 decode with another KV type", through_rogue(Role.DECODE), OTHER_KV[Role.DECODE]),
    Attack(
        "H-9 prefill of another model",
        through_rogue(Role.PREFILL),
        Rogue(Role.PREFILL, fixture="wide"),
    ),
    Attack("H-10 tokens of no model", no_tokens),
    Attack("H-11 clients that are gone", gone_clients),
    Attack("H-11 half requests", half_requests),
    Attack("messages that mean nothing", odd_messages),
    Attack("messages of a decode that is gone", dead_addresses, takes_share=True),
)
