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
    """The trace events of all servers so far; the servers write below `directory`."""

    directory: Path
    events: list[dict[str, Any]] = field(default_factory=list)

    def environment(self) -> dict[str, str]:
        """What makes a server trace."""
        return {DIRECTORY: str(self.directory), CAPACITY: str(TRANSITIONS)}

    def collect(self, pair: Pair, title: str) -> None:
        """Take over what the servers of a pair traced, under their roles and `title`."""
        for server in pair.servers:
            if state := _settled(server):
                content = json.loads(Path(state["file"]).read_text())
                for event in content["traceEvents"]:
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


def require_patch(tree: Tree) -> None:
    """Raise LabError when a tree cannot trace."""
    if PATCH not in tree.patches:
        raise LabError(f"--trace needs the patch {PATCH}, which the tree {tree.label} lacks")


def _settled(server: Server) -> dict[str, Any] | None:
    """What a server says of its trace, written once its last request is gone or time is up."""
    limit = time.monotonic() + SETTLE_S
    while True:
        state = _state(server)
        done = state is None or state["live"] == 0 or time.monotonic() > limit
        if done:
            return state if state and state["written"] else None
        time.sleep(POLL_S)


def _state(server: Server) -> dict[str, Any] | None:
    """The server's own word on its trace; None of one that does not trace, the router too."""
    try:
        with urllib.request.urlopen(server.url + "/server_info", timeout=ANSWER_S) as reply:
            states = json.load(reply).get("internal_states", [])
    except (urllib.error.URLError, OSError, ValueError):
        return None
    return next((each["handoff_trace"] for each in states if "handoff_trace" in each), None)
