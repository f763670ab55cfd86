# SPDX-License-Identifier: Apache-2.0
"""What a pair shows in /metrics is what its client counted, request for request."""

from __future__ import annotations

import asyncio
import re
import statistics
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
from built import BUILD, START_LIMIT_S, TREE, on_servers
from test_dashboard import DASHBOARD, named

from pdlab import trees
from pdlab.control import stopped
from pdlab.health import Probe, volley
from pdlab.pair import Launcher, Pair, Server
from pdlab.progress import Progress
from pdlab.runner import Runner
from pdlab.scenarios import pressure
from pdlab.settings import Device
from pdlab.traffic import Outcome, random_requests, send_all

REPORT_LIMIT_S, LOOK_S = 40.0, 0.2
PROMPT = 40
CALM, CALM_NEW_TOKENS, AT_A_TIME = 12, 32, 3
PRESSED, PRESSED_NEW_TOKENS = 32, 200
ALONE, TOGETHER, UNANSWERED = 4, 20, 3
pytestmark = on_servers
SAMPLE = re.compile(r"sglang:(?P<name>\w+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")


@dataclass(frozen=True)
class Shown:
    """One look at a server's /metrics, and how many probes had reached it by then."""

    text: str
    asked: int

    def total(self, name: str, **labels: str) -> float:
        """Sum of the samples of a metric that carry these labels."""
        found = map(SAMPLE.fullmatch, self.text.splitlines())
        return sum(
            float(sample["value"])
            for sample in found
            if sample and sample["name"] == name and _labels(sample) >= labels.items()
        )

    def probes(self, outcome: str) -> float:
        return self.total("pd_health_probes_total", outcome=outcome)


def _labels(sample: re.Match[str]) -> set[tuple[str, str]]:
    return set(re.findall(r'(\w+)="([^"]*)"', sample["labels"] or ""))


