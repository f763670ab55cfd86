# SPDX-License-Identifier: Apache-2.0
"""A pair under attack while good clients go on: what becomes of them, and of the servers."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
from rich.markup import escape

from pdlab.attacks import Attack, Field
from pdlab.control import pools
from pdlab.errors import LabError
from pdlab.pair import Launcher, Pair, Server
from pdlab.settings import Model, Role, Settings
from pdlab.traffic import Outcome, Request, send
from pdlab.trees import Tree

# As many good clients as two cores bear.
CLIENTS = 32
# Good clients alone and under attack take turns: what else slows the machine slows both.
TURN_S, TURNS = 1.0, 5
# Within a turn an attack begins again as soon as it is over, but not more often than this.
AGAIN_S = 0.5
# One that takes long to be over has fewer turns: none begins after so many seconds.
TURNS_S = 30.0
# A good request takes less than a second; what takes longer than this is not answered.
GOOD_LIMIT_S = 15.0
HEALTH_LIMIT_S, HEALTH_TRIES = 5.0, 3
# What waits for a half that never comes is failed by then: the limits in the settings, a sweep of
# the tables, and the 30 s for which decode keeps pages that prefill may still write to.
SETTLE_S = 40.0
# Longest for all attacks on one tree; stock servers, which hang and end, take that long.
SIEGE_S = 720.0
# A pair that failed its clients is not waited for as long.
LOST_S = 5.0
LOOK_S = 0.25

Reference = dict[tuple[tuple[int, ...], int], tuple[int, ...]]


@dataclass(frozen=True)
class Phase:
    """What good clients got in some seconds."""

    outcomes: tuple[tuple[Request, Outcome], ...]
    seconds: float

    def harmed(self, reference: Reference) -> list[str]:
        """What went wrong with requests: no answer, or another's tokens."""
        return [
            outcome.error or "another's tokens"
            for request, outcome in self.outcomes
            if not outcome.ok or outcome.tokens != reference[request.key]
        ]


def latency_s(phase: Phase) -> float | None:
    """Median over the requests that were answered."""
    known = [outcome.latency_s for _, outcome in phase.outcomes if outcome.ok]
    return statistics.median(known) if known else None


@dataclass(frozen=True)
class Verdict:
    """What one attack did.

    `calm_s`, `attacked_s`: median latencies of good requests in turn, the calm ones first and last.
    """

    attack: Attack
    errors: tuple[str, ...]
    asked: int
    calm_s: tuple[float | None, ...]
    attacked_s: tuple[float | None, ...]
    unanswered: int
    lost: tuple[str, ...]
    unhealthy: int
    left: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def not_made(cls, attack: Attack) -> Verdict:
        """On an attack that was not made."""
        return cls(attack, (), 0, (), (), 0, (), 0)

    @property
    def ratios(self) -> list[float]:
        """Latency under attack over the mean of what it was just before and just after."""
        return [
            2 * attacked / (before + after)
            for before, attacked, after in zip(
                self.calm_s, self.attacked_s, self.calm_s[1:], strict=False
            )
            if before and attacked and after
        ]

    @property
    def slower(self) -> float | None:
        """Median of the ratios; None when good clients were not answered twice."""
        return statistics.median(self.ratios) if self.ratios else None

    @property
    def unrest(self) -> list[float]:
        """What two calm turns in a row differ by: their larger latency over the smaller, less 1."""
        turns = zip(self.calm_s, self.calm_s[1:], strict=False)
        return [max(a, b) / min(a, b) - 1 for a, b in turns if a and b]

    @property
    def harmed(self) -> int:
        """Good requests without an answer, or with another's tokens."""
        return len(self.errors)

    @property
    def wrong(self) -> str:
        """What it did to the pair, for a reader; empty when the pair can go on as it was."""
        parts = [
            self.errors and f"{self.harmed} of {self.asked} good requests: {self.errors[0]}",
            self.lost and f"ended: {', '.join(self.lost)}",
            self.unhealthy and f"{self.unhealthy} servers do not say that they are well",
            self.unanswered and f"{self.unanswered} hostile requests without an answer",
            self.left and f"left: {self.left}",
        ]
        return "; ".join(part for part in parts if part)


