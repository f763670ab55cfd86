# SPDX-License-Identifier: Apache-2.0
"""What breaks under a pair at work: a server, the router, the network between the two ends."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from rich.markup import escape

from pdlab.control import halted, load
from pdlab.errors import LabError
from pdlab.health import volley
from pdlab.link import cut
from pdlab.pair import Launcher, Pair, Server
from pdlab.settings import Model, Role, Settings
from pdlab.siege import Reference, bootstrap_port, left_of, state
from pdlab.traffic import ENDED_EARLY, Outcome, Request, send_all
from pdlab.trees import Tree

HALT_S, CUT_S = 4.0, 3.0
IN_FLIGHT, IN_FLIGHT_LIMIT_S = 16, 30.0
# A prefill that could not send takes up to two failed probes to try that decode server again.
RECOVERY_LIMIT_S, RECOVERY_LOOK_S = 30.0, 0.5
# Far longer than any limit that a server has in the scenario: who waits for this is stuck.
ANSWER_LIMIT_S = 90.0


@dataclass(frozen=True)
class Fault:
    """`strike` breaks something while requests are under way; `loses`: the server that is gone."""

    name: str
    strike: Callable[[Pair], Awaitable[None]]
    loses: Role | None = None


async def kill_prefill(pair: Pair) -> None:
    await asyncio.to_thread(pair.prefill.process.stop)


async def kill_decode(pair: Pair) -> None:
    await asyncio.to_thread(pair.decode.process.stop)


async def halt_router(pair: Pair) -> None:
    """The router stands still for some seconds, its connections open, and goes on."""
    with halted(pair.servers[2]):
        await asyncio.sleep(HALT_S)


async def cut_link(pair: Pair) -> None:
    """Prefill and decode lose each other for some seconds."""
    with cut(pair.prefill, pair.decode) as ends:
        await asyncio.sleep(CUT_S)
    if not ends:
        raise LabError("prefill and decode had no connection that could be cut")


FAULTS = (
    Fault("prefill killed", kill_prefill, Role.PREFILL),
    Fault("decode killed", kill_decode, Role.DECODE),
    Fault("router halted", halt_router),
    Fault("link cut", cut_link),
)


@dataclass(frozen=True)
class Damage:
    """What a fault did: to the requests under way, to the servers that are left, and for how long.

    `in_flight`: requests whose KV was on its way when it struck. `left`: what those servers keep,
    `complaints`: lines in their logs about a leak, `unwell`: those that do not say they are well.
    `afterwards`: what requests to the servers that are left, and to a new one in place of a lost
    one, came to, `again_s` seconds after the first try.
    """

    fault: Fault
    requests: Sequence[Request]
    outcomes: Sequence[Outcome]
    in_flight: int
    left: dict[str, Any] = field(default_factory=dict)
    complaints: int = 0
    unwell: int = 0
    afterwards: Sequence[tuple[Request, Outcome]] = ()
    again_s: float = 0.0

    def wrong(self, reference: Reference) -> int:
        """Requests that ended as if all were well, with another's tokens."""
        asked = [*zip(self.requests, self.outcomes, strict=True), *self.afterwards]
        return sum(o.ok and o.tokens != reference[request.key] for request, o in asked)

    @property
    def failed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if not outcome.ok]

    @property
    def stuck(self) -> int:
        """Requests that nothing came of."""
        return sum(outcome.latency_s >= ANSWER_LIMIT_S for outcome in self.failed)

    @property
    def unreported(self) -> int:
        """Requests that ended early without a word of it."""
        return sum(outcome.error == ENDED_EARLY for outcome in self.failed)

    @property
    def slowest_s(self) -> float:
        """Until the last client knew what had become of its request."""
        return max(outcome.latency_s for outcome in self.outcomes)

    @property
    def still_failing(self) -> int:
        """Requests that failed when all was over."""
        return sum(not outcome.ok for _, outcome in self.afterwards)


@dataclass
class Ordeal:
    """Faults, each on a pair of its own."""

    launcher: Launcher
    tree: Tree
    settings: Settings
    model: Model
    calm: Sequence[Request]
    burst: Sequence[Request]
    say: Callable[[str], None]

    def run(self, faults: Sequence[Fault]) -> list[Damage]:
        """What each fault did, in order."""
        return [self._one(fault) for fault in faults]

    def _one(self, fault: Fault) -> Damage:
        with self.launcher.pair(self.tree, self.settings, self.model) as pair:
            damage = asyncio.run(self._struck(pair, fault))
            with self._mended(pair, fault) as url:
                after, again_s = asyncio.run(self._afterwards(url))
        told = Counter(_about(outcome.error or "") for outcome in damage.failed)
        for text, times in told.items():
            self.say(escape(f"{fault.name}: {times} x {text}"))
        served = tuple(zip(self.calm, after, strict=True))
        return replace(damage, afterwards=served, again_s=again_s)

    async def _struck(self, pair: Pair, fault: Fault) -> Damage:
        """Strike while a burst is under way, and wait for what comes of all of it."""
        survivors = [s for s in pair.servers[:2] if s.process.name != _name(fault.loses)]
        await send_all(pair.url, self.calm)
        start = await state(*survivors)
        sending = asyncio.ensure_future(send_all(pair.url, self.burst, limit_s=ANSWER_LIMIT_S))
        in_flight = await _in_flight(pair.decode)
        await fault.strike(pair)
        outcomes = await sending
        left = await left_of(start, *survivors)
        probes = [probe for server in survivors for probe in await volley(server.url, 1)]
        return Damage(
            fault,
            self.burst,
            outcomes,
            in_flight,
            left,
            sum(_complaints(server) for server in survivors),
            sum(not probe.ok for probe in probes),
        )

    async def _afterwards(self, url: str) -> tuple[list[Outcome], float]:
        """What the calm requests come to, once they are served or it takes too long; and when."""
        start = time.monotonic()
        while True:
            seconds = time.monotonic() - start
            outcomes = await send_all(url, self.calm, limit_s=ANSWER_LIMIT_S)
            if all(outcome.ok for outcome in outcomes) or seconds > RECOVERY_LIMIT_S:
                return outcomes, seconds
            await asyncio.sleep(RECOVERY_LOOK_S)

    @contextmanager
    def _mended(self, pair: Pair, fault: Fault) -> Iterator[str]:
        """Where requests can be sent again: past a lost server stands a new one, with a router."""
        if fault.loses is None:
            yield pair.url
            return
        prefill, decode = pair.prefill, pair.decode
        port = bootstrap_port(prefill)
        with self.launcher.joining(fault.loses, self.tree, self.settings, self.model) as (
            new,
            new_port,
        ):
            if fault.loses is Role.PREFILL:
                prefill, port = new, new_port
            else:
                decode = new
            with self.launcher.routed(self.tree, prefill, port, decode) as router:
                yield router.url


def _name(role: Role | None) -> str | None:
    return role.value if role else None


async def _in_flight(decode: Server) -> int:
    """Requests whose KV is on its way, as soon as there are enough of them."""
    limit = time.monotonic() + IN_FLIGHT_LIMIT_S
    while (waiting := (await load(decode))["transfer"]) < IN_FLIGHT:
        if time.monotonic() > limit:
            raise LabError(f"decode never waited for the KV of {IN_FLIGHT}; nothing was broken")
    return waiting


def _complaints(server: Server) -> int:
    return server.process.log.read_text(errors="replace").count("leak detected")


def _about(error: str) -> str:
    """An error without what differs from request to request."""
    return " ".join("…" if any(map(str.isdigit, word)) else word for word in error.split())[:200]