def look(server: Server) -> Shown:
    """What a server shows. Its log has a line for every probe, the router's among them."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as reply:
        text = reply.read().decode()
    log = server.process.log.read_text(errors="replace")
    return Shown(text, len(re.findall(r'"GET /health\w* ', log)))


def look_at_rest(server: Server) -> Shown:
    """What a server shows once it has reported that nothing of its last request is left."""
    limit = time.monotonic() + REPORT_LIMIT_S
    while True:
        shown = look(server)
        rows = shown.total("pd_metadata_slots")
        free = shown.total("pd_metadata_slots", status="free")
        if rows == free and not shown.total("num_running_reqs"):
            return shown
        assert time.monotonic() < limit, f"{free} of {rows} rows are reported free"
        time.sleep(LOOK_S)


@dataclass(frozen=True)
class Seen:
    """What the client counted, and what the servers showed after each part."""

    pair: Pair
    calm: Sequence[Outcome]
    after_calm: Shown
    pressed: Sequence[Outcome]
    under_way: Shown
    after_pressed: Shown
    answered: Sequence[Probe]
    unanswered: Sequence[Probe]
    prefill: Shown
    decode: Shown

    @property
    def outcomes(self) -> list[Outcome]:
        return [*self.calm, *self.pressed]

    @property
    def asked(self) -> int:
        """Requests, that with which the last report was brought about included."""
        return len(self.outcomes) + 1


async def conduct(pair: Pair, vocab: int) -> Seen:
    """Requests that nothing disturbs, probes at rest, requests under KV pressure with probes
    beside them, probes that nobody answers, and a request that has all of it reported."""

    async def send(seed: int, number: int, new_tokens: int, most: int | None) -> list[Outcome]:
        requests = random_requests(seed, vocab, [PROMPT] * number, new_tokens)
        return await send_all(pair.url, requests, most)

    def rest() -> Shown:
        return look_at_rest(pair.decode)

    calm = await send(5, CALM, CALM_NEW_TOKENS, AT_A_TIME)
    after_calm = rest()
    answered = [probe for _ in range(ALONE) for probe in await volley(pair.decode.url, 1)]
    sending = asyncio.ensure_future(send(6, PRESSED, PRESSED_NEW_TOKENS, None))
    await asyncio.sleep(LOOK_S)
    answered += await volley(pair.decode.url, TOGETHER)
    under_way = await asyncio.to_thread(look, pair.decode)
    pressed = await sending
    after_pressed = rest()
    with stopped(pair.decode):
        unanswered = await volley(pair.decode.url, UNANSWERED)
    assert all(outcome.ok for outcome in await send(7, 1, CALM_NEW_TOKENS, None))
    return Seen(pair, calm, after_calm, pressed, under_way, after_pressed, answered, unanswered,
                look(pair.prefill), rest())  # fmt: skip


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    """A pair whose decode server is short of KV, with digests on, after its traffic."""
    short = pressure.SCENARIO.settings
    settings = replace(
        short,
        prefill_flags=("--enable-metrics",),
        decode_flags=("--enable-metrics", "--decode-log-interval", "1"),
    )
    tree = trees.existing(TREE, trees.PATCHED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_HANDOFF_DIGEST", "abort")
        with Launcher(Device.CPU, START_LIMIT_S, tmp_path_factory.mktemp("logs")) as launcher:
            model = Runner(launcher, Progress(), BUILD / "fixtures").model_of(settings)
            with launcher.pair(tree, settings, model) as pair:
                yield asyncio.run(conduct(pair, model.vocab))


def test_each_request_has_its_first_step_counted_once(seen: Seen) -> None:
    assert all(outcome.ok for outcome in seen.calm)
    assert seen.after_calm.total("pd_first_step_accept_length_count") == len(seen.calm)
    # one that is retracted before its first step has none after its transfer
    first = seen.decode.total("pd_first_step_accept_length_count")
    assert seen.asked - sum(o.retractions > 0 for o in seen.outcomes) <= first <= seen.asked


def test_first_steps_are_as_long_as_all_steps(seen: Seen) -> None:
    steps = statistics.fmean(outcome.accept_length or 0 for outcome in seen.calm)
    length = seen.after_calm.total("pd_first_step_accept_length_sum") / len(seen.calm)
    assert steps > 3
    assert length == pytest.approx(steps, rel=0.25)


def test_each_resume_restores_its_draft_state_and_each_probe_has_a_row(seen: Seen) -> None:
    assert all(outcome.ok for outcome in seen.pressed)
    resumed = sum(outcome.retractions for outcome in seen.outcomes)
    assert resumed
    assert seen.after_calm.total("pd_draft_state_total", source="restored") == 0
    assert seen.decode.total("pd_draft_state_total", source="restored") == resumed
    assert seen.decode.total("pd_draft_state_total", source="neutral") == 0
    rows = seen.decode.total("pd_draft_state_total", source="row")
    assert rows == seen.asked + seen.decode.probes("generated")
    # those that are retracted again before a step have no length
    assert 0 < seen.decode.total("pd_resumed_accept_length_count") <= resumed


def test_every_row_was_signed_and_found_as_it_was_sent(seen: Seen) -> None:
    name = "pd_handoff_digests_total"
    signed = seen.asked + seen.prefill.probes("generated")
    assert seen.prefill.total(name, stage="fill", verdict="signed") == signed
    for stage in ("commit", "consume"):
        assert seen.decode.total(name, stage=stage, verdict="match") == seen.asked
    for verdict in ("mismatch", "unsigned"):
        assert seen.decode.total(name, verdict=verdict) == 0


def test_every_probe_is_counted_by_what_became_of_it(seen: Seen) -> None:
    assert [probe.status for probe in seen.answered] == [200] * (ALONE + TOGETHER)
    assert [probe.status for probe in seen.unanswered] == [503] * UNANSWERED
    before, busy, after = seen.after_calm, seen.after_pressed, seen.decode
    for shown in (before, busy, after):
        assert shown.probes("answered") + shown.probes("generated") == shown.asked
    assert busy.probes("generated") - before.probes("generated") >= ALONE
    assert busy.probes("answered") - before.probes("answered") >= TOGETHER
    assert busy.probes("withdrawn") == 0
    assert after.probes("withdrawn") == UNANSWERED


def test_rows_are_shown_by_what_they_are_held_for(seen: Seen) -> None:
    for shown, held_at_most in ((seen.under_way, PRESSED), (seen.decode, 0)):
        rows = {
            status: shown.total("pd_metadata_slots", status=status)
            for status in ("free", "transferring", "waiting", "prebuilt", "quarantined")
        }
        assert sum(rows.values()) == shown.total("pd_metadata_slots") > 0
        assert sum(rows.values()) - rows["free"] <= held_at_most


def test_every_metric_of_the_dashboard_exists(seen: Seen) -> None:
    assert named(DASHBOARD.read_text()) <= named(seen.prefill.text + seen.decode.text)