@dataclass
class Siege:
    """Attacks a pair with one thing after the other; one that does not recover is replaced."""

    launcher: Launcher
    tree: Tree
    settings: Settings
    model: Model
    model_of: Callable[[Settings], Model]
    good: Sequence[Request]
    reference: Reference
    say: Callable[[str], None]

    def run(self, attacks: Sequence[Attack]) -> list[Verdict]:
        """The verdict on each attack, in order; what there was no time for was not made."""
        verdicts: list[Verdict] = []
        end = time.monotonic() + SIEGE_S
        while len(verdicts) < len(attacks):
            if time.monotonic() > end:
                self.say("no time is left for the other attacks")
                return [*verdicts, *map(Verdict.not_made, attacks[len(verdicts) :])]
            settings = attacks[len(verdicts)].settings(self.settings)
            with self.launcher.pair(self.tree, settings, self.model) as pair:
                start = asyncio.run(state(*pair.servers[:2]))
                for attack in attacks[len(verdicts) :]:
                    if attack.settings(self.settings) != settings:
                        break
                    begun = time.monotonic()
                    verdicts.append(self._verdict(pair, attack, start))
                    wrong = verdicts[-1].wrong
                    took = f"[dim]{time.monotonic() - begun:.0f} s[/]"
                    self.say(
                        f"{escape(f'{attack.name}: {wrong}' if wrong else attack.name)}  {took}"
                    )
                    if wrong or time.monotonic() > end:
                        break
        return verdicts

    def _verdict(self, pair: Pair, attack: Attack, start: dict[str, Any]) -> Verdict:
        try:
            with self._joined(attack) as (rogue, port):
                return asyncio.run(self._one(pair, attack, rogue, port, start))
        except LabError as error:  # the rogue did not start, or ended
            return replace(Verdict.not_made(attack), lost=(f"a server of the attack ({error})",))

    @contextmanager
    def _joined(self, attack: Attack) -> Iterator[tuple[str, int]]:
        """The server that does not fit, up beside the pair: its URL and bootstrap port."""
        rogue, settings = attack.rogue, attack.settings(self.settings)
        with ExitStack() as stack:
            if rogue is None:
                yield "", 0
                return
            settings = replace(
                settings,
                fixture=rogue.fixture or settings.fixture,
                page_size=rogue.page_size or settings.page_size,
                prefill_flags=rogue.flags if rogue.role is Role.PREFILL else (),
                decode_flags=rogue.flags if rogue.role is Role.DECODE else (),
            )
            model = self.model_of(settings)
            if not rogue.drafts:
                model = replace(model, draft=None)
            server, port = stack.enter_context(
                self.launcher.joining(rogue.role, self.tree, settings, model)
            )
            yield server.url, port

    async def _one(
        self, pair: Pair, attack: Attack, rogue: str, port: int, start: dict[str, Any]
    ) -> Verdict:
        prefill, decode = pair.servers[:2]
        pool = attack.settings(self.settings).decode_kv_tokens
        unanswered = 0
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            there = Field(pair.url, prefill.url, decode.url, bootstrap_port(prefill),
                          self.model.vocab, pool, session, rogue, port)  # fmt: skip
            warm = await self._good(session, pair, TURN_S)  # caches were flushed: not measured
            calm = [await self._good(session, pair, TURN_S)]
            attacked: list[Phase] = []
            harmed = False
            end = time.monotonic() + TURNS_S
            while len(attacked) < TURNS and time.monotonic() < end:
                acting = asyncio.ensure_future(_again(attack, there))
                attacked.append(await self._good(session, pair, TURN_S))
                harmed = bool(attacked[-1].harmed(self.reference))
                unanswered += await _unanswered(there, acting, LOST_S if harmed else SETTLE_S)
                if harmed or unanswered or _ended(pair):
                    break
                calm.append(await self._good(session, pair, TURN_S))
                if calm[-1].harmed(self.reference):
                    break
            lost = tuple(_ended(pair))
            well = [_healthy(session, server) for server in pair.servers[:2]]
            unhealthy = sum(not each for each in await asyncio.gather(*well))
            limit_s = LOST_S if harmed or unanswered else SETTLE_S
            gone = lost or unhealthy
            left = {} if gone else await left_of(start, *pair.servers[:2], limit_s=limit_s)
        phases = (warm, *calm, *attacked)
        return Verdict(
            attack,
            tuple(error for phase in phases for error in phase.harmed(self.reference)),
            sum(len(phase.outcomes) for phase in phases),
            tuple(map(latency_s, calm)),
            tuple(map(latency_s, attacked)),
            unanswered,
            lost,
            unhealthy,
            left,
        )

    async def _good(self, session: aiohttp.ClientSession, pair: Pair, seconds: float) -> Phase:
        """Good clients, one request of each after the other, for as long; once each at least."""
        start = time.monotonic()
        seen: list[tuple[Request, Outcome]] = []

        async def client(requests: Iterator[Request]) -> None:
            for request in requests:
                outcome = await _limited(session, pair.url, request)
                seen.append((request, outcome))
                if not outcome.ok or time.monotonic() - start >= seconds:
                    return

        share = len(self.good) // CLIENTS
        await asyncio.gather(
            *(
                client(itertools.cycle(self.good[i * share : (i + 1) * share]))
                for i in range(CLIENTS)
            )
        )
        return Phase(tuple(seen), time.monotonic() - start)


