# SPDX-License-Identifier: Apache-2.0
"""Each script puts servers into the state it is named for, and tells what the probes found."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fake_pair import FakePair, FakeServer

from pdlab import states
from pdlab.errors import LabError
from pdlab.pair import Server
from pdlab.scenarios.model import Script, Seen
from pdlab.traffic import Outcome

RIGHT = Outcome(tokens=(7, 8), status=200)


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePair:
    """A pair at rest; nothing is held for longer than a look or two."""
    for name in ("HOLD_S", "SHORT_HOLD_S", "AFTER_DEATH_S", "PAUSED_WITH_REQUESTS_S"):
        monkeypatch.setattr(states, name, 0.1)
    monkeypatch.setattr(states, "LOOK_S", 0.005)
    made = FakePair(tmp_path)

    @contextmanager
    def stopped(server: Server) -> Iterator[None]:
        """The scheduler of the server stands still: no probe of it is answered well."""
        one = made.prefill if server.process is made.prefill.process else made.decode
        one.told.append(("stopped", None))
        one.health = 503
        yield
        one.health = 200
        one.told.append(("goes on", None))

    monkeypatch.setattr(states, "stopped", stopped)
    return made


def run(
    pair: FakePair,
    script: Script,
    arrive: Callable[[], None] = lambda: None,
    over: Callable[[], bool] = lambda: True,
) -> Seen:
    """What a script sees whose requests do `arrive` when sent and end when it is `over`."""

    async def send() -> list[Outcome]:
        arrive()
        while not over():
            await asyncio.sleep(0.005)
        return [RIGHT]

    with pair.up() as up:
        seen = asyncio.run(script(up, send))
    assert seen.outcomes == [RIGHT]
    return seen


def at(server: FakeServer, **load: int) -> Callable[[], None]:
    return lambda: server.load.update(load)


def test_probes_at_once_are_volleys(pair: FakePair) -> None:
    seen = run(pair, states.at_once)
    assert [probe.status for probe in seen.probes] == [200] * states.VOLLEYS * states.AT_ONCE


def test_a_burst_waits_on_decode_while_prefill_stands_still(pair: FakePair) -> None:
    seen = run(
        pair,
        states.waiting_for_prefill,
        at(pair.decode, prealloc=3, transfer=2),
        lambda: ("goes on", None) in pair.prefill.told,
    )
    assert pair.prefill.told == [("stopped", None), ("goes on", None)]
    assert seen.counts == {"prealloc": 3, "transfer": 2, "running": 0, "left by probes": 0}
    assert seen.probes and all(probe.ok for probe in seen.probes)


def test_a_burst_that_never_waits_is_an_error(
    pair: FakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "STATE_LIMIT_S", 0.1)
    with pytest.raises(LabError, match="decode does not come to rest"):
        run(pair, states.waiting_for_prefill)
    with pytest.raises(LabError, match="decode never waited for KV, so prefill was not killed"):
        run(pair, states.losing_prefill)
    assert pair.prefill.process.poll() is None


@pytest.mark.parametrize(
    ("script", "server", "queue"),
    [(states.retracting, "decode", "retracted"), (states.chunking, "prefill", "inflight")],
)
def test_the_most_that_a_queue_held_is_told(
    pair: FakePair, script: Script, server: str, queue: str
) -> None:
    one: FakeServer = getattr(pair, server)

    def looked_at() -> bool:
        looks = sum(path == "/v1/loads" for path, _ in one.told)
        one.load[queue] = 5 if looks < 2 else 1
        return looks > 4

    seen = run(pair, script, at(one, **{queue: 5}), looked_at)
    assert seen.counts == {f"most {queue}": 5}


def test_each_pause_is_ended_before_the_next(pair: FakePair) -> None:
    seen = run(pair, states.paused)
    assert pair.decode.paths() == ["/pause_generation", "/continue_generation"] * 3
    modes = [body["mode"] for path, body in pair.decode.told if path == "/pause_generation"]
    assert modes == ["in_place", "retract", "abort"]
    assert seen.probes and all(probe.ok for probe in seen.probes)


def test_weights_are_loaded_from_where_they_came(pair: FakePair) -> None:
    seen = run(pair, states.weights_updated)
    loaded = [body for path, body in pair.decode.told if path == "/update_weights_from_disk"]
    assert loaded == [{"model_path": "weights"}] * states.UPDATES
    assert seen.counts["longest update, s"] > 0


def test_a_decode_that_stands_still_fails_probes_and_then_answers(pair: FakePair) -> None:
    seen = run(pair, states.standing_still)
    assert seen.counts["stopped, not 503"] == seen.counts["continued, not 200"] == 0
    assert pair.decode.told[0] == ("stopped", None)


def test_what_hundreds_of_probes_leave_in_a_pool_is_counted(
    pair: FakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "MANY", 40)
    monkeypatch.setattr(states, "STATE_LIMIT_S", 0.1)
    assert run(pair, states.many).counts == {"probes sent": 80, "pools changed": 0}
    seen = run(pair, states.many, lambda: pair.decode.rows.update(free=3, waiting=0))
    assert seen.counts["pools changed"] == 1


def test_prefill_is_killed_once_decode_waits_for_its_kv(pair: FakePair) -> None:
    seen = run(
        pair,
        states.losing_prefill,
        at(pair.decode, transfer=2),
        lambda: pair.prefill.process.poll() is not None,
    )
    assert seen.counts == {"transfers in flight": 2}
    assert pair.decode.process.poll() is None and seen.probes
