# SPDX-License-Identifier: Apache-2.0
"""A server and all its children end with the lab, and one that dies shows why."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from multiprocessing import shared_memory
from pathlib import Path

import pytest
from leftovers import MARK, marked

from pdlab import process
from pdlab.errors import NotReady, ServerDied
from pdlab.process import Command, group, spawn, tail
from pdlab.warm import WarmInterpreter

PARENT = """
import multiprocessing, sys, time
from multiprocessing import resource_tracker, shared_memory
multiprocessing.set_start_method("spawn", force=True)
if __name__ == "__main__":
    kept = shared_memory.SharedMemory(name=sys.argv[1], create=True, size=64)
    resource_tracker.unregister(kept._name, "shared_memory")
    multiprocessing.Process(target=time.sleep, args=(600,)).start()
    print("up", flush=True)
    time.sleep(600)
"""
LASTING = 'import time; print("up", flush=True); time.sleep(600)'
TITLED = 'import setproctitle; setproctitle.setproctitle("sglang::scheduler")\n' + LASTING
DYING = 'print("first line"); raise SystemExit("the reason it died")'


@pytest.fixture
def modules(tmp_path: Path) -> dict[str, str]:
    """Modules to start, and the environment that finds them."""
    (tmp_path / "parent.py").write_text(PARENT)
    (tmp_path / "lasting.py").write_text(LASTING)
    (tmp_path / "dying.py").write_text(DYING)
    (tmp_path / "broken.py").write_text("import a_module_that_is_not_there")
    root = Path(process.__file__).parent.parent
    path = os.pathsep.join([str(tmp_path), str(root)])
    return {**os.environ, "PYTHONPATH": path}


def wait_for(text: str, log: Path) -> None:
    limit = time.monotonic() + 30
    while text not in (log.read_text() if log.exists() else ""):
        assert time.monotonic() < limit, tail(log)
        time.sleep(0.02)


@pytest.mark.parametrize("warm", [False, True], ids=["own interpreter", "warm"])
@pytest.mark.usefixtures("leaves_nothing")
def test_stop_ends_the_group_and_its_shared_memory(
    warm: bool, modules: dict[str, str], tmp_path: Path
) -> None:
    modules |= {MARK: os.environ[MARK]}
    memory = f"pdlab_test_{os.getpid()}_{warm}"
    command = Command("parent", "parent", (memory,), modules)
    log = tmp_path / "parent.log"
    if warm:
        interpreter = WarmInterpreter(("json",), modules, tmp_path / "warm.log", 30)
        started = interpreter.fork(command, log)
    else:
        started = spawn(command, log, tmp_path)
    wait_for("up", log)
    assert len(list(group(started.pid))) >= 2
    started.require_alive()
    started.stop()
    assert list(group(started.pid)) == []
    with pytest.raises(FileNotFoundError):
        shared_memory.SharedMemory(name=memory)
    started.stop()  # twice is once
    if warm:
        interpreter.stop()


@pytest.mark.parametrize("warm", [False, True], ids=["own interpreter", "warm"])
def test_a_process_that_dies_is_reported_with_the_end_of_its_log(
    warm: bool, modules: dict[str, str], tmp_path: Path
) -> None:
    command = Command("decode", "dying", (), modules)
    log = tmp_path / "dying.log"
    if warm:
        interpreter = WarmInterpreter(("json",), modules, tmp_path / "warm.log", 30)
        started = interpreter.fork(command, log)
    else:
        started = spawn(command, log, tmp_path)
    while started.poll() is None:
        time.sleep(0.02)
    with pytest.raises(ServerDied, match=r"decode ended by itself.*exit code 1") as caught:
        started.require_alive()
    assert "first line" in str(caught.value)
    started.stop()
    if warm:
        interpreter.stop()


def test_a_warm_interpreter_that_cannot_import_says_why(
    modules: dict[str, str], tmp_path: Path
) -> None:
    warm = WarmInterpreter(("broken",), modules, tmp_path / "warm.log", 30)
    with pytest.raises(ServerDied, match="a_module_that_is_not_there"):
        warm.fork(Command("decode", "dying", (), modules), tmp_path / "log")
    warm.stop()


def test_a_warm_interpreter_skips_modules_that_a_release_lacks(
    modules: dict[str, str], tmp_path: Path
) -> None:
    warm = WarmInterpreter(("json", "json.nothing", "no.such"), modules, tmp_path / "w.log", 30)
    assert warm.fork(Command("decode", "dying", (), modules), tmp_path / "log").pid
    warm.stop()


def test_a_forked_server_can_name_its_processes(modules: dict[str, str], tmp_path: Path) -> None:
    """By their names the lab tells a scheduler from the other processes of a server."""
    (tmp_path / "titled.py").write_text(TITLED)
    warm = WarmInterpreter(("json",), modules, tmp_path / "warm.log", 30)
    started = warm.fork(Command("decode", "titled", (), modules), tmp_path / "log")
    wait_for("up", tmp_path / "log")
    assert Path(f"/proc/{started.pid}/cmdline").read_text().startswith("sglang::scheduler")
    started.stop()
    warm.stop()


def test_a_signal_between_request_and_reply_costs_that_reply_alone(
    modules: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm = WarmInterpreter(("json",), modules, tmp_path / "warm.log", 30)
    started = warm.fork(Command("decode", "dying", (), modules), tmp_path / "log")
    wait_for("the reason it died", tmp_path / "log")

    def interrupted(_: WarmInterpreter) -> bytes:
        raise KeyboardInterrupt

    for _ in range(3):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(WarmInterpreter, "_line", interrupted)
            started.poll()
    while (code := started.poll()) is None:
        time.sleep(0.02)
    assert code == 1
    assert warm.fork(Command("decode", "dying", (), modules), tmp_path / "2").pid != started.pid
    warm.stop()


def test_a_warm_interpreter_that_takes_too_long_is_given_up(
    modules: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text("import time; time.sleep(600)")
    warm = WarmInterpreter(("slow",), modules, tmp_path / "warm.log", 0.2)
    with pytest.raises(NotReady, match=r"not imported after 0\.2 s"):
        warm.fork(Command("decode", "dying", (), modules), tmp_path / "log")
    warm.stop()


@pytest.mark.usefixtures("leaves_nothing")
def test_servers_end_with_a_lab_that_is_killed(modules: dict[str, str], tmp_path: Path) -> None:
    lab = f"""
import os, time
from pathlib import Path
from pdlab.process import Command, spawn
from pdlab.warm import WarmInterpreter
here = Path({str(tmp_path)!r})
spawn(Command("a", "lasting", (), os.environ), here / "a.log", here)
warm = WarmInterpreter(("json",), os.environ, here / "warm.log", 30)
warm.fork(Command("b", "lasting", (), os.environ), here / "b.log")
time.sleep(600)
"""
    mark = os.environ[MARK]
    running = subprocess.Popen([sys.executable, "-c", lab], env={**modules, MARK: mark})
    for name in ("a", "b"):
        wait_for("up", tmp_path / f"{name}.log")
    running.kill()
    running.wait()
    limit = time.monotonic() + 10
    while marked(mark) and time.monotonic() < limit:
        time.sleep(0.02)


def test_the_tail_is_the_last_lines_without_empty_ones(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"line {number}\n\n" for number in range(100)) + "x" * 500)
    shown = tail(log, 3).splitlines()
    assert [line.strip()[:7] for line in shown] == ["line 98", "line 99", "xxxxxxx"]
    assert max(map(len, shown)) <= 4 + process.LINE_WIDTH
    assert tail(tmp_path / "none") == "    (the log is empty)"