async def state(*servers: Server) -> dict[str, Any]:
    """What must be as it was when nothing is under way any more, by server.

    Requests by where they are, KV tokens that are locked or lost, what the scheduler found wrong
    with its pools, and whether it lets its cache be flushed; a server with the series also counts
    its metadata rows and the rooms in its tables.
    """
    found: dict[str, Any] = {}
    limit = aiohttp.ClientTimeout(total=HEALTH_LIMIT_S)
    async with aiohttp.ClientSession(timeout=limit) as session:
        for server in servers:
            name = server.process.name
            try:
                held = await asyncio.wait_for(pools(server), HEALTH_LIMIT_S)
                found |= {f"{name} {what}": count for what, count in held.items()}
                async with session.get(f"{server.url}/server_info") as reply:
                    [internal, *_] = (await reply.json())["internal_states"]
                if "rooms" in internal:
                    found[f"{name} rooms"] = internal["rooms"]
                async with session.post(f"{server.url}/flush_cache") as reply:
                    found[f"{name} idle"] = reply.status == 200
            except (aiohttp.ClientError, asyncio.TimeoutError, LabError, ValueError) as error:
                found[name] = type(error).__name__
    return found


def bootstrap_port(prefill: Server) -> int:
    """The port at which a prefill server says how it is laid out."""
    words = prefill.process.command.arguments
    return int(words[words.index("--disaggregation-bootstrap-port") + 1])


async def _again(attack: Attack, field: Field) -> None:
    """The attack, once, and again while its turn lasts."""
    end = time.monotonic() + TURN_S
    while True:
        begun = time.monotonic()
        await attack.act(field)
        due = max(begun + AGAIN_S, time.monotonic())
        if due >= end:
            return
        await asyncio.sleep(due - time.monotonic())


async def _unanswered(field: Field, acting: asyncio.Future[None], limit_s: float) -> int:
    """How many of an attack's requests got no answer, once it had time to end."""
    await asyncio.wait([acting], timeout=limit_s)
    unanswered = sum(answer.status is None for answer in field.answers)
    field.answers.clear()
    if acting.done() and not acting.exception():
        return unanswered
    acting.cancel()  # or it lost a server in the middle of what it did
    return unanswered + 1


def _ended(pair: Pair) -> list[str]:
    return [server.process.name for server in pair.servers if server.process.poll() is not None]


async def left_of(
    start: dict[str, Any], *servers: Server, limit_s: float = SETTLE_S
) -> dict[str, Any]:
    """What differs from the state at the start once the servers had time to settle."""
    limit = time.monotonic() + limit_s
    while True:
        now = await state(*servers)
        left = {name: value for name, value in now.items() if value != start.get(name)}
        if not left or time.monotonic() > limit:
            return left
        await asyncio.sleep(LOOK_S)


async def _limited(session: aiohttp.ClientSession, url: str, request: Request) -> Outcome:
    try:
        return await asyncio.wait_for(send(session, url, request), GOOD_LIMIT_S)
    except asyncio.TimeoutError:
        return Outcome(error=f"no reply in {GOOD_LIMIT_S:g} s", latency_s=GOOD_LIMIT_S)


async def _healthy(session: aiohttp.ClientSession, server: Server) -> bool:
    """Whether the server says so, asked a few times."""
    limit = aiohttp.ClientTimeout(total=HEALTH_LIMIT_S)
    for _ in range(HEALTH_TRIES):
        try:
            async with session.get(f"{server.url}/health", timeout=limit) as reply:
                if reply.status == 200:
                    return True
        except (aiohttp.ClientError, asyncio.TimeoutError):
            continue
    return False
