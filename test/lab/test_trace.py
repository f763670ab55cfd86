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
def tracing(file: Path, *lives: int) -> Iterator[str]:
    """A server that writes `file` when it is asked, with so many live requests each time."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            asked.append(self.path)
            live = lives[min(len(asked), len(lives)) - 1]
            at = float(file.stem.rpartition("-")[2])
            content = {"otherData": {"live": live}, "traceEvents": events(int(at), at)}
            file.write_text(json.dumps(content))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    assert asked == ["/server_info"] * len(lives)


def pair(*servers: tuple[str, str]) -> Pair:
    def process(name: str) -> Any:
        return SimpleNamespace(name=name)

    made = tuple(Server(process(name), url, "/model_info") for name, url in servers)
    return Pair(made[-1].url, made, 1.0)


def test_the_servers_of_all_pairs_are_in_one_file_by_time(tmp_path: Path) -> None:
    traced = trace.Collector(tmp_path)
    for number in (20, 10):
        prefill = tmp_path / f"handoff-prefill-{number}.json"
        decode = tmp_path / f"handoff-decode-{number + 1}.json"
        with tracing(prefill, 0) as one, tracing(decode, 0) as other:
            traced.collect(pair(("prefill", one), ("decode", other)), f"pair {number}")
    content = traced.content(["pdlab", "run"])
    assert content["otherData"]["command"] == "pdlab run"
    names = [e["args"]["name"] for e in content["traceEvents"] if e["ph"] == "M"]
    assert names == ["prefill, pair 20", "decode, pair 20", "prefill, pair 10", "decode, pair 10"]
    rest = [event for event in content["traceEvents"] if event["ph"] != "M"]
    assert [event["ts"] for event in rest] == sorted(event["ts"] for event in rest)
    assert [e["ph"] for e in rest if e["pid"] == 10] == ["B", "B", "E", "E"]


def test_requests_that_are_still_there_are_waited_for(tmp_path: Path) -> None:
    traced = trace.Collector(tmp_path)
    with tracing(tmp_path / "handoff-decode-1.json", 2, 1, 0) as url:
        traced.collect(pair(("decode", url)), "patched")
    assert len(traced.events) == 5


def test_a_request_that_never_ends_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "SETTLE_S", 0.0)
    traced = trace.Collector(tmp_path)
    with tracing(tmp_path / "handoff-decode-1.json", 1) as url:
        traced.collect(pair(("decode", url)), "patched")
    assert len(traced.events) == 5


def test_a_server_that_does_not_trace_adds_nothing(tmp_path: Path) -> None:
    traced = trace.Collector(tmp_path / "never made")
    with tracing(tmp_path / "elsewhere-1.json", 0) as url:
        traced.collect(pair(("prefill", url), ("router", "http://127.0.0.1:9")), "stock")
    assert traced.events == []


def test_a_tree_without_the_patch_is_refused() -> None:
    tree = Tree("patched", "0.5.23", ("cpu-pd",), None)
    with pytest.raises(LabError, match="needs the patch handoff-trace, which the tree patched"):
        trace.require_patch(tree)
