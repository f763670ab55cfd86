# SPDX-License-Identifier: Apache-2.0
"""The command, end to end, on servers that cost nothing: results, refusals, and a clean end."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

import pdlab
from pdlab import ports

SOURCE = Path(pdlab.__file__).parent.parent
pytestmark = pytest.mark.usefixtures("leaves_nothing")


class Lab:
    """`pdlab` with the fake tree, each call in a process of its own."""

    def __init__(self, tree: Path, model: Path, build: Path) -> None:
        self.options = ["--tree", str(tree), "--model", str(model), "--build", str(build)]
        self.path = os.pathsep.join(map(str, (tree / "python", SOURCE)))

    def start(self, *words: str, **behaviour: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": self.path, "COLUMNS": "200"}
        environment |= {f"FAKE_{role.upper()}": value for role, value in behaviour.items()}
        return subprocess.Popen(
            [sys.executable, "-m", "pdlab", *words],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *words: str, **behaviour: str) -> tuple[int, str, str]:
        """Exit status, standard output and standard error of `pdlab words options`."""
        running = self.start(*words, *self.options, **behaviour)
        output, errors = running.communicate(timeout=120)
        return running.returncode, output, errors


@pytest.fixture
def lab(fake_tree: Path, fake_model: Path, tmp_path: Path) -> Lab:
    return Lab(fake_tree, fake_model, tmp_path / "build")


@pytest.fixture
def serving(lab: Lab) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running `pdlab up`, and the request it says to paste."""
    running = lab.start("up", *lab.options)
    assert running.stdout is not None
    yield running, running.stdout.readline()
    running.kill()
    running.communicate()


@pytest.mark.parametrize("how", [(), ("--cold",)], ids=["warm", "cold"])
def test_run_measures_and_writes_json(lab: Lab, tmp_path: Path, how: tuple[str, ...]) -> None:
    file = tmp_path / "deep" / "result.json"
    code, output, errors = lab("run", "parity", "burst", "--json", str(file), *how)
    assert code == 0, errors
    assert re.search(r"parity +tokens equal aggregated +100%", output)
    assert re.search(r"burst +tokens equal aggregated +100%", output)
    result = json.loads(file.read_text())
    assert result["schema"] == 1
    [run] = result["runs"]
    assert [each["name"] for each in run["scenarios"]] == ["parity", "burst"]
    [[burst]] = run["scenarios"][1]["rounds"]
    assert len(burst["requests"]) == 64
    assert burst["requests"][0]["accept_length"] == 3.5
    assert len(run["startup_s"]) == 1  # equal settings share one pair
    modules = [words[words.index("-m") + 1] for words in run["commands"]["default settings"]]
    assert modules == ["sglang.launch_server", "sglang.launch_server", "pdlab.router"]
    assert list((tmp_path / "build" / "lab").iterdir()) == []  # all went well: no logs


def test_progress_is_plain_lines_where_there_is_no_terminal(lab: Lab) -> None:
    _, _, errors = lab("run", "parity")
    lines = errors.splitlines()
    assert any("prefill, decode and router" in line for line in lines)
    assert "\x1b" not in errors


def test_wrong_tokens_fail_the_run(lab: Lab) -> None:
    code, output, errors = lab("run", "parity", decode="lies")
    assert code == 1
    assert re.search(r"parity +tokens equal aggregated +0\.0%", output)
    assert "patched: parity: tokens equal aggregated is 0.0%" in errors


def test_compare_shows_both_with_a_verdict(lab: Lab, tmp_path: Path, fake_tree: Path) -> None:
    # The stock tree is built by seam; a copy of the fake one stands where it would.
    script = (
        "import sys; from pathlib import Path; from pdlab import cli, trees;"
        f"trees.stock = lambda *_: trees.existing(Path({str(fake_tree)!r}), 'stock');"
        "sys.exit(cli.main(sys.argv[1:]))"
    )
    file = tmp_path / "result.json"
    environment = {**os.environ, "PYTHONPATH": lab.path}
    words = ["compare", "parity", "health", "--json", str(file), "--html", str(tmp_path / "page")]
    words += lab.options
    done = subprocess.run(
        [sys.executable, "-c", script, *words], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"tokens equal aggregated +100% +100% +1\.00 +same", done.stdout)
    assert re.search(r"patched beside stock: .*same", done.stdout)
    result = json.loads(file.read_text())
    assert [run["label"] for run in result["runs"]] == ["stock", "patched"]
    assert {row["scenario"] for row in result["comparison"]} == {"parity", "health"}
    waves = result["runs"][0]["scenarios"][1]["rounds"][0]
    assert [bool(wave["probes"]) for wave in waves] == [True, True, True]
    html = (tmp_path / "page" / "index.html").read_text()
    assert "stock beside patched" in html
    assert f"the page to look at: {tmp_path / 'page' / 'index.html'}" in done.stderr


