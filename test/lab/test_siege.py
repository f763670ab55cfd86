# SPDX-License-Identifier: Apache-2.0
"""What is read off a pair under attack, and that each attack knows what it sends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from fake_pair import TOKENS, FakePair, FakeServer

from pdlab import siege
from pdlab.attacks import ATTACKS, HOSTILE_LIMIT_S, Attack, Field, Rogue
from pdlab.figures import Verdict as Beside
from pdlab.figures import verdict as compared
from pdlab.pair import Pair, Server
from pdlab.ports import HOST
from pdlab.scenarios import hostile
from pdlab.settings import PLENTY_OF_KV_TOKENS, Model, Role, Settings
from pdlab.siege import Phase, Verdict, latency_s
from pdlab.traffic import Outcome, Request

REQUEST = Request((1, 2, 3), 4)
RIGHT = Outcome(tokens=(7, 8), latency_s=0.5, status=200)
WRONG = Outcome(tokens=(7, 9), latency_s=0.1, status=200)
FAILED = Outcome(error="503: no", latency_s=9.0)
REFERENCE = {REQUEST.key: RIGHT.tokens}
JUDGED = next(attack for attack in ATTACKS if not attack.takes_share)


def phase(*outcomes: Outcome) -> Phase:
    return Phase(tuple((REQUEST, outcome) for outcome in outcomes), 1.0)


def verdict(attack: Attack = JUDGED, **changes: object) -> Verdict:
    unharmed = {
        "errors": (),
        "asked": 10,
        "calm_s": (0.5, 0.5, 0.5),
        "attacked_s": (0.55, 0.55),
        "unanswered": 0,
        "lost": (),
        "unhealthy": 0,
        "left": {},
    }
    return Verdict(attack, **{**unharmed, **changes})  # type: ignore[arg-type]


def test_a_good_request_is_harmed_by_no_answer_and_by_another_s_tokens() -> None:
    assert phase(RIGHT, RIGHT).harmed(REFERENCE) == []
    assert phase(RIGHT, WRONG, FAILED).harmed(REFERENCE) == ["another's tokens", "503: no"]


def test_latency_is_that_of_answered_requests() -> None:
    assert latency_s(phase(RIGHT, FAILED)) == 0.5
    assert latency_s(phase(FAILED)) is None


def test_an_attacked_turn_is_compared_with_the_calm_ones_beside_it() -> None:
    drifting = verdict(calm_s=(0.2, 0.4, 0.8), attacked_s=(0.3, 0.6))
    assert drifting.slower == pytest.approx(1.0)
    assert drifting.unrest == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("change", [{"calm_s": (0.5,)}, {"calm_s": (), "attacked_s": ()}])
def test_latency_is_not_known_before_good_clients_were_answered_twice(
    change: dict[str, object],
) -> None:
    assert verdict(**change).slower is None
    assert all(figure.holds for figure in hostile.figures([verdict(**change)]))


def test_one_slow_turn_is_no_fault_and_slow_turns_are() -> None:
    once = verdict(calm_s=(0.5,) * 4, attacked_s=(0.5, 0.5, 5.0))
    assert all(figure.holds for figure in hostile.figures([once]))
    mostly = verdict(calm_s=(0.5,) * 4, attacked_s=(0.7, 0.5, 0.7))
    assert not all(figure.holds for figure in hostile.figures([mostly]))


def test_slower_than_may_be_counts_beyond_what_calm_turns_differ_by() -> None:
    unsteady = verdict(calm_s=(0.4, 0.6, 0.4), attacked_s=(0.7, 0.7))
    assert unsteady.slower == pytest.approx(1.4)
    assert all(figure.holds for figure in hostile.figures([unsteady]))


def test_a_share_that_anybody_may_take_is_shown_and_not_judged() -> None:
    hungry = next(attack for attack in ATTACKS if attack.takes_share)
    assert all(figure.holds for figure in hostile.figures([verdict(hungry, attacked_s=(9.0, 9.0))]))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"errors": ("503: no",)}, "1 of 10 good requests: 503: no"),
        ({"lost": ("decode",)}, "ended: decode"),
        ({"unhealthy": 1}, "1 servers do not say that they are well"),
        ({"unanswered": 2}, "2 hostile requests without an answer"),
        ({"left": {"decode rooms": {"known": 3}}}, "left: "),
    ],
)
def test_whatever_went_wrong_is_told_and_does_not_hold(
    change: dict[str, object], told: str
) -> None:
    assert told in verdict(**change).wrong
    assert not all(figure.holds for figure in hostile.figures([verdict(**change)]))


def test_an_attack_without_effect_holds_and_has_nothing_to_tell() -> None:
    assert verdict().wrong == ""
    assert all(figure.holds for figure in hostile.figures([verdict()]))


def test_stock_and_patched_have_the_same_rows_whatever_became_of_them() -> None:
    sound = hostile.figures([verdict(attack) for attack in ATTACKS])
    gone = hostile.figures(
        [verdict(attack, lost=("decode",), attacked_s=(None,)) for attack in ATTACKS]
    )
    assert [figure.name for figure in sound] == [figure.name for figure in gone]
    assert len({figure.name for figure in sound}) == len(sound)


def test_an_attack_that_was_not_made_proves_nothing() -> None:
    rows = hostile.figures([verdict(), Verdict.not_made(ATTACKS[-1])])
    assert [figure.name for figure in rows if not figure.holds] == ["attacks that were not made"]
    made = hostile.figures([verdict(), verdict(ATTACKS[-1])])
    unmade = next(figure for figure in rows if figure.name == f"{ATTACKS[-1].name}: harmed")
    other = next(figure for figure in made if figure.name == unmade.name)
    assert compared(unmade, other) is compared(other, unmade) is Beside.NONE


def test_every_good_client_has_requests_of_its_own() -> None:
    requests = hostile.good(512)
    assert len({request.prompt for request in requests}) == len(requests)
    assert len(requests) == hostile.CLIENTS * hostile.A_CLIENT


async def _besieged(act: Callable[[Field], Awaitable[object]]) -> tuple[Field, list[str]]:
    """The attack on a server that refuses everything at once, and the paths it asked for."""
    asked: list[str] = []

    async def refuse(request: web.Request) -> web.Response:
        asked.append(request.path)
        await request.read()
        if request.path == "/route":
            return web.json_response({"rank_port": 1})
        return web.json_response({"error": {"message": "no"}}, status=400)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", refuse)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, HOST, 0).start()
    port = runner.addresses[0][1]
    url = f"http://{HOST}:{port}"
    try:
        async with aiohttp.ClientSession() as session:
            there = Field(url, url, url, port, 512, 2400, session, url, port)
            await asyncio.wait_for(act(there), HOSTILE_LIMIT_S)
    finally:
        await runner.cleanup()
    return there, asked


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_an_attack_ends_once_all_it_sent_is_answered(attack: Attack) -> None:
    there, asked = asyncio.run(_besieged(attack.act))
    assert asked
    assert all(answer.status is not None for answer in there.answers)


class Stand:
    """Starts fake pairs in the place of a launcher, and counts them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pairs: list[FakePair] = []
        self.settings: list[Settings] = []
        self.joined: list[tuple[Role, Settings]] = []

    @contextmanager
    def pair(self, tree: object, settings: Settings, model: Model) -> Iterator[Pair]:
        self.pairs.append(FakePair(self.folder))
        self.settings.append(settings)
        with self.pairs[-1].up() as up:
            yield up

    @contextmanager
    def joining(
        self, role: Role, tree: object, settings: Settings, model: Model
    ) -> Iterator[tuple[Server, int]]:
        self.joined.append((role, settings))
        with FakeServer("rogue", self.folder).serving() as server:
            yield server, 77


