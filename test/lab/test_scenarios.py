# SPDX-License-Identifier: Apache-2.0
"""What a scenario reads off its waves, and that scenarios can share a pair."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdlab import runner
from pdlab.errors import LabError
from pdlab.figures import Figure
from pdlab.health import Probe
from pdlab.scenarios import SCENARIOS, choose
from pdlab.scenarios.model import Observation, Scenario, WaveResult, latency, throughput
from pdlab.traffic import Outcome

VOCAB = 512
# The others start servers themselves; see test_siege.py.
WITH_WAVES = [name for name, scenario in SCENARIOS.items() if not scenario.conduct]
# What scripts count; none of it is wrong at 0.
COUNTED = (
    *("prealloc", "transfer", "running", "left by probes", "most retracted", "probes sent"),
    *("stopped, not 503", "continued, not 200", "pools changed", "transfers in flight"),
)
RIGHT = Outcome(tokens=(1, 2, 3, 4), accept_length=3.9, latency_s=1.0, status=200)


def observe(scenario: Scenario, *outcomes: Outcome) -> Observation:
    """All waves with the outcomes given in turn, and a reference of the first one's tokens."""
    waves = list(scenario.waves(VOCAB))
    reference = {request.key: RIGHT.tokens for wave in waves for request in wave.requests}
    waves += scenario.follow_ups(reference)
    results = tuple(
        WaveResult(
            wave,
            tuple(outcomes[place % len(outcomes)] for place in range(len(wave.requests))),
            tuple(Probe(0.1 * number, 0.001 * number, 200) for number in range(1, 101))
            if wave.probes or wave.script
            else (),
            2.0,
            counts=dict.fromkeys(COUNTED, 0.0),
        )
        for wave in waves
    )
    reference |= {request.key: RIGHT.tokens for wave in waves for request in wave.requests}
    return Observation(results, reference)


def by_name(figures: list[Figure]) -> dict[str, Figure]:
    return {figure.name: figure for figure in figures}


@pytest.mark.parametrize("name", WITH_WAVES)
def test_a_scenario_gives_the_same_traffic_and_rows_every_time(name: str) -> None:
    scenario = SCENARIOS[name]
    assert scenario.name == name
    assert list(scenario.waves(VOCAB)) == list(scenario.waves(VOCAB))
    rows = [figure.name for figure in scenario.figures(observe(scenario, RIGHT))]
    failed = replace(RIGHT, tokens=(), error="500: no", accept_length=None)
    assert rows == [figure.name for figure in scenario.figures(observe(scenario, failed))]
    assert len(set(rows)) == len(rows)


@pytest.mark.parametrize("name", WITH_WAVES)
def test_right_answers_hold_and_one_wrong_token_does_not(name: str) -> None:
    scenario = SCENARIOS[name]
    assert all(figure.holds for figure in scenario.figures(observe(scenario, RIGHT)))
    wrong = replace(RIGHT, tokens=(1, 2, 3, 5))
    rows = by_name(scenario.figures(observe(scenario, RIGHT, wrong)))
    assert not rows["tokens equal aggregated"].holds


@pytest.mark.parametrize("name", WITH_WAVES)
def test_failed_requests_are_counted_apart_from_wrong_ones(name: str) -> None:
    scenario = SCENARIOS[name]
    failed = replace(RIGHT, tokens=(), error="500: no")
    rows = by_name(scenario.figures(observe(scenario, RIGHT, failed)))
    assert rows["tokens equal aggregated"].value == 1.0
    assert (rows["requests failed"].value or 0) > 0
    may_fail = ("pressure", "host-pool", "republish", "dead-prefill")
    assert rows["requests failed"].holds == (name in may_fail)


@pytest.mark.parametrize("name", WITH_WAVES)
def test_no_answer_at_all_does_not_hold(name: str) -> None:
    scenario = SCENARIOS[name]
    rows = by_name(scenario.figures(observe(scenario, replace(RIGHT, error="503: no"))))
    assert not rows["tokens equal aggregated"].holds


def test_pressure_tells_retracted_requests_from_others() -> None:
    lost = replace(RIGHT, accept_length=1.3, retractions=3)
    rows = by_name(SCENARIOS["pressure"].figures(observe(SCENARIOS["pressure"], RIGHT, lost)))
    assert rows["accept length, retracted"].value == pytest.approx(1.3)
    assert rows["accept length, others"].value == pytest.approx(3.9)
    assert rows["retracted / others"].value == pytest.approx(1 / 3)
    assert rows["requests retracted"].value == 48
    assert rows["retractions"].value == 144
    assert rows["throughput"].value == 96 * 4 / 2.0


