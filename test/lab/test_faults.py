# SPDX-License-Identifier: Apache-2.0
"""What is read off a pair under which something broke."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdlab.faults import ANSWER_LIMIT_S, FAULTS, Damage, _about
from pdlab.figures import Figure
from pdlab.scenarios import faults
from pdlab.settings import Role
from pdlab.traffic import ENDED_EARLY, Outcome, Request

REQUEST = Request((1, 2, 3), 4)
REFERENCE = {REQUEST.key: (7, 8)}
RIGHT = Outcome(tokens=(7, 8), latency_s=0.5, status=200)
WRONG = replace(RIGHT, tokens=(7, 9))
TOLD = Outcome(error="500: prefill is gone", status=500, latency_s=2.0)
STUCK = Outcome(error="no complete reply in 90 s", latency_s=ANSWER_LIMIT_S)
SILENT = Outcome(tokens=(7,), error=ENDED_EARLY, status=200, latency_s=2.0)


def damage(*outcomes: Outcome, **more: object) -> Damage:
    seen = Damage(FAULTS[0], [REQUEST] * len(outcomes), outcomes, 3)
    return replace(seen, **{"afterwards": ((REQUEST, RIGHT),), **more})  # type: ignore[arg-type]


def by_name(each: Damage) -> dict[str, Figure]:
    rows = faults.figures([each], REFERENCE)
    return {figure.name.removeprefix(f"{each.fault.name}: "): figure for figure in rows}


def test_a_request_that_fails_with_a_word_of_it_is_all_that_a_fault_may_cost() -> None:
    rows = by_name(damage(RIGHT, TOLD, TOLD))
    assert all(figure.holds for figure in rows.values())
    assert rows["failed"].value == 2
    assert rows["requests in flight"].value == 3
    assert rows["slowest to know"].value == 2.0


@pytest.mark.parametrize(
    ("seen", "row"),
    [
        (damage(RIGHT, WRONG), "wrong tokens"),
        (damage(RIGHT, afterwards=((REQUEST, WRONG),)), "wrong tokens"),
        (damage(RIGHT, STUCK), "stuck"),
        (damage(RIGHT, SILENT), "not told"),
        (damage(RIGHT, left={"decode rooms": {"known": 3}}), "things kept"),
        (damage(RIGHT, complaints=1), "things kept"),
        (damage(RIGHT, unwell=1), "servers unwell"),
        (damage(RIGHT, afterwards=((REQUEST, TOLD),)), "failed afterwards"),
    ],
)
def test_whatever_else_it_costs_does_not_hold(seen: Damage, row: str) -> None:
    assert [name for name, figure in by_name(seen).items() if not figure.holds] == [row]


def test_every_fault_has_rows_of_its_own() -> None:
    rows = faults.figures([replace(damage(RIGHT), fault=fault) for fault in FAULTS], REFERENCE)
    assert len({figure.name for figure in rows}) == len(rows)
    assert {fault.loses for fault in FAULTS} == {None, Role.PREFILL, Role.DECODE}


def test_a_prompt_takes_longer_than_one_chunk_so_that_its_kv_is_on_its_way() -> None:
    assert faults.PROMPT > 2 * faults.CHUNK


def test_errors_that_differ_in_numbers_are_one() -> None:
    assert _about("room 77 lost 127.0.0.1:80") == _about("room 78 lost 127.0.0.1:81")
