# SPDX-License-Identifier: Apache-2.0
"""Ports on loopback: free ones, and a clear word about one that is taken."""

from __future__ import annotations

import random
import socket

from pdlab.errors import LabError, PortInUse

HOST = "127.0.0.1"
# Below the range the kernel hands to outgoing connections, so that none of those takes one first.
LOWEST, HIGHEST = 20_000, 30_000
TRIES = 2_000


def is_free(port: int) -> bool:
    """Whether a server could listen on `port`, on loopback and on every address."""
    for host in (HOST, "0.0.0.0"):
        with socket.socket() as probe:
            # servers set it too: a port in TIME_WAIT is free to them
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                return False
    return True


def require(port: int) -> int:
    """Return `port`, or raise PortInUse when something listens there."""
    if not 0 < port < 65536:
        raise LabError(f"{port} is not a port: name one from 1 to 65535")
    if not is_free(port):
        raise PortInUse(
            f"port {port} is in use: end what listens there, or name another port with --port"
        )
    return port


def free(count: int) -> list[int]:
    """`count` different ports that nothing listens on at the moment."""
    found: list[int] = []
    for _ in range(TRIES):
        port = random.randrange(LOWEST, HIGHEST)
        if port not in found and is_free(port):
            found.append(port)
        if len(found) == count:
            return found
    raise LabError(f"no {count} free ports between {LOWEST} and {HIGHEST} on {HOST}")