def besiege(stand: Stand, *attacks: Attack) -> list[Verdict]:
    """The verdicts on attacks on fake pairs."""
    good = [replace(REQUEST, prompt=(number,)) for number in range(siege.CLIENTS)]
    reference = {request.key: TOKENS for request in good}
    model = Model(stand.folder, None, 512, 1024)
    made = siege.Siege(
        stand,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        Settings(),
        model,
        lambda _: model,
        good,
        reference,
        lambda _: None,
    )
    return made.run(attacks)


@pytest.fixture
def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stand:
    for name in ("TURN_S", "AGAIN_S", "SETTLE_S", "LOST_S", "LOOK_S"):
        monkeypatch.setattr(siege, name, 0.1)
    return Stand(tmp_path)


async def harmless(there: Field) -> None:
    """An attack that asks for nothing."""


def test_a_pair_that_an_attack_does_not_harm_serves_the_next_one(stand: Stand) -> None:
    one, other = besiege(stand, Attack("one", harmless), Attack("other", harmless))
    assert one.wrong == other.wrong == ""
    assert one.asked >= 3 * siege.CLIENTS and one.slower
    assert len(stand.pairs) == 1


def test_an_attack_on_other_settings_has_a_pair_of_its_own(stand: Stand) -> None:
    pools = []

    async def look(there: Field) -> None:
        pools.append(there.pool)

    small = Attack("small", look, changes={"decode_kv_tokens": 500})
    after = [Attack(name, look) for name in ("usual", "usual again")]
    assert [each.wrong for each in besiege(stand, small, *after)] == [""] * 3
    assert [each.decode_kv_tokens for each in stand.settings] == [500, PLENTY_OF_KV_TOKENS]
    assert set(pools) == {500, PLENTY_OF_KV_TOKENS}


