# SPDX-License-Identifier: Apache-2.0
"""All connections between two servers can be cut from outside, and no others."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pdlab import link, ports, process
from pdlab.pair import Server
from pdlab.process import Command, spawn

# Each listens, connects to the other where it is told to, and again whenever that is lost.
SERVER = """
import socket, sys, threading, time
mine, theirs = map(int, sys.argv[1:])
def keep(end):
    while end.recv(1):
        pass
def accept():
    listening = socket.create_server(("127.0.0.1", mine))
    while True:
        threading.Thread(target=keep, args=(listening.accept()[0],), daemon=True).start()
threading.Thread(target=accept, daemon=True).start()
while True:
    try:
        with socket.create_connection(("127.0.0.1", theirs or mine)) as end:
            print("connected", flush=True)
            keep(end)
    except OSError:
        pass
    time.sleep(0.01)
"""
LIMIT_S = 20.0


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[Server, Server, int]]:
    """Two servers, the second connected to the first, and the first's port."""
    (tmp_path / "keeping.py").write_text(SERVER)
    path = os.pathsep.join([str(tmp_path), str(Path(process.__file__).parent.parent)])
    numbers = ports.free(2)
    with ExitStack() as stack:
        started = []
        for name, words in (("one", (numbers[0], 0)), ("other", (numbers[1], numbers[0]))):
            command = Command(
                name, "keeping", tuple(map(str, words)), {**os.environ, "PYTHONPATH": path}
            )
            running = spawn(command, tmp_path / f"{name}.log", tmp_path)
            stack.callback(running.stop)
            started.append(Server(running, "", ""))
        yield started[0], started[1], numbers[0]


def wait_for_connection(one: Server, other: Server) -> None:
    limit = time.monotonic() + LIMIT_S
    while len(link.between(one, other)) != 2:
        assert time.monotonic() < limit
        time.sleep(0.02)


def connections(server: Server) -> int:
    """How often a server has connected so far."""
    return server.process.log.read_text().count("connected")


def test_a_connection_is_cut_and_so_is_the_next_until_the_body_ends(
    servers: tuple[Server, Server, int],
) -> None:
    one, other, _ = servers
    wait_for_connection(one, other)
    before = connections(other)
    limit = time.monotonic() + LIMIT_S
    with link.cut(one, other) as ends:
        assert ends
        while connections(other) < before + 3:
            assert time.monotonic() < limit, "it does not lose its connection"
            time.sleep(0.02)
    wait_for_connection(one, other)
    assert {end.pid for end in ends} <= {one.process.pid, other.process.pid}


def test_connections_with_anybody_else_stay(servers: tuple[Server, Server, int]) -> None:
    one, other, port = servers
    wait_for_connection(one, other)
    alone = connections(one)  # with itself
    with socket.create_connection((ports.HOST, port)) as mine:
        mine.setblocking(False)
        with link.cut(one, other):
            time.sleep(0.2)
        with pytest.raises(BlockingIOError):
            mine.recv(1)
    assert connections(one) == alone


def test_a_connection_of_a_process_that_is_gone_is_gone(
    servers: tuple[Server, Server, int],
) -> None:
    one, other, _ = servers
    wait_for_connection(one, other)
    ends = link.between(one, other)
    one.process.stop()
    assert [end.shut() for end in ends if end.pid == one.process.pid] == [False]
    assert link.between(one, other) == []
