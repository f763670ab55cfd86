# SPDX-License-Identifier: Apache-2.0
"""A server is killed with KV in flight, the router stands still, the two ends lose each other."""

from __future__ import annotations

from collections.abc import Sequence

from pdlab.faults import FAULTS, Damage, Ordeal
from pdlab.figures import Better, Figure
from pdlab.scenarios.model import Reference, Scenario, Stage, Wave
from pdlab.settings import Settings
from pdlab.traffic import Request, random_requests

CALM, BURST, PROMPT, NEW_TOKENS = 8, 64, 160, 48
CHUNK = 64  # so that the KV of a prompt goes in three parts
# SGLang's own limits: what waits for the other end, pages that it may still write to, and how soon
# a decode server that did not answer is tried again. All are minutes by default, or half a minute.
LIMIT_S, RELEASE_S, PROBE_S = "12", "5", "2"
SETTINGS = Settings(
    prefill_flags=("--chunked-prefill-size", str(CHUNK)),
    environment=(
        ("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", LIMIT_S),
        ("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", LIMIT_S),
        ("SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT", RELEASE_S),
        ("SGLANG_FAILED_SESSION_PROBE_INTERVAL_S", PROBE_S),
    ),
)


def calm(vocab: int) -> tuple[Request, ...]:
    """What is asked before a fault, and when it is over."""
    return random_requests(41, vocab, [PROMPT] * CALM, NEW_TOKENS)


def burst(vocab: int) -> tuple[Request, ...]:
    """What is under way when a fault strikes."""
    return random_requests(42, vocab, [PROMPT] * BURST, NEW_TOKENS, stream_every=3)


def waves(vocab: int) -> list[Wave]:
    """For the reference only."""
    return [Wave("calm", calm(vocab)), Wave("burst", burst(vocab))]


def conduct(stage: Stage, reference: Reference) -> list[Figure]:
    """All faults on one tree, and what became of the requests and of the servers."""
    vocab = stage.model.vocab
    ordeal = Ordeal(
        stage.launcher,
        stage.tree,
        stage.settings,
        stage.model,
        calm(vocab),
        burst(vocab),
        stage.say,
    )
    return figures(ordeal.run(FAULTS), reference)


def figures(damages: Sequence[Damage], reference: Reference) -> list[Figure]:
    """Per fault what became of its requests, of the servers that are left, and of later ones."""
    rows: list[Figure] = []
    for damage in damages:
        name = damage.fault.name
        rows += [
            Figure(f"{name}: requests in flight", float(damage.in_flight)),
            Figure(f"{name}: failed", float(len(damage.failed))),
            Figure(f"{name}: slowest to know", damage.slowest_s, "s"),
            Figure(f"{name}: serves again after", damage.again_s, "s"),
        ]
        none = {
            "wrong tokens": damage.wrong(reference),
            "stuck": damage.stuck,
            "not told": damage.unreported,
            "things kept": len(damage.left) + damage.complaints,
            "servers unwell": damage.unwell,
            "failed afterwards": damage.still_failing,
        }
        rows += [
            Figure(f"{name}: {what}", float(n), "", Better.LOWER, must=0.0)
            for what, n in none.items()
        ]
    return rows


SCENARIO = Scenario(
    "faults",
    "servers killed, the router halted, the link cut, with KV in flight",
    SETTINGS,
    waves,
    lambda _: [],
    conduct=conduct,
)
