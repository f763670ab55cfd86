# SPDX-License-Identifier: Apache-2.0
"""Health in each state a server can be in: probes are answered as long as its loop turns."""

from __future__ import annotations

from pdlab import states
from pdlab.figures import Figure
from pdlab.scenarios.model import Observation, Scenario, Wave, correctness, count, health
from pdlab.settings import Settings
from pdlab.traffic import Request, random_requests

IDLE_S = 6.0
RUNNING = 16  # as in `health`
# Some 85 requests of 40 tokens, or half as many of 120, fit the KV pool of decode.
KV_TOKENS, RESERVED_TOKENS = 4096, 8
CHUNK = 64


def waves(vocab: int) -> list[Wave]:
    def requests(seed: int, number: int, prompt: int, new_tokens: int) -> tuple[Request, ...]:
        return random_requests(seed, vocab, [prompt] * number, new_tokens)

    return [
        Wave("idle", probes=True, idle_s=IDLE_S),
        Wave("20 at once", script=states.at_once),
        Wave("prealloc", requests(31, 64, 120, 16), script=states.waiting_for_prefill),
        Wave("transfer", requests(32, 24, 120, 16), script=states.waiting_for_prefill),
        Wave("retracted", requests(33, 48, 40, 400), script=states.retracting),
        Wave("chunked", requests(34, 8, 1900, 4), script=states.chunking),
        Wave("paused", requests(35, 16, 40, 100), script=states.paused),
        Wave("weights", script=states.weights_updated),
        Wave("stopped", script=states.standing_still),
        Wave("500", requests(36, 64, 40, 100), script=states.many),
    ]


def figures(seen: Observation) -> list[Figure]:
    rows = correctness(seen)
    for result in seen.waves:
        if result.wave.name != "stopped":
            rows += health(result.wave.name, result.probes)
    for name in ("prealloc", "transfer"):
        rows += [
            count(seen[name], each, f"{name}: ") for each in ("prealloc", "transfer", "running")
        ]
        rows.append(count(seen[name], "left by probes", f"{name}: ", must=0.0))
    stopped, many = seen["stopped"], seen["500"]
    return [
        *rows,
        count(seen["retracted"], "most retracted"),
        count(seen["weights"], "longest update, s"),
        count(stopped, "stopped, not 503", must=0.0),
        count(stopped, "stopped, s to 503"),
        count(stopped, "continued, not 200", must=0.0),
        count(stopped, "continued, s to 200"),
        count(many, "probes sent"),
        count(many, "pools changed", must=0.0),
    ]


SCENARIO = Scenario(
    "probes",
    "health probes in every state: queued, retracted, chunked, paused, stopped",
    Settings(
        decode_kv_tokens=KV_TOKENS,
        decode_reserved_tokens=RESERVED_TOKENS,
        prefill_flags=("--chunked-prefill-size", str(CHUNK)),
        decode_flags=("--max-running-requests", str(RUNNING)),
    ),
    waves,
    figures,
)
