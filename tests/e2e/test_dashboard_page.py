"""The dashboard of a server in headless Chromium: key, figures, themes, widths, keyboard."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from support.browser import Tab, browser_tab
from support.live_server import LiveServer, live_server

OPERATOR, CLIENT = "operators-secret-key", "clients-secret-key"


@pytest.fixture(scope="module")
def keyed(run_parent: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(f"ops {OPERATOR} admin\nalice {CLIENT}\n")
    path.chmod(0o600)
    flags = ("--api-key-file", str(path), "--ttft-slo-ms", "10000", "--tpot-slo-ms", "1000")
    with live_server(run_parent, *flags) as running:
        yield running


async def _give(tab: Tab, key: str) -> None:
    """Type a key, and send it off from the keyboard alone."""
    await tab.until("!document.getElementById('login').hidden")
    assert await tab.run("document.activeElement.id") == "key"
    await tab.call("Input.insertText", text=key)
    await tab.press("Enter", 13)


def _complete(server: LiveServer) -> None:
    body = {"model": server.model, "prompt": "Mira", "max_tokens": 40, "ignore_eos": True}
    headers = {"authorization": f"Bearer {CLIENT}"}
    url = f"{server.url}/v1/completions"
    assert httpx.post(url, json=body, headers=headers, timeout=300.0).status_code == 200


@pytest.mark.parametrize("port", ["http", "metrics"])
def test_the_page_in_a_browser(keyed: LiveServer, port: str) -> None:
    base = keyed.url if port == "http" else keyed.metrics_url.removesuffix("/metrics")

    async def scenario() -> None:
        async with browser_tab() as tab:
            await tab.look(width=1300, height=900)
            await tab.go(f"{base}/dashboard")
            await _give(tab, "a-key-that-is-none")
            await tab.until("document.getElementById('refusal').textContent.includes('not known')")
            await _give(tab, CLIENT)
            await tab.until("document.getElementById('refusal').textContent.includes('operator')")
            await _give(tab, OPERATOR)
            await tab.until("document.getElementById('state').textContent === 'live'")
            refused = [text for text in tab.complaints if "40" in text]
            assert tab.complaints == refused, "the browser tells of refusals, and of nothing else"

            await asyncio.to_thread(_complete, keyed)
            numbers = "[...document.querySelectorAll('#tiles dd')].map((e) => e.textContent)"
            await tab.until(f"{numbers}[3] === '100.0 %'")
            assert json.loads(await tab.run(f"JSON.stringify({numbers})"))[4].endswith("ms")
            await tab.until("document.querySelectorAll('#steps tbody tr').length > 0")
            assert await tab.run("document.querySelectorAll('.u-over').length") == 8
            assert await tab.run("document.getElementById('pool').height") > 0
            label = await tab.run("document.getElementById('pool').getAttribute('aria-label')")
            assert "cached" in label

            for width, theme in ((390, "dark"), (390, "light"), (1300, "dark")):
                await tab.look(width=width, height=900, theme=theme)
                await tab.until(f"document.documentElement.scrollWidth <= {width}")
                color = await tab.run("getComputedStyle(document.body).backgroundColor")
                assert (color == "rgb(20, 22, 26)") == (theme == "dark")
                await tab.until(f"document.querySelector('.chart').clientWidth <= {width}")
            await tab.run("document.getElementById('theme').focus()")
            await tab.press("Enter", 13)
            await tab.until("document.getElementById('theme').textContent === 'Theme: light'")
            color = await tab.run("getComputedStyle(document.body).backgroundColor")
            assert color == "rgb(246, 247, 249)"
            await tab.run("document.getElementById('pause').focus()")
            await tab.press("Enter", 13)
            await tab.until("document.getElementById('state').textContent === 'paused'")

            assert tab.complaints == refused
            places = {urlsplit(url)[:3] for url in tab.requested}
            scheme, host = urlsplit(base)[:2]
            assert places == {(scheme, host, "/dashboard"), (scheme, host, "/dashboard/events")}
            assert all(OPERATOR not in url for url in tab.requested)

    asyncio.run(scenario())
