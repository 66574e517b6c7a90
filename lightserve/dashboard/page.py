"""The page: styles and scripts are in it, so that it needs no other resource.

uPlot (https://github.com/leeoniya/uPlot, MIT, static/uplot.LICENSE) draws the lines.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

_STATIC = Path(__file__).parent / "static"
_STYLES = ("uplot.css", "page.css")
_SCRIPTS = ("uplot.js", "page.js")


class Page(NamedTuple):
    """What a browser gets."""

    body: bytes
    headers: dict[str, str]
    """With the content security policy: nothing runs and nothing is fetched but what is in it."""


@cache
def load_page() -> Page:
    """Return the page; its files are read once."""
    styles = [_read(name) for name in _STYLES]
    scripts = [_read(name) for name in _SCRIPTS]
    body = _read("page.html")
    body = body.replace("<!--styles-->", "".join(f"<style>{text}</style>" for text in styles))
    body = body.replace("<!--scripts-->", "".join(f"<script>{text}</script>" for text in scripts))
    policy = (
        f"default-src 'none'; connect-src 'self'; img-src data:; script-src {_hashes(scripts)};"
        f" style-src {_hashes(styles)}; base-uri 'none'; form-action 'none';"
        " frame-ancestors 'none'"
    )
    headers = {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return Page(body.encode(), headers)


def _read(name: str) -> str:
    return (_STATIC / name).read_text(encoding="utf-8")


def _hashes(texts: list[str]) -> str:
    digests = [hashlib.sha256(text.encode()).digest() for text in texts]
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
