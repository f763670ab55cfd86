# SPDX-License-Identifier: Apache-2.0
"""A headless browser to look at a page with, spoken to by the DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium-headless-shell", "chromium", "google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run")
PORT_FILE = "DevToolsActivePort"
LIMIT_S = 120.0


def find() -> str | None:
    """The browser that is installed."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@dataclass
class Tab:
    """A page that is open. `complaints` is what the console and the network said went wrong."""

    socket: aiohttp.ClientWebSocketResponse
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    async def call(self, method: str, **parameters: Any) -> Any:
        """The result of a DevTools method."""
        number = next(self._numbers)
        await self.socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            message = json.loads(await self.socket.receive_str(timeout=LIMIT_S))
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]
            self._hear(message)

    async def evaluate(self, script: str) -> Any:
        """What a script gives; a promise is waited for."""
        reply = await self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    async def until(self, script: str) -> None:
        """Wait until a script gives true."""
        async with asyncio.timeout(LIMIT_S):
            while not await self.evaluate(script):
                await asyncio.sleep(0.05)

    async def scheme(self, name: str, width: int = 1280, height: int = 900) -> None:
        """Prefer a colour scheme, in a window of that size."""
        feature = {"name": "prefers-color-scheme", "value": name}
        await self.call("Emulation.setEmulatedMedia", features=[feature])
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip

    async def press(self, key: str) -> None:
        """Press and let go of a key."""
        code = {"Tab": 9, "Enter": 13}[key]
        for kind in ("keyDown", "keyUp"):
            await self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key,
                windowsVirtualKeyCode=code, text="\r" if key == "Enter" else "",
            )  # fmt: skip

    async def screenshot(self, path: Path) -> None:
        """A picture of the whole page."""
        picture = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(picture["data"]))

    def _hear(self, event: dict[str, Any]) -> None:
        method, said = event["method"], event["params"]
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(said["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and said["type"] in ("error", "warning"):
            self.complaints.append(json.dumps(said["args"]))
        elif method == "Log.entryAdded" and said["entry"]["level"] in ("error", "warning"):
            self.complaints.append(said["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(said["request"]["url"])


@asynccontextmanager
async def opened(page: Path) -> AsyncIterator[Tab]:
    """A file in a browser of its own, which ends with the body."""
    program = find()
    assert program
    with tempfile.TemporaryDirectory(prefix="pdlab-browser-") as profile:
        words = [program, *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-port=0"]
        running = subprocess.Popen(
            [*words, "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            port = await _port(running, Path(profile) / PORT_FILE)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as reply:
                    [target] = [each for each in await reply.json() if each["type"] == "page"]
                address = target["webSocketDebuggerUrl"]
                async with session.ws_connect(address, max_msg_size=0) as socket:
                    tab = Tab(socket)
                    for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
                        await tab.call(f"{domain}.enable")
                    await tab.scheme("light")
                    await tab.call("Page.navigate", url=page.resolve().as_uri())
                    yield tab
        finally:
            # The program may be a script that starts the browser: all of its group ends.
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()


async def _port(running: subprocess.Popen[bytes], file: Path) -> int:
    """The port the browser listens on, once it does."""
    async with asyncio.timeout(LIMIT_S):
        while not (file.is_file() and (lines := file.read_text().splitlines())):
            assert running.poll() is None, f"the browser ended with {running.returncode}"
            await asyncio.sleep(0.05)
    return int(lines[0])