def test_pressure_without_retractions_says_nothing_of_them() -> None:
    rows = by_name(SCENARIOS["pressure"].figures(observe(SCENARIOS["pressure"], RIGHT)))
    assert rows["accept length, retracted"].value is None
    assert rows["retracted / others"].value is None


def test_an_accept_length_is_compared_with_that_of_the_same_requests() -> None:
    """What the other requests are like must not matter."""
    lost = replace(RIGHT, accept_length=1.3, retractions=3)
    seen = observe(SCENARIOS["pressure"], RIGHT, lost)
    requests = seen["pressure"].wave.requests
    calm = {request.key: 2.6 if number % 2 else 100.0 for number, request in enumerate(requests)}
    rows = by_name(SCENARIOS["pressure"].figures(replace(seen, undisturbed=calm)))
    assert rows["retracted / undisturbed"].value == pytest.approx(0.5)
    assert by_name(SCENARIOS["pressure"].figures(seen))["retracted / undisturbed"].value is None


@pytest.mark.parametrize(
    ("name", "begins_with", "taken"), [("republish", -1, 120), ("hicache-decode", 0, 40)]
)
def test_continued_prompts_begin_with_an_earlier_answer(
    name: str, begins_with: int, taken: int
) -> None:  # fmt: skip
    scenario = SCENARIOS[name]
    first = scenario.waves(VOCAB)[0].requests
    answers = {request.key: tuple(range(request.new_tokens)) for request in first}
    (wave,) = scenario.follow_ups(answers)
    earlier = first[begins_with]
    assert wave.requests[0].prompt == earlier.prompt + answers[earlier.key][:taken]
    answers |= {request.key: (1,) for request in wave.requests}
    assert scenario.follow_ups(answers) == [wave]


def test_prompts_that_come_again_do_not_fit_the_device() -> None:
    """What prefill or decode keeps on the device is less than what is asked for again."""
    for name, flags in (("hicache", "prefill_flags"), ("hicache-decode", "decode_flags")):
        scenario = SCENARIOS[name]
        asked = {request.prompt for wave in scenario.waves(VOCAB) for request in wave.requests}
        settings = scenario.settings
        words = getattr(settings, flags)
        device = int(words[1]) if "--max-total-tokens" in words else settings.decode_kv_tokens
        ratio = int(words[words.index("--hicache-ratio") + 1])
        tokens = sum(map(len, asked))
        assert 2 * device < tokens < ratio * device


def test_no_other_scenarios_requests_are_taken_for_the_first_of_a_conversation() -> None:
    """A reference has the requests of all scenarios; follow-ups know theirs by their shape."""
    for name in ("republish", "hicache-decode"):
        mine = {(len(r.prompt), r.new_tokens) for r in SCENARIOS[name].waves(VOCAB)[0].requests}
        for other in SCENARIOS.values():
            if other.name != name:
                theirs = (request for wave in other.waves(VOCAB) for request in wave.requests)
                assert not mine & {(len(r.prompt), r.new_tokens) for r in theirs}, other.name


def test_tokens_from_the_host_are_those_of_the_second_time() -> None:
    hit = replace(RIGHT, host_tokens=192)
    rows = by_name(SCENARIOS["hicache"].figures(observe(SCENARIOS["hicache"], hit)))
    assert rows["tokens from the host"].value == 24 * 192


def test_health_gives_the_spread_of_answered_probes() -> None:
    rows = by_name(SCENARIOS["health"].figures(observe(SCENARIOS["health"], RIGHT)))
    for wave in ("idle", "20 at once", "burst"):
        spread = [rows[f"{wave} probe {mark}"].value for mark in ("p50", "p99", "max")]
        assert spread == pytest.approx([0.050, 0.099, 0.100])
        assert rows[f"{wave} probes missed"].value == 0


def test_a_missed_probe_is_counted_and_has_no_latency() -> None:
    seen = observe(SCENARIOS["health"], RIGHT)
    missed = tuple(replace(probe, status=503, latency_s=20.0) for probe in seen["idle"].probes[:7])
    idle = replace(seen["idle"], probes=missed + seen["idle"].probes[7:])
    rows = by_name(SCENARIOS["health"].figures(replace(seen, waves=(idle, seen["burst"]))))
    assert rows["idle probes missed"].value == 7
    assert not rows["idle probes missed"].holds
    assert rows["idle probe max"].value == pytest.approx(0.100)


def test_no_times_give_no_figures() -> None:
    assert [figure.value for figure in latency("name", [None])] == [None] * 3
    wave = observe(SCENARIOS["burst"], RIGHT)["burst"]
    assert throughput("name", replace(wave, seconds=0.0)).value is None


def test_scenarios_with_equal_settings_share_a_pair() -> None:
    shared = {SCENARIOS[name].settings for name in ("parity", "burst", "crowd")}
    assert len(shared) == 1, "one pair each would be two pairs too many"


