"""A headless Chromium, driven over its debugging protocol; skips the test where there is none."""

from __future__ import annotations

import asyncio
import base64
import itertools
import re
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from support.processes import PATIENCE_S

_ADDRESS = re.compile(r"DevTools listening on (ws://\S+)")
_QUIET = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--disable-extensions", "--remote-debugging-port=0"),
)


class Tab:
    """One page. `complaints` are its uncaught errors, and what its console says of errors."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._session = ""
        self.complaints: list[str] = []
        self.requested: list[str] = []
        """Addresses that the page has asked for."""
        self._listener = asyncio.create_task(self._listen())

    async def call(self, method: str, **params: Any) -> Any:
        """Return what the browser answers."""
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params}
        await self._socket.send_json(
            message | ({"sessionId": self._session} if self._session else {})
        )
        return await asyncio.wait_for(self._answers[number], PATIENCE_S)

    async def open(self) -> None:
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )
        self._session = attached["sessionId"]
        for domain in ("Runtime", "Log", "Page", "Network"):
            await self.call(f"{domain}.enable")

    async def go(self, url: str) -> None:
        await self.call("Page.navigate", url=url)

    async def look(self, *, width: int, height: int, theme: str = "light") -> None:
        await self.call(
            *("Emulation.setDeviceMetricsOverride",),
            **{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
        )
        features = [{"name": "prefers-color-scheme", "value": theme}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def run(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        answer = await self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def press(self, key: str, code: int) -> None:
        """Press and release a key."""
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            await self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **text
            )

    async def until(self, script: str) -> None:
        """Wait until an expression in the page is true; what it fails at may still be loading."""
        script = f"(() => {{ try {{ return Boolean({script}); }} catch {{ return false; }} }})()"
        async with asyncio.timeout(PATIENCE_S):
            while not await self.run(script):
                await asyncio.sleep(0.05)

    async def picture(self) -> bytes:
        """Return the whole page as a PNG."""
        shot = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(shot["data"])

    async def _listen(self) -> None:
        async for message in self._socket:
            event = message.json()
            if "id" in event:
                answer = self._answers.pop(event["id"])
                if "error" in event:
                    answer.set_exception(AssertionError(event["error"]))
                else:
                    answer.set_result(event["result"])
            elif event["method"] == "Runtime.exceptionThrown":
                self.complaints.append(str(event["params"]["exceptionDetails"]))
            elif event["method"] == "Runtime.consoleAPICalled":
                if event["params"]["type"] in ("error", "warning", "assert"):
                    self.complaints.append(str(event["params"]["args"]))
            elif event["method"] == "Log.entryAdded":
                if event["params"]["entry"]["level"] == "error":
                    self.complaints.append(event["params"]["entry"]["text"])
            elif event["method"] == "Network.requestWillBeSent":
                self.requested.append(event["params"]["request"]["url"])


@asynccontextmanager
async def browser_tab() -> AsyncIterator[Tab]:
    """Start a browser with one empty page."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("no chromium here")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [program, *_QUIET, f"--user-data-dir={profile}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stderr is not None
            address = await asyncio.to_thread(_address_in, process)
            async with (
                aiohttp.ClientSession() as http,
                http.ws_connect(address, max_msg_size=0) as socket,
            ):
                tab = Tab(socket)
                await tab.open()
                yield tab
                tab._listener.cancel()
        finally:
            process.terminate()
            process.communicate(timeout=PATIENCE_S)


def _address_in(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        if match := _ADDRESS.search(line):
            return match[1]
    raise AssertionError("chromium has ended")
