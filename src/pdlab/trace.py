# SPDX-License-Identifier: Apache-2.0
"""Gathers what the servers of a run traced into one file that Perfetto opens.

The servers do the tracing: the patch `handoff-trace`, told by the environment to do so.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdlab.errors import LabError
from pdlab.pair import Pair, Server
from pdlab.trees import Tree

PATCH = "handoff-trace"
DIRECTORY = "SGLANG_HANDOFF_TRACE"
CAPACITY = "SGLANG_HANDOFF_TRACE_TRANSITIONS"
# The latest of each server: some thousand requests, about 5 MB.
TRANSITIONS = 10_000
SETTLE_S = 5.0
POLL_S = 0.2
ANSWER_S = 30.0


@dataclass
class Collector:
    """The trace events of all servers so far; the servers write files in `directory`, of which
    those in `taken` are in `events`."""

    directory: Path
    events: list[dict[str, Any]] = field(default_factory=list)
    taken: set[Path] = field(default_factory=set)

    def environment(self) -> dict[str, str]:
        """What makes a server trace."""
        return {DIRECTORY: str(self.directory), CAPACITY: str(TRANSITIONS)}

    def collect(self, pair: Pair, title: str) -> None:
        """Take over what the servers of a pair traced, under their roles and `title`."""
        for server in pair.servers:
            for event in self._settled(server):
                if event.get("name") == "process_name":
                    event["args"]["name"] = f"{server.process.name}, {title}"
                self.events.append(event)

    def content(self, made_by: list[str]) -> dict[str, Any]:
        """The file: JSON in the Trace Event Format, the servers' events by time."""
        names = [event for event in self.events if event["ph"] == "M"]
        # Stable: what a server noted at one time keeps its order.
        rest = sorted((e for e in self.events if e["ph"] != "M"), key=lambda event: event["ts"])
        return {
            "displayTimeUnit": "ms",
            "otherData": {"command": " ".join(made_by)},
            "traceEvents": [*names, *rest],
        }

    def _settled(self, server: Server) -> list[dict[str, Any]]:
        """A server's events once its last request is gone or time is up; none of one that does
        not trace, as the router."""
        limit = time.monotonic() + SETTLE_S
        while True:
            _ask(server)
            files = set(self.directory.glob(f"handoff-{server.process.name}-*.json")) - self.taken
            contents = [json.loads(file.read_text()) for file in sorted(files)]
            live = sum(content["otherData"]["live"] for content in contents)
            if not live or time.monotonic() > limit:
                self.taken |= files
                return [event for content in contents for event in content["traceEvents"]]
            time.sleep(POLL_S)


def require_patch(tree: Tree) -> None:
    """Raise LabError when a tree cannot trace."""
    if PATCH not in tree.patches:
        raise LabError(f"--trace needs the patch {PATCH}, which the tree {tree.label} lacks")


def _ask(server: Server) -> None:
    """Ask a server for its internal state, upon which it writes its trace."""
    try:
        with urllib.request.urlopen(server.url + "/server_info", timeout=ANSWER_S) as reply:
            reply.read()
    except (urllib.error.URLError, OSError):
        pass  # the router knows no such path
