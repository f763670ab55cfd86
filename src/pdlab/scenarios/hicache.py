# SPDX-License-Identifier: Apache-2.0
"""A prefill KV pool too small for the prompts, a host cache behind it: repeats are loaded back."""

from __future__ import annotations

from pdlab.figures import Figure
from pdlab.scenarios.model import Observation, Scenario, Wave, accept_length, correctness
from pdlab.settings import HOST_COPIES, Settings
from pdlab.traffic import random_requests

REQUESTS, PROMPT, NEW_TOKENS, AT_A_TIME = 24, 200, 64, 4
# Room for the prompts of a third of the requests, and behind it for all of them.
FLAGS = (
    *("--max-total-tokens", "1600"),
    *("--enable-hierarchical-cache", "--hicache-ratio", "8", *HOST_COPIES),
)


def waves(vocab: int) -> list[Wave]:
    requests = random_requests(10, vocab, [PROMPT] * REQUESTS, NEW_TOKENS)
    return [Wave(name, requests, AT_A_TIME) for name in ("first", "again")]


def figures(seen: Observation) -> list[Figure]:
    again = seen["again"].outcomes
    return [
        *correctness(seen),
        accept_length("accept length, first", seen["first"].outcomes),
        accept_length("accept length, again", again, aim=True),
        Figure("tokens from the host", float(sum(each.host_tokens for each in again))),
    ]


SCENARIO = Scenario(
    "hicache",
    "prompts that prefill loads back from its host cache",
    Settings(page_size=16, prefill_flags=FLAGS),
    waves,
    figures,
)
