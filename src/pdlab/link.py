# SPDX-License-Identifier: Apache-2.0
"""The TCP connections between two servers, cut from outside as a network would cut them."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psutil

from pdlab.errors import LabError
from pdlab.pair import Server
from pdlab.process import group

SYS_PIDFD_GETFD = 438  # the same number on all processors
REFUSED = (errno.EPERM, errno.ENOSYS)
Address = tuple[str, int]


@dataclass(frozen=True)
class Connection:
    """One end of a connection: the process that has it, and as which file."""

    pid: int
    file: int

    def shut(self) -> bool:
        """Shut it in both directions; whether it was still there.

        Raises LabError when the kernel does not let this process reach into the other.
        """
        try:
            process = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            taken = libc.syscall(SYS_PIDFD_GETFD, process, self.file, 0)
            number = ctypes.get_errno()
        finally:
            os.close(process)
        if taken < 0:
            if number in REFUSED:
                raise LabError(
                    f"cannot cut a server's connections: {os.strerror(number)}; pidfd_getfd(2) "
                    f"needs Linux 5.6, and in a container the capability SYS_PTRACE"
                )
            return False
        with suppress(OSError), socket.socket(fileno=taken) as end:
            end.shutdown(socket.SHUT_RDWR)
            return True
        return False


def between(one: Server, other: Server) -> list[Connection]:
    """Both ends of every connection that two servers have with each other."""
    ends = [_ends(server) for server in (one, other)]
    return [
        connection
        for mine, theirs in (ends, ends[::-1])
        for (here, there), connection in mine.items()
        if (there, here) in theirs
    ]


@contextmanager
def cut(one: Server, other: Server) -> Iterator[list[Connection]]:
    """Cut all connections between two servers, and new ones while the body runs.

    Gives the ends that were cut so far. A new connection lives for some milliseconds.
    """
    done: list[Connection] = []
    over = threading.Event()

    def again() -> None:
        while not over.is_set():
            done.extend(filter(Connection.shut, between(one, other)))

    done.extend(filter(Connection.shut, between(one, other)))
    thread = threading.Thread(target=again, daemon=True)
    thread.start()
    try:
        yield done
    finally:
        over.set()
        thread.join()


def _ends(server: Server) -> dict[tuple[Address, Address], Connection]:
    """A server's ends of established connections, by their two addresses."""
    found: dict[tuple[Address, Address], Connection] = {}
    for pid in group(server.process.pid):
        with suppress(psutil.NoSuchProcess):
            for each in psutil.Process(pid).net_connections("tcp"):
                if each.status == psutil.CONN_ESTABLISHED:
                    ends = _plain(each.laddr), _plain(each.raddr)
                    found[ends] = Connection(pid, each.fd)
    return found


def _plain(address: Address) -> Address:
    """An address without the wrapping of IPv4 in IPv6 that some sockets have."""
    host, port = address
    return host.removeprefix("::ffff:"), port
