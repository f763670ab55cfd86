# SPDX-License-Identifier: Apache-2.0
"""Ports are free when they are given out, and one that is taken is said to be."""

from __future__ import annotations

import socket

import pytest

from pdlab import ports
from pdlab.errors import LabError, PortInUse


def test_free_ports_differ_and_can_be_bound() -> None:
    found = ports.free(20)
    assert len(set(found)) == 20
    for port in found:
        with socket.create_server((ports.HOST, port)):  # as servers do, it reuses the address
            pass


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_port_in_use_is_named(host: str) -> None:
    with socket.socket() as server:
        server.bind((host, 0))
        server.listen()
        port = server.getsockname()[1]
        assert not ports.is_free(port)
        with pytest.raises(PortInUse, match=f"port {port} is in use.*--port"):
            ports.require(port)
    assert ports.require(port) == port


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_number_that_is_no_port_is_refused(port: int) -> None:
    with pytest.raises(LabError, match=f"{port} is not a port"):
        ports.require(port)
