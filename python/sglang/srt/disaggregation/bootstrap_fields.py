# SPDX-License-Identifier: Apache-2.0
"""What a request has to say of its other half, and whose room is whose, looked at on entry.

A room is the name under which prefill and decode find each other's half of one request. Tables of
transfers, the wire and the metadata rows know a request by nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

FAKE_HOST = "2.2.2.2"
"""disaggregation/utils.py: FAKE_BOOTSTRAP_HOST, of probes and warm-ups that transfer nothing."""
HIGHEST_ROOM = 2**64 - 1
"""A metadata row holds the room as uint64, and 0 there means that nothing is written yet."""
HIGHEST_PORT = 2**16 - 1
MAX_HOST = 253
# A name, an IPv4 or an IPv6 address with or without brackets; nothing that would end it in a URL.
HOST = re.compile(r"[A-Za-z0-9._-]+|\[?[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?\]?")
SLACK = 1024
"""Rooms of requests that are over, kept until they are worth a sweep."""


@dataclass
class Rooms:
    """Which request has which room, of those that this process has sent on.

    A room is in use for as long as its request has a state here. Entries of requests that are over
    are swept when they outnumber those under way, so a claim takes constant time on average.
    """

    owners: dict[int, str] = field(default_factory=dict)

    def claim(self, room: int, rid: str, under_way: Container[str]) -> None:
        """Give `room` to the request `rid`; ValueError while another request has it."""
        owner = self.owners.get(room)
        if owner is not None and owner != rid and owner in under_way:
            raise ValueError(
                f"bootstrap_room {room} is in use by request {owner}: every request, and every "
                "sample of one, needs a room of its own"
            )
        self.owners[room] = rid

    def sweep(self, under_way: dict[str, Any]) -> None:
        """Forget the rooms of requests that are over."""
        if len(self.owners) > 2 * len(under_way) + SLACK:
            self.owners = {room: rid for room, rid in self.owners.items() if rid in under_way}


def admit(manager: TokenizerManager, *requests: Any) -> None:
    """Refuse requests with fields under which their halves cannot meet, or meet another's.

    `requests`: tokenized, about to be sent to the scheduler together. ValueError names the field,
    its value and what it has to be. An aggregated server ignores the fields, and so do probes.
    """
    mode = manager.disaggregation_mode.value
    if mode == "null" or manager.server_args.disaggregation_transfer_backend == "fake":
        return
    paired = [
        each
        for each in requests
        if hasattr(each, "bootstrap_room") and each.bootstrap_host != FAKE_HOST
    ]
    for request in paired:
        _check_room(request.bootstrap_room)
        if request.bootstrap_host is not None or mode == "decode":
            _check_host(request.bootstrap_host)
        _check_port(request.bootstrap_port)
        _check_rank(getattr(request, "disagg_prefill_dp_rank", None))
    _claim(manager, paired)


def _claim(manager: TokenizerManager, requests: Sequence[Any]) -> None:
    """Give each request its room. Those sent together are under way at once."""
    under_way = manager.rid_to_state
    together = [request.bootstrap_room for request in requests]
    if len(set(together)) < len(together):
        twice = next(room for room in together if together.count(room) > 1)
        raise ValueError(f"bootstrap_room {twice} is given to two requests of one batch")
    for request in requests:
        manager.bootstrap_rooms.claim(request.bootstrap_room, request.rid, under_way)
    manager.bootstrap_rooms.sweep(under_way)


def _check_room(room: Any) -> None:
    if room is None:
        raise ValueError(
            "bootstrap_room is missing: this server is one half of a pair, send requests to the "
            "router in front of it, or give both halves the same room"
        )
    if isinstance(room, bool) or not isinstance(room, int) or not 0 < room <= HIGHEST_ROOM:
        raise ValueError(f"bootstrap_room must be a number in [1, {HIGHEST_ROOM}], got {room!r}")


def _check_host(host: Any) -> None:
    """Decode asks this host for its prefill. Prefill refuses what its other half will refuse."""
    if host is None:
        raise ValueError(
            "bootstrap_host is missing: decode needs the host of prefill's bootstrap server"
        )
    if not isinstance(host, str) or len(host) > MAX_HOST or not HOST.fullmatch(host):
        raise ValueError(f"bootstrap_host must be a host name or an IP address, got {host!r}")


def _check_port(port: Any) -> None:
    """Without a port it is the one that decode was started with."""
    if port is None:
        return
    if isinstance(port, bool) or not isinstance(port, int) or not 0 < port <= HIGHEST_PORT:
        raise ValueError(f"bootstrap_port must be a number in [1, {HIGHEST_PORT}], got {port!r}")


def _check_rank(rank: Any) -> None:
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or rank < 0):
        raise ValueError(f"disagg_prefill_dp_rank must be a number of 0 or more, got {rank!r}")
