# SPDX-License-Identifier: Apache-2.0
"""A scenario: settings, waves of traffic, and the figures that are read off them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from pdlab.figures import TIMING_NOISE, Better, Figure
from pdlab.health import Probe
from pdlab.occupancy import Sample
from pdlab.pair import Launcher, Pair
from pdlab.settings import Model, Settings
from pdlab.traffic import Outcome, Request
from pdlab.trees import Tree

# What an aggregated server answers to each request, by `Request.key`.
Reference = dict[tuple[tuple[int, ...], int], tuple[int, ...]]
# How well it drafted for each of them.
AcceptLengths = dict[tuple[tuple[int, ...], int], float | None]


@dataclass(frozen=True)
class Seen:
    """What a script saw: what came of its requests, its probes, and counts by name."""

    outcomes: Sequence[Outcome] = ()
    probes: Sequence[Probe] = ()
    counts: dict[str, float] = field(default_factory=dict)


# Sends a wave's requests when it is called, and does to the servers what the wave is about.
Script = Callable[[Pair, Callable[[], Awaitable[list[Outcome]]]], Awaitable[Seen]]


@dataclass(frozen=True)
class Wave:
    """Requests sent together; the next wave begins when all of them are answered.

    `probes`: the decode server is asked for its health meanwhile, and `http` at the same rate for
    something that its scheduler has no part in. `script`: sends the requests, and more.
    `idle_s`: seconds in which nothing else is sent. `settle_s`: seconds the servers have
    afterwards to let go of all.
    """

    name: str
    requests: tuple[Request, ...] = ()
    concurrency: int | None = None
    probes: bool = False
    http: bool = False
    script: Script | None = None
    idle_s: float = 0.0
    settle_s: float = 0.0

    @property
    def asks(self) -> bool:
        """Whether servers are asked for their health meanwhile."""
        return self.probes or self.script is not None


@dataclass(frozen=True)
class WaveResult:
    """What a wave gave: outcomes in the order of its requests, and how long all of it took.

    `http`: the probes that no scheduler had a part in. `counts`: what the wave's script counted.
    `slots`: metadata rows of the decode server by status once it had settled, where it says so.
    `samples`: what that server held meanwhile. `kv_in_use`: KV tokens by server that were neither
    free nor merely cached once it had settled, where it says so. `digests`: looks that decode took
    at the digests of metadata rows, by stage and verdict, where those are on and it had to settle.
    """

    wave: Wave
    outcomes: tuple[Outcome, ...]
    probes: tuple[Probe, ...]
    seconds: float
    slots: dict[str, int] = field(default_factory=dict)
    samples: tuple[Sample, ...] = ()
    kv_in_use: dict[str, int] = field(default_factory=dict)
    http: tuple[Probe, ...] = ()
    counts: dict[str, float] = field(default_factory=dict)
    digests: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Observation:
    """All waves of one run of a scenario, and the tokens they should have given.

    `undisturbed`: the accept length of each request on the server that gave the reference.
    """

    waves: tuple[WaveResult, ...]
    reference: Reference
    undisturbed: AcceptLengths = field(default_factory=dict)

    def __getitem__(self, name: str) -> WaveResult:
        return next(result for result in self.waves if result.wave.name == name)

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        return tuple(outcome for result in self.waves for outcome in result.outcomes)


@dataclass(frozen=True)
class Stage:
    """What a scenario that starts its servers itself has for that; other models as well."""

    launcher: Launcher
    tree: Tree
    settings: Settings
    model: Model
    model_of: Callable[[Settings], Model]
    say: Callable[[str], None]


@dataclass(frozen=True)
class Scenario:
    """What `pdlab run NAME` does. `waves` makes the traffic for a vocabulary of that size.

    `follow_ups` makes waves to come after those, out of the tokens that are right for them. All of
    them are sent again as long as `lasts_s` seconds have not passed. `ends_servers`: no other
    scenario can have its servers afterwards, and there is one round. With `conduct` the waves are
    for the reference only: it starts servers, and loses some, by itself.
    """

    name: str
    about: str
    settings: Settings
    waves: Callable[[int], Sequence[Wave]]
    figures: Callable[[Observation], list[Figure]]
    follow_ups: Callable[[Reference], Sequence[Wave]] = lambda _: ()
    lasts_s: float = 0.0
    ends_servers: bool = False
    conduct: Callable[[Stage, Reference], list[Figure]] | None = None


def leftovers(results: Iterable[WaveResult]) -> list[Figure]:
    """What the servers still held when they had settled after the waves; nothing is right."""
    settled = [result for result in results if result.wave.settle_s]
    rows = [sum(r.slots.values()) - r.slots["free"] for r in settled if r.slots]
    tokens = [tokens for result in settled for tokens in result.kv_in_use.values()]
    return [
        _held("metadata rows not free", rows),
        _held("KV tokens in use when idle", tokens),
    ]


def _held(name: str, counts: Sequence[int]) -> Figure:
    """A count that must be 0 where a server tells it."""
    value, must = (float(sum(counts)), 0.0) if counts else (None, None)
    return Figure(name, value, "", Better.LOWER, must=must)


def correctness(observation: Observation, may_fail: bool = False) -> list[Figure]:
    """Every request answered, and each answer the tokens that an aggregated server gives.

    `may_fail`: SGLang is known to refuse some requests of this kind; they are counted only.
    A request whose client gave up has nothing to say.
    """
    requests = [request for result in observation.waves for request in result.wave.requests]
    asked = [
        (request, outcome)
        for request, outcome in zip(requests, observation.outcomes, strict=True)
        if not outcome.cancelled
    ]
    answers = [
        outcome.tokens == observation.reference[request.key]
        for request, outcome in asked
        if outcome.ok
    ]
    failed = float(len(asked) - len(answers))
    share = statistics.fmean(answers) if answers else None
    return [
        Figure("tokens equal aggregated", share, "%", Better.HIGHER, must=1.0),
        Figure("requests failed", failed, "", Better.LOWER, must=None if may_fail else 0.0),
    ]


def accept_length(name: str, outcomes: Iterable[Outcome], aim: bool = False) -> Figure:
    """Mean over requests of the tokens accepted in one verification, the bonus token included."""
    lengths = [outcome.accept_length for outcome in outcomes if outcome.accept_length is not None]
    value = statistics.fmean(lengths) if lengths else None
    return Figure(name, value, "", Better.HIGHER, aim)


def beside_undisturbed(
    name: str, seen: Observation, wave: str, which: Callable[[int], bool], aim: bool = False
) -> Figure:
    """Accept length of some of a wave's requests, by number, over that of the same undisturbed.

    The requests are the same on both sides, so that nothing but the disturbance differs.
    """
    result = seen[wave]
    pairs = [
        (outcome.accept_length, seen.undisturbed.get(request.key))
        for number, (request, outcome) in enumerate(
            zip(result.wave.requests, result.outcomes, strict=True)
        )
        if which(number)
    ]
    known = [(here, there) for here, there in pairs if here is not None and there is not None]
    value = sum(here for here, _ in known) / sum(there for _, there in known) if known else None
    return Figure(name, value, "", Better.HIGHER, aim)


def throughput(name: str, result: WaveResult, aim: bool = False) -> Figure:
    """Generated tokens per second of a whole wave."""
    tokens = sum(len(outcome.tokens) for outcome in result.outcomes)
    value = tokens / result.seconds if result.seconds else None
    return Figure(name, value, "tok/s", Better.HIGHER, aim, noise=TIMING_NOISE)


def latency(name: str, seconds: Iterable[float | None], aim: bool = False) -> list[Figure]:
    """Median, 99th percentile and maximum of some times."""
    known = sorted(value for value in seconds if value is not None)
    marks = (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
    return [
        Figure(
            f"{name} {mark}",
            known[max(0, math.ceil(share * len(known)) - 1)] if known else None,
            "s",
            Better.LOWER,
            aim,
            noise=TIMING_NOISE,
        )
        for mark, share in marks
    ]


def health(name: str, probes: Iterable[Probe], aim: bool = True) -> list[Figure]:
    """How long the answered ones of some probes took, and how many were not answered."""
    asked = list(probes)
    answered = [probe.latency_s for probe in asked if probe.ok]
    missed = float(len(asked) - len(answered))
    return [
        *latency(f"{name} probe", answered, aim),
        Figure(f"{name} probes missed", missed, "", Better.LOWER, must=0.0),
    ]


def handed_over(result: WaveResult) -> list[Figure]:
    """Metadata rows that decode compared with what prefill had signed, and those that differed.

    Without values where digests are off.
    """
    looks = result.digests
    arrived, read = (
        float(sum(looks.get(f"{stage} {verdict}", 0) for verdict in ("match", "mismatch")))
        if looks
        else None
        for stage in ("commit", "consume")
    )
    wrong = float(sum(n for name, n in looks.items() if name.endswith("mismatch")))
    return [
        Figure("rows checked on arrival", arrived),
        Figure("rows checked when read", read),
        Figure(
            "rows not as they were sent",
            wrong if looks else None,
            "",
            Better.LOWER,
            must=0.0 if looks else None,
        ),
    ]


def count(result: WaveResult, name: str, prefix: str = "", must: float | None = None) -> Figure:
    """A number that a wave's script counted, `prefix` before its name."""
    value = result.counts.get(name)
    better = Better.INFO if must is None else Better.LOWER
    return Figure(prefix + name, value, "", better, must=None if value is None else must)
