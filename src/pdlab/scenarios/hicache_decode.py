# SPDX-License-Identifier: Apache-2.0
"""A decode KV pool too small for the conversations, a host cache behind its radix cache."""

from __future__ import annotations

from pdlab.figures import Figure
from pdlab.scenarios.model import (
    Observation,
    Reference,
    Scenario,
    Wave,
    accept_length,
    correctness,
)
from pdlab.settings import HOST_COPIES, Settings
from pdlab.traffic import Request, random_requests

REQUESTS, PROMPT, NEW_TOKENS, AT_A_TIME = 24, 208, 64, 4
OF_THE_ANSWER = 40
# Room for a third of the requests, and behind it for all of them.
POOL = 2048
FLAGS = ("--enable-hierarchical-cache", "--hicache-ratio", "8", *HOST_COPIES)


def waves(vocab: int) -> list[Wave]:
    requests = random_requests(11, vocab, [PROMPT] * REQUESTS, NEW_TOKENS)
    return [Wave("first", requests, AT_A_TIME)]


def follow_ups(reference: Reference) -> list[Wave]:
    """What continues the answers, the oldest first: their pages have left the device."""
    first = [
        (prompt, tokens)
        for (prompt, new_tokens), tokens in reference.items()
        if (len(prompt), new_tokens) == (PROMPT, NEW_TOKENS)
    ]
    requests = tuple(
        Request(prompt + tokens[:OF_THE_ANSWER], NEW_TOKENS) for prompt, tokens in first
    )
    return [Wave("continued", requests, AT_A_TIME)]


def figures(seen: Observation) -> list[Figure]:
    first, continued = seen["first"].outcomes, seen["continued"].outcomes
    return [
        *correctness(seen),
        accept_length("accept length, first", first),
        accept_length("accept length, continued", continued, aim=True),
        Figure("tokens from the cache", float(sum(each.cached_tokens for each in continued))),
    ]


SCENARIO = Scenario(
    "hicache-decode",
    "conversations that decode loads back from its host cache",
    Settings(page_size=16, decode_radix=True, decode_kv_tokens=POOL, decode_flags=FLAGS),
    waves,
    figures,
    follow_ups,
)
