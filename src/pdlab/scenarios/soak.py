# SPDX-License-Identifier: Apache-2.0
"""Ten minutes of everything at once: bursts, clients that give up, a pool that is too small."""

from __future__ import annotations

import random
from dataclasses import replace

from pdlab.figures import Better, Figure
from pdlab.scenarios.model import (
    Observation,
    Scenario,
    Wave,
    accept_length,
    correctness,
    latency,
)
from pdlab.settings import Settings
from pdlab.traffic import Cancel, Outcome, random_requests

LASTS_S = 600.0
# A third of what the requests at work would need at their longest, so that some are retracted.
KV_TOKENS, RESERVED = 6000, 8
AT_A_TIME, BURST, IMPATIENT, LONG = 64, 64, 60, 32
LATEST_S = 1.5
# An aborted sender is waited for up to 30 s.
SETTLE_S = 40.0


def waves(vocab: int) -> list[Wave]:
    """One turn: a burst alone, then all kinds mixed, then a quiet look at what is still held."""
    when = random.Random(11)
    burst = random_requests(11, vocab, [40] * BURST, 60, stream_every=4)
    long = random_requests(12, vocab, [60] * LONG, 300)
    impatient = (
        replace(
            burst[number % BURST],
            cancel=Cancel(when.uniform(0, LATEST_S), by_call=number % 2 == 0),
        )
        for number in range(IMPATIENT)
    )
    mixed = [*burst, *long, *impatient]
    when.shuffle(mixed)
    return [
        Wave("burst", burst),
        Wave("mixed", tuple(mixed), concurrency=AT_A_TIME, probes=True, settle_s=SETTLE_S),
    ]


def figures(seen: Observation) -> list[Figure]:
    held = [_held(result.slots) for result in seen.waves if result.slots]
    probes = [probe for result in seen.waves for probe in result.probes]
    unanswered = float(sum(not probe.ok for probe in probes))
    return [
        *correctness(seen),
        Figure("requests answered", float(sum(map(_answered, seen.outcomes)))),
        Figure("requests cancelled", float(sum(outcome.cancelled for outcome in seen.outcomes))),
        Figure("retractions", float(sum(outcome.retractions for outcome in seen.outcomes))),
        Figure(
            "metadata rows not free",
            float(max(held)) if held else None,
            "",
            Better.LOWER,
            must=0.0 if held else None,
        ),
        Figure("health probes not answered 200", unanswered, "", Better.LOWER, must=0.0),
        accept_length("accept length, first turn", seen["mixed"].outcomes),
        accept_length("accept length, last turn", seen.waves[-1].outcomes),
        *latency("latency", (o.latency_s for o in seen.outcomes if _answered(o))),
    ]


def _answered(outcome: Outcome) -> bool:
    return outcome.ok and not outcome.cancelled


def _held(slots: dict[str, int]) -> int:
    return sum(slots.values()) - slots["free"]


SCENARIO = Scenario(
    "soak",
    "ten minutes of bursts, aborts and retractions together",
    Settings(decode_kv_tokens=KV_TOKENS, decode_reserved_tokens=RESERVED),
    waves,
    figures,
    lasts_s=LASTS_S,
)
