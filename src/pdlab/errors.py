# SPDX-License-Identifier: Apache-2.0
"""What can go wrong in the lab, each with the one message a user gets."""

from __future__ import annotations


class LabError(Exception):
    """A reason to stop, worded for whoever typed the command."""


class PortInUse(LabError):
    """A port that was asked for belongs to another process."""


class NotReady(LabError):
    """A server did not answer within its time limit."""


class ServerDied(LabError):
    """A server ended by itself; the message holds the end of its log."""


class Interrupted(BaseException):
    """SIGTERM or SIGHUP arrived; raised wherever the main thread is, so that everything unwinds."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum
