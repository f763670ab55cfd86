# SPDX-License-Identifier: Apache-2.0
"""Shared and repeated prompts with the decode server's radix cache on, in pages of 16.

Prompts end at, before and behind a page, and prefill takes them in chunks of three pages, so that
last chunks end inside pages. What decode has cached of a prompt is as long as what prefill has,
shorter (the first of two is still being decoded) and longer (its answer belongs to it). A last
prompt evicts all that decode has cached, and then no page is in use on either end. Without a draft
(`--model` alone) decode has prompts of whole pages whole; with one it lacks a page, for its tree
keys pairs of tokens.
"""

from __future__ import annotations

import itertools

from pdlab.figures import TIMING_NOISE, Better, Figure
from pdlab.scenarios.model import (
    Observation,
    Reference,
    Scenario,
    Wave,
    WaveResult,
    accept_length,
    correctness,
    leftovers,
)
from pdlab.settings import Settings
from pdlab.traffic import Request, random_requests

PAGE, CHUNK_PAGES, POOL_PAGES, RESERVED = 16, 3, 160, 16
REQUESTS, PROMPT, SHARED, NEW_TOKENS, ROUNDS = 8, 123, 100, 48, 3
EDGE_PROMPTS = tuple(pages * PAGE + step for pages in (1, 2, 3, 6, 9) for step in (-1, 0, 1))
EDGE_NEW_TOKENS, CONTINUED_NEW_TOKENS, EDGES_AT_A_TIME = 24, 20, 10
# One page is never handed out, and one the last verification drafts into.
LAST_NEW_TOKENS, SETTLE_S = 8, 10.0
LAST_PROMPT = (POOL_PAGES - 2) * PAGE - RESERVED - LAST_NEW_TOKENS


def _at_page_edges(vocab: int) -> tuple[Request, ...]:
    return random_requests(9, vocab, EDGE_PROMPTS, EDGE_NEW_TOKENS)


def waves(vocab: int) -> list[Wave]:
    requests = random_requests(5, vocab, [PROMPT] * REQUESTS, NEW_TOKENS, shared=SHARED)
    edges = _at_page_edges(vocab)
    twice = tuple(itertools.chain.from_iterable(zip(edges, edges, strict=True)))
    return [
        *(Wave(f"round {number}", requests) for number in range(1, ROUNDS + 1)),
        Wave("page edges, twice", twice, concurrency=EDGES_AT_A_TIME),
        Wave("page edges, again", edges, concurrency=EDGES_AT_A_TIME),
    ]


def follow_ups(reference: Reference) -> list[Wave]:
    """Each edge prompt goes on with its answer up to the next edges; then one as large as all."""
    answered = [
        prompt + tokens
        for (prompt, new_tokens), tokens in reference.items()
        if new_tokens == EDGE_NEW_TOKENS and len(prompt) in EDGE_PROMPTS
    ]
    continued = tuple(
        Request(text[: len(text) // PAGE * PAGE + step], CONTINUED_NEW_TOKENS)
        for text in answered
        for step in (-1, 0)
    )
    words = itertools.cycle(itertools.chain.from_iterable(reversed(text) for text in answered))
    last = Request(tuple(itertools.islice(words, LAST_PROMPT)), LAST_NEW_TOKENS)
    return [
        Wave("continued", continued, concurrency=EDGES_AT_A_TIME),
        Wave("whole pool", (last,), settle_s=SETTLE_S),
    ]


def figures(seen: Observation) -> list[Figure]:
    slowest = max((outcome.latency_s for outcome in seen.outcomes), default=0.0)
    return [
        *correctness(seen),
        Figure("prompts cached whole", float(sum(map(_cached_whole, seen.waves)))),
        *leftovers(seen.waves),
        *(
            Figure(
                f"cached tokens, {result.wave.name}",
                float(max(outcome.cached_tokens for outcome in result.outcomes)),
                "",
                Better.HIGHER,
            )
            for result in seen.waves
        ),
        *(accept_length(f"accept length, {r.wave.name}", r.outcomes) for r in seen.waves),
        Figure("slowest request", slowest, "s", Better.LOWER, noise=TIMING_NOISE),
    ]


def _cached_whole(result: WaveResult) -> int:
    """Requests of which decode had every page: prefill always leaves a token to compute."""
    answered = zip(result.wave.requests, result.outcomes, strict=True)
    return sum(outcome.cached_tokens == len(request.prompt) for request, outcome in answered)


SCENARIO = Scenario(
    "prefix",
    "decode radix cache, shared, repeated and continued prompts around page edges",
    Settings(
        page_size=PAGE,
        decode_radix=True,
        decode_kv_tokens=POOL_PAGES * PAGE,
        decode_reserved_tokens=RESERVED,
        prefill_flags=("--chunked-prefill-size", str(CHUNK_PAGES * PAGE)),
    ),
    waves,
    figures,
    follow_ups,
)