def test_references_come_from_one_server_for_each_kind_of_draft() -> None:
    settings = [scenario.settings for scenario in SCENARIOS.values()]
    references = {each.reference() for each in settings}
    assert len(references) == len({each.layered_draft for each in settings}) == 2
    assert all(each.reference().layered_draft == each.layered_draft for each in settings)


def test_scenarios_are_chosen_once_and_in_order() -> None:
    assert [each.name for each in choose(["health", "parity", "health"])] == ["health", "parity"]
    assert choose([]) == list(SCENARIOS.values())
    with pytest.raises(LabError, match=r"no scenario walk, swim: there are parity, burst"):
        choose(["walk", "parity", "swim"])


def test_a_request_whose_client_gave_up_is_neither_failed_nor_wrong() -> None:
    scenario = SCENARIOS["aborts"]
    gone = replace(RIGHT, tokens=(1,), error="the client closed the connection", cancelled=True)
    rows = by_name(scenario.figures(observe(scenario, RIGHT, gone)))
    assert rows["requests failed"].value == 0
    assert rows["tokens equal aggregated"].value == 1.0
    assert rows["requests cancelled"].value == 330


def test_a_metadata_row_that_stays_held_does_not_hold() -> None:
    scenario = SCENARIOS["aborts"]
    seen = observe(scenario, RIGHT)
    for slots, holds in (({"free": 4, "waiting": 0}, True), ({"free": 3, "waiting": 1}, False)):
        waves = tuple(replace(wave, slots=slots) for wave in seen.waves)
        rows = by_name(scenario.figures(replace(seen, waves=waves)))
        assert rows["metadata rows not free"].holds == holds


def test_a_row_that_is_not_as_it_was_sent_does_not_hold() -> None:
    scenario = SCENARIOS["crowd"]
    seen = observe(scenario, RIGHT)
    row = "rows not as they were sent"
    assert by_name(scenario.figures(seen))[row].value is None, "digests are off"
    clean = {"commit match": 2000, "consume match": 2000}
    for looks, wrong in ((clean, 0), ({**clean, "consume match": 1999, "consume mismatch": 1}, 1)):
        waves = tuple(replace(wave, digests=looks) for wave in seen.waves)
        rows = by_name(scenario.figures(replace(seen, waves=waves)))
        assert rows["rows checked on arrival"].value == 2000
        assert rows["rows checked when read"].value == 2000
        assert rows[row].value == wrong
        assert rows[row].holds == (not wrong)


def test_kv_that_stays_in_use_does_not_hold() -> None:
    scenario = SCENARIOS["prefix"]
    seen = observe(scenario, RIGHT)
    for tokens, holds in ((0, True), (16, False)):
        in_use = {"prefill": 0, "decode": tokens}
        waves = tuple(replace(wave, kv_in_use=in_use) for wave in seen.waves[-1:])
        rows = by_name(scenario.figures(replace(seen, waves=(*seen.waves[:-1], *waves))))
        assert rows["KV tokens in use when idle"].holds == holds


def test_a_prompt_is_cached_whole_when_all_its_tokens_are() -> None:
    scenario = SCENARIOS["prefix"]
    whole = replace(RIGHT, cached_tokens=144)
    seen = observe(scenario, whole)
    lengths = [len(request.prompt) for result in seen.waves for request in result.wave.requests]
    rows = by_name(scenario.figures(seen))
    assert rows["prompts cached whole"].value == lengths.count(144) > 0


@pytest.mark.parametrize(
    ("wave", "counted", "row"),
    [
        ("prealloc", "left by probes", "prealloc: left by probes"),
        ("stopped", "stopped, not 503", "stopped, not 503"),
        ("stopped", "continued, not 200", "continued, not 200"),
        ("500", "pools changed", "pools changed"),
    ],
)
def test_what_a_script_must_not_count_does_not_hold(wave: str, counted: str, row: str) -> None:
    scenario = SCENARIOS["probes"]
    seen = observe(scenario, RIGHT)
    assert by_name(scenario.figures(seen))[row].holds
    waves = tuple(
        replace(each, counts={**each.counts, counted: 1.0}) if each.wave.name == wave else each
        for each in seen.waves
    )
    rows = by_name(scenario.figures(replace(seen, waves=waves)))
    assert [name for name, figure in rows.items() if not figure.holds] == [row]


def test_a_scenario_that_ends_servers_has_them_to_itself() -> None:
    calm, other = SCENARIOS["parity"], SCENARIOS["burst"]
    deadly = replace(SCENARIOS["dead-prefill"], settings=calm.settings)
    assert runner._sharing([deadly, calm, other]) == [[calm, other], [deadly]]
