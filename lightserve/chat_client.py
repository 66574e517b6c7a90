"""Streamed chat completions over HTTP: what `lightserve chat` asks a server.

Needs nothing of lightserve's own API: models and chat completions as OpenAI describes them.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from lightserve.errors import ChatError

MAX_ERROR_CHARS = 500


@dataclass(frozen=True)
class Piece:
    """A part of an answer as it arrives; reasoning is what models think before they answer."""

    text: str = ""
    reasoning: str = ""


class ChatClient:
    """One server, by its address with or without /v1."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str = "",
        timeout_s: float = 600.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        base = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            self._http = httpx.Client(
                base_url=f"{base}/v1",
                headers=headers,
                timeout=httpx.Timeout(timeout_s, connect=10.0),
                transport=transport,
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise ChatError(f"--url {url!r}: {error}") from error

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def models(self) -> list[str]:
        """Return the names of the models that the server has.

        Raises:
            ChatError: no answer, or not a list of models.
        """
        try:
            response = self._http.get("/models")
            if response.is_error:
                raise ChatError(refusal_text(response))
            names = [str(model["id"]) for model in response.json()["data"]]
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ChatError(unreachable_text(self._http.base_url, error)) from error
        except (ValueError, KeyError, TypeError) as error:
            raise ChatError("GET /models gave no list of models: is this an LLM server?") from error
        if not names:
            raise ChatError("the server has no model")
        return names

    def stream(
        self, model: str, messages: Sequence[dict[str, str]], options: dict[str, Any]
    ) -> Generator[Piece, None, None]:
        """Ask for an answer and yield it as it arrives; closing the generator ends the request.

        Raises:
            ChatError: the server cannot be reached, refused, or ended before the answer did.
        """
        body = {"model": model, "messages": list(messages), "stream": True, **options}
        try:
            with self._http.stream("POST", "/chat/completions", json=body) as response:
                if response.is_error:
                    response.read()
                    raise ChatError(refusal_text(response))
                yield from _pieces(response.iter_lines())
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ChatError(unreachable_text(self._http.base_url, error)) from error


def _pieces(lines: Iterator[str]) -> Iterator[Piece]:
    """Parse server-sent events; comments and fields other than data mean nothing."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
            if error := event.get("error"):
                raise ChatError(f"the server broke off: {_message(error)}")
            for choice in event.get("choices") or ():
                delta = choice.get("delta") or {}
                piece = Piece(delta.get("content") or "", delta.get("reasoning_content") or "")
                if piece != Piece():
                    yield piece
        except (ValueError, AttributeError, TypeError) as error:
            raise ChatError("the server sent an event that is no chat completion") from error
    raise ChatError("the answer ended without [DONE]: the connection broke")


def refusal_text(response: httpx.Response) -> str:
    """Return an error response in words: OpenAI's shape, else the beginning of its text."""
    try:
        text = _message(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        text = " ".join(response.text.split())[:MAX_ERROR_CHARS]
    if response.status_code == 401:
        text = f"{text} (--api-key-file or --api-key-env names where yours is)".lstrip()
    return f"HTTP {response.status_code}: {text}" if text else f"HTTP {response.status_code}"


def _message(error: object) -> str:
    text = error.get("message") if isinstance(error, dict) else error
    return str(text)[:MAX_ERROR_CHARS]


def unreachable_text(url: httpx.URL, error: Exception) -> str:
    """Return in words why a server did not answer."""
    return f"{url}: {str(error) or type(error).__name__}"
