# SPDX-License-Identifier: Apache-2.0
"""Clients and peers that misbehave, one after the other, while good clients go on."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from pdlab.attacks import ATTACKS
from pdlab.figures import TIMING_NOISE, Better, Figure
from pdlab.scenarios.model import Reference, Scenario, Stage, Wave
from pdlab.settings import Settings
from pdlab.siege import CLIENTS, Siege, Verdict
from pdlab.traffic import Request, random_requests

PROMPT, NEW_TOKENS, A_CLIENT = 40, 8, 4
# Long enough for good requests that wait for memory, short enough to see what ends by it.
LIMIT_S = "12"
# What a hostile client may cost the others, beyond what the machine itself is not sure of.
MOST_SLOWER = 1.2
SETTINGS = Settings(
    decode_kv_tokens=2400,
    decode_reserved_tokens=64,
    environment=(
        ("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", LIMIT_S),
        ("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", LIMIT_S),
    ),
)


def good(vocab: int) -> tuple[Request, ...]:
    """What the good clients ask; each has requests of its own, every other one is streamed."""
    return random_requests(9, vocab, [PROMPT] * CLIENTS * A_CLIENT, NEW_TOKENS, stream_every=2)


def waves(vocab: int) -> list[Wave]:
    """For the reference only."""
    return [Wave("good clients", good(vocab))]


def conduct(stage: Stage, reference: Reference) -> list[Figure]:
    """All attacks on one tree, and what became of the good clients."""
    requests = good(stage.model.vocab)
    siege = Siege(
        stage.launcher,
        stage.tree,
        stage.settings,
        stage.model,
        stage.model_of,
        requests,
        reference,
        stage.say,
    )
    return figures(siege.run(ATTACKS))


def figures(verdicts: Sequence[Verdict]) -> list[Figure]:
    """Per attack the good requests harmed and their latency; then what became of the servers."""
    # The half of the calm turns that agree best differ by no more than this.
    unrest = [each for verdict in verdicts for each in verdict.unrest]
    noise = statistics.median(unrest) if unrest else None
    rows: list[Figure] = []
    for verdict in verdicts:
        name = verdict.attack.name
        harmed, must = (float(verdict.harmed), 0.0) if verdict.asked else (None, None)
        rows.append(Figure(f"{name}: harmed", harmed, "", Better.LOWER, must=must))
        rows.append(_latency(f"{name}: latency", verdict, noise or 0.0))
    asked = sum(verdict.asked for verdict in verdicts)
    ends = {
        "attacks that were not made": sum(not verdict.asked for verdict in verdicts),
        "servers lost": sum(len(verdict.lost) for verdict in verdicts),
        "servers that do not say they are well": sum(verdict.unhealthy for verdict in verdicts),
        "hostile requests without an answer": sum(verdict.unanswered for verdict in verdicts),
        "pairs that keep something": sum(bool(verdict.left) for verdict in verdicts),
    }
    rows += [Figure(name, float(n), "", Better.LOWER, must=0.0) for name, n in ends.items()]
    rows.append(Figure("two calm turns differ by", noise, "%"))
    return [*rows, Figure("good requests under attack", float(asked))]


def _latency(name: str, verdict: Verdict, noise: float) -> Figure:
    if verdict.attack.takes_share:
        return Figure(name, verdict.slower, "x")
    most = MOST_SLOWER * (1 + noise)
    return Figure(name, verdict.slower, "x", Better.LOWER, most=most, noise=TIMING_NOISE)


SCENARIO = Scenario(
    "hostile",
    "hostile clients and peers beside 32 good clients",
    SETTINGS,
    waves,
    lambda _: [],
    conduct=conduct,
)
