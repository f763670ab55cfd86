# SPDX-License-Identifier: Apache-2.0
"""Traces of several servers become one file; a tree that cannot trace is refused by name."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pdlab import trace
from pdlab.errors import LabError
from pdlab.pair import Pair, Server
from pdlab.trees import Tree


def events(pid: int, at: float) -> list[dict[str, Any]]:
    place = {"pid": pid, "tid": 1}
    return [
        {"ph": "M", "name": "process_name", **place, "ts": 0, "args": {"name": "decode 7"}},
        {"ph": "B", "name": "request", **place, "ts": at},
        {"ph": "B", "name": "wait", **place, "ts": at},
        {"ph": "E", **place, "ts": at},
        {"ph": "E", **place, "ts": at + 1},
    ]


@contextmanager
def serving(states: list[dict[str, Any]]) -> Iterator[str]:
    """A server whose internal state is each of `states` in turn, then the last one."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            state = states.pop(0) if len(states) > 1 else states[0]
            body = json.dumps({"internal_states": [state]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def pair(*servers: tuple[str, str]) -> Pair:
    def process(name: str) -> Any:
        return SimpleNamespace(name=name)

    made = tuple(Server(process(name), url, "/model_info") for name, url in servers)
    return Pair(made[-1].url, made, 1.0)


def state(file: Path, live: int = 0, written: int = 4) -> dict[str, Any]:
    return {"handoff_trace": {"file": str(file), "live": live, "written": written}}


def test_the_servers_of_all_pairs_are_in_one_file_by_time(tmp_path: Path) -> None:
    files = [tmp_path / f"{number}.json" for number in (1, 2)]
    for number, file in enumerate(files, 1):
        file.write_text(json.dumps({"traceEvents": events(number, 100.0 / number)}))
    traced = trace.Collector(tmp_path)
    with serving([state(files[0])]) as prefill, serving([state(files[1])]) as decode:
        traced.collect(pair(("prefill", prefill), ("decode", decode)), "patched, default")
    content = traced.content(["pdlab", "run"])
    assert content["otherData"]["command"] == "pdlab run"
    names = [e["args"]["name"] for e in content["traceEvents"] if e["ph"] == "M"]
    assert names == ["prefill, patched, default", "decode, patched, default"]
    rest = [event for event in content["traceEvents"] if event["ph"] != "M"]
    assert [event["ts"] for event in rest] == sorted(event["ts"] for event in rest)
    assert [e["ph"] for e in rest if e["pid"] == 1] == ["B", "B", "E", "E"]


def test_requests_that_are_still_there_are_waited_for(tmp_path: Path) -> None:
    file = tmp_path / "decode.json"
    file.write_text(json.dumps({"traceEvents": events(1, 1.0)}))
    states = [state(file, live=2, written=0), state(file, live=1, written=2), state(file)]
    traced = trace.Collector(tmp_path)
    with serving(states) as url:
        traced.collect(pair(("decode", url)), "patched")
    assert len(states) == 1
    assert len(traced.events) == 5


def test_a_request_that_never_ends_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "SETTLE_S", 0.0)
    file = tmp_path / "decode.json"
    file.write_text(json.dumps({"traceEvents": events(1, 1.0)}))
    traced = trace.Collector(tmp_path)
    with serving([state(file, live=1)]) as url:
        traced.collect(pair(("decode", url)), "patched")
    assert len(traced.events) == 5


@pytest.mark.parametrize("said", [{}, {"metadata_slots": {}}])
def test_a_server_that_does_not_trace_adds_nothing(said: dict[str, Any], tmp_path: Path) -> None:
    traced = trace.Collector(tmp_path)
    with serving([said]) as url:
        traced.collect(pair(("prefill", url), ("router", "http://127.0.0.1:9")), "stock")
    assert traced.events == []


def test_a_tree_without_the_patch_is_refused() -> None:
    tree = Tree("patched", "0.5.23", ("cpu-pd",), None)
    with pytest.raises(LabError, match="needs the patch handoff-trace, which the tree patched"):
        trace.require_patch(tree)