def test_a_prompt_without_room_for_the_reserve_fits_the_pool() -> None:
    attack = ATTACKS[0]
    settings = attack.settings(hostile.SETTINGS)
    sent = []

    async def note(url: str, body: dict[str, list[int]]) -> None:
        sent.append(len(body["input_ids"]))

    there = Field("", "", "", 1, 512, settings.decode_kv_tokens, None)  # type: ignore[arg-type]
    there.post = note  # type: ignore[assignment, method-assign]
    asyncio.run(attack.act(there))
    fits, does_not = sent
    assert settings.decode_reserved_tokens is not None
    assert 0 < settings.decode_kv_tokens - fits < settings.decode_reserved_tokens
    assert does_not > settings.decode_kv_tokens


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (lambda pair: setattr(pair.decode, "tokens", (9, 9)), "another's tokens"),
        (lambda pair: setattr(pair.prefill, "health", 503), "1 servers do not say"),
        (lambda pair: setattr(pair.decode.process, "code", 1), "ended: decode"),
        (lambda pair: pair.decode.rows.update(free=3), "left: {'decode rows free': "),
    ],
)
def test_a_pair_that_was_harmed_is_replaced(
    stand: Stand, harm: Callable[[FakePair], object], told: str
) -> None:
    async def act(there: Field) -> None:
        harm(stand.pairs[-1])

    harmed, after = besiege(stand, Attack("harms", act), Attack("after", harmless))
    assert told in harmed.wrong and after.wrong == ""
    assert len(stand.pairs) == 2


def test_an_attack_that_does_not_end_is_an_unanswered_request(stand: Stand) -> None:
    async def act(there: Field) -> None:
        await asyncio.sleep(600)

    (endless,) = besiege(stand, Attack("endless", act))
    assert endless.unanswered == 1


def test_a_rogue_is_up_beside_the_pair_as_it_was_described(stand: Stand) -> None:
    seen = []

    async def act(there: Field) -> None:
        seen.append(there.rogue_port)

    rogue = Rogue(Role.PREFILL, page_size=32)
    (verdict,) = besiege(stand, Attack("other pages", act, rogue=rogue))
    assert verdict.wrong == "" and set(seen) == {77}
    [(role, settings)] = stand.joined
    assert (role, settings.page_size) == (Role.PREFILL, 32)