def test_up_serves_what_it_says_to_paste(
    serving: tuple[subprocess.Popen[str], str],
) -> None:
    running, line = serving
    found = re.fullmatch(r"curl -s (\S+) -H 'Content-Type: application/json' -d '(.*)'\n", line)
    assert found
    request = urllib.request.Request(found[1], found[2].encode())
    with urllib.request.urlopen(request) as reply:
        assert len(json.load(reply)["output_ids"]) == 32
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=30)
    assert running.returncode == 130
    assert "all servers are ended" in errors


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_end_everything_too(
    serving: tuple[subprocess.Popen[str], str], signum: signal.Signals
) -> None:
    running, _ = serving
    running.send_signal(signum)
    _, errors = running.communicate(timeout=30)
    assert running.returncode == 128 + signum, errors


def test_ctrl_c_while_servers_start(lab: Lab) -> None:
    running = lab.start("run", "parity", *lab.options, aggregated="hangs")
    logs = Path(lab.options[-1]) / "lab"
    while not any("told: hangs" in log.read_text() for log in logs.glob("*/*aggregated.log")):
        assert running.poll() is None
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=30)
    assert running.returncode == 130


def test_a_port_in_use(lab: Lab) -> None:
    with socket.create_server((ports.HOST, 0)) as taken:
        port = taken.getsockname()[1]
        code, _, errors = lab("up", "--port", str(port))
    assert code == 1
    assert errors.startswith(f"pdlab: port {port} is in use")
    assert len(errors.splitlines()) == 1


@pytest.mark.parametrize("how", [(), ("--cold",)], ids=["warm", "cold"])
def test_a_server_that_never_gets_ready(lab: Lab, how: tuple[str, ...]) -> None:
    code, _, errors = lab("up", "--timeout", "10", *how, decode="hangs")
    assert code == 1
    assert "pdlab: decode was not ready after 10 s (--timeout gives more)" in errors
    assert "fake decode server, told: hangs" in errors


@pytest.mark.parametrize("how", [(), ("--cold",)], ids=["warm", "cold"])
def test_a_server_that_dies_at_start(lab: Lab, how: tuple[str, ...]) -> None:
    code, _, errors = lab("up", *how, prefill="dies")
    assert code == 1
    assert "pdlab: prefill ended by itself (exit code 1)" in errors
    assert "RuntimeError: the fake server was told to die" in errors
    assert "logs: " in errors


def test_a_server_that_dies_under_traffic(lab: Lab) -> None:
    code, _, errors = lab("run", "burst", decode="dies-later")
    assert code == 1
    assert "pdlab: decode ended by itself (exit code 7)" in errors
    assert "the fake server was told to die" in errors


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "nonsense"], "no scenario nonsense: there are parity, "),
        (["run", "parity", "--tree", "/nowhere"], "/nowhere is not a tree"),
        (["run", "parity", "--model", "/nowhere"], "model path /nowhere does not exist"),
        (["run", "parity", "--draft", "/nowhere"], "model path /nowhere does not exist"),
        (["run", "parity", "--json", "/proc/no.json"], "cannot write /proc/no.json"),
        (["up", "--scenario", "nonsense"], "no scenario nonsense"),
        (["up", "--port", "70000"], "70000 is not a port"),
        (["run", "parity", "--json", "/tmp"], "cannot write /tmp: it is a directory"),
        (["run", "parity", "--trace", "/proc/no.json"], "cannot write /proc/no.json"),
        (["run", "parity", "--trace", "/tmp/pdlab-trace.json"], "the patch handoff-trace"),
        (["compare", "parity", "--html", "/proc/no"], "cannot write /proc/no/index.html"),
    ],
)
def test_bad_input_gets_one_message(lab: Lab, words: list[str], message: str) -> None:
    running = lab.start(words[0], *lab.options, *words[1:])
    output, errors = running.communicate(timeout=60)
    assert running.returncode == 1
    assert output == ""
    last = errors.splitlines()[-1]
    assert last.startswith("pdlab: ") or "logs:" in last
    assert message in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    "words",
    [
        ["run"],
        ["walk"],
        ["run", "parity", "--rounds", "0"],
        ["run", "parity", "--page-size", "many"],
        ["run", "parity", "--timeout", "-1"],
        ["run", "parity", "--stock", "--tree", "/nowhere"],
    ],
)
def test_a_wrong_command_line_is_explained(lab: Lab, words: list[str]) -> None:
    running = lab.start(*words)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 2
    assert errors.startswith("usage: pdlab")


def test_a_draft_without_a_model_is_refused(fake_tree: Path, tmp_path: Path) -> None:
    lab = Lab(fake_tree, tmp_path, tmp_path)
    running = lab.start("run", "parity", "--tree", str(fake_tree), "--draft", str(tmp_path))
    assert "--draft goes with --model" in running.communicate(timeout=60)[1]
    assert running.returncode == 1


def test_missing_packages_are_named(lab: Lab, fake_tree: Path, tmp_path: Path) -> None:
    shutil.copytree(fake_tree / "python" / "sglang", tmp_path / "python" / "sglang")
    script = (
        "import sys, importlib.util as u; from pdlab import cli; find = u.find_spec;"
        "u.find_spec = lambda name: None if name == 'mooncake' else find(name);"
        "sys.exit(cli.main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "run", "parity", *lab.options],
        env={**os.environ, "PYTHONPATH": lab.path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "mooncake is not installed" in done.stderr
