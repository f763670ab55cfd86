# SPDX-License-Identifier: Apache-2.0
"""KV pressure with decode's radix cache, then prompts that continue what was published."""

from __future__ import annotations

from pdlab.figures import Figure
from pdlab.scenarios.model import (
    Observation,
    Reference,
    Scenario,
    Wave,
    accept_length,
    beside_undisturbed,
    correctness,
    throughput,
)
from pdlab.settings import Settings
from pdlab.traffic import Request, random_requests

REQUESTS, PROMPT, NEW_TOKENS = 48, 96, 160
# The decode server keeps the pages of about as many, the last ones, when all are answered.
CONTINUED, OF_THE_ANSWER, NEW_TOKENS_THEN = 12, 120, 64


def _prompts(vocab: int) -> tuple[Request, ...]:
    return random_requests(8, vocab, [PROMPT] * REQUESTS, NEW_TOKENS)


def waves(vocab: int) -> list[Wave]:
    return [Wave("pressure", _prompts(vocab))]


def follow_ups(reference: Reference) -> list[Wave]:
    """Alone and one at a time, the latest first: each begins with what an earlier one left."""
    first = [
        (prompt, tokens)
        for (prompt, new_tokens), tokens in reference.items()
        if (len(prompt), new_tokens) == (PROMPT, NEW_TOKENS)
    ]
    latest = reversed(first[-CONTINUED:])
    requests = tuple(
        Request(prompt + tokens[:OF_THE_ANSWER], NEW_TOKENS_THEN) for prompt, tokens in latest
    )
    return [Wave("continued", requests, concurrency=1)]


def figures(seen: Observation) -> list[Figure]:
    pressed, continued = seen["pressure"], seen["continued"]
    retracted = [outcome.retractions > 0 for outcome in pressed.outcomes]
    return [
        *correctness(seen, may_fail=True),
        accept_length(
            "accept length, retracted",
            (outcome for outcome in pressed.outcomes if outcome.retractions),
        ),
        beside_undisturbed(
            "retracted / undisturbed", seen, "pressure", retracted.__getitem__, aim=True
        ),
        throughput("throughput", pressed, aim=True),
        Figure("requests retracted", float(sum(retracted))),
        accept_length("accept length, continued", continued.outcomes),
        beside_undisturbed(
            "continued / undisturbed",
            seen,
            "continued",
            # Numbered from the latest: those whose earlier request had been retracted.
            lambda number: retracted[REQUESTS - 1 - number],
            aim=True,
        ),
    ]


SCENARIO = Scenario(
    "republish",
    "KV pressure with decode radix cache, then prompts on what was published",
    Settings(page_size=16, decode_radix=True, decode_kv_tokens=2048, decode_reserved_tokens=8),
    waves,
    figures,
    follow_ups,
)
