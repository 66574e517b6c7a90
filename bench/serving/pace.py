"""Streams beside long prompts on servers, one after the other: `python -m bench.serving.pace`.

lightserve with `--pace-ms 0` and by default, and of vLLM and llama.cpp those whose binary is given,
each with the machine to itself. Streams decode for some seconds; then prompts come at once, each
for one token, none of them with a target. Printed are, of each mix, the slowest stream's tokens per
second before and until the last prompt has its token, the gaps of all streams in that time, and
when the prompts were done. The bar: each stream keeps half of its pace, or thirty tokens a second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
from tokenizers import Tokenizer

from bench.scheduling.h200 import Kept, kept_of
from bench.serving.mixed import llama, vllm, wait_for_profile
from bench.serving.server import load_average, running_server, write_random_model
from bench.table import print_head, print_row

MAX_LEN = 8192
MIXES = ("1,2,7000", "1,1,1000", "4,2,3000", "8,4,7000", "12,2,7000")
SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": MAX_LEN}
STREAM_TOKENS = 4000


class Mix(NamedTuple):
    """Streams, and prompts of so many tokens that come while they run."""

    num_streams: int
    num_prompts: int
    prompt_tokens: int


class Texts:
    """Prompts of so many tokens, no two of which begin alike."""

    def __init__(self, model: Path, seed: int) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        vocab = self._tokenizer.get_vocab()
        self._words = sorted(
            piece[1:] for piece in vocab if piece[:1] == "Ġ" and piece[1:].islower()
        )
        self._rng = np.random.default_rng(seed)

    def of(self, num_tokens: int) -> str:
        """Return a text of so many tokens, or nearly so."""
        words = self._rng.choice(self._words, 2 * num_tokens)
        ids = self._tokenizer.encode(" ".join(words), add_special_tokens=False).ids
        return self._tokenizer.decode(ids[:num_tokens])


class Client:
    """Sends to one server."""

    def __init__(self, url: str, texts: Texts) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=600.0)
        self._texts = texts
        self._model = ""

    async def play(self, mix: Mix, alone_s: float) -> Kept:
        """Run a mix."""
        models = (await self._http.get("/v1/models")).json()
        self._model = models["data"][0]["id"]
        times: list[list[float]] = [[] for _ in range(mix.num_streams)]
        streams = [asyncio.create_task(self._stream(each)) for each in times]
        while not all(times):
            await asyncio.sleep(0.01)
            for task in streams:
                if task.done():
                    task.result()
        await asyncio.sleep(alone_s)
        start_s = time.perf_counter()
        prompts = [self._prompt(self._texts.of(mix.prompt_tokens)) for _ in range(mix.num_prompts)]
        await asyncio.gather(*prompts)
        end_s = time.perf_counter()
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        arrays = [np.array(each) for each in times]
        before = [np.sum((each >= start_s - alone_s) & (each < start_s)) for each in arrays]
        return kept_of(arrays, float(min(before)) / alone_s, start_s, end_s)

    async def _stream(self, times: list[float]) -> None:
        body = self._body(self._texts.of(64), STREAM_TOKENS) | {"stream": True, "ignore_eos": True}
        async with self._http.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                    times.append(time.perf_counter())

    async def _prompt(self, text: str) -> None:
        answer = await self._http.post("/v1/completions", json=self._body(text, 1))
        answer.raise_for_status()

    def _body(self, text: str, max_tokens: int) -> dict[str, Any]:
        return {"model": self._model, "prompt": text, "max_tokens": max_tokens, "temperature": 0}

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()


@contextmanager
def lightserve(model: str, log: Path, *flags: str) -> Iterator[str]:
    """Start lightserve, its step times measured."""
    with log.open("w") as file, running_server(["--model", model, *flags], log=file) as server:
        wait_for_profile(log)
        yield server.url


Start = Callable[[Path], AbstractContextManager[str]]


def servers(args: argparse.Namespace, model: str) -> dict[str, Start]:
    """Return how each server is started, by name, with a file for its log."""

    @contextmanager
    def peer(start: Callable[..., Any], binary: str, weights: str, log: Path) -> Iterator[str]:
        with log.open("w") as file, start(binary, weights, file, max_len=MAX_LEN) as url:
            yield url

    found: dict[str, Start] = {
        "lightserve, --pace-ms 0": lambda log: lightserve(model, log, "--pace-ms", "0"),
        "lightserve": lambda log: lightserve(model, log),
    }
    if args.vllm:
        found["vLLM"] = lambda log: peer(vllm, args.vllm, model, log)
    if args.llama:
        found["llama.cpp"] = lambda log: peer(llama, args.llama, args.gguf, log)
    return found


async def run(url: str, mixes: list[Mix], texts: Texts, alone_s: float) -> list[Kept]:
    """Run all mixes on a server, after a first one that does not count."""
    client = Client(url, texts)
    await client.play(Mix(1, 1, 200), 0.5)
    kept = [await client.play(mix, alone_s) for mix in mixes]
    await client.close()
    return kept


def main() -> None:
    """Print a row per server and mix."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="a directory; without one a Llama of 8 layers is made")
    parser.add_argument("--vllm", help="its command, such as /opt/vllm/bin/vllm")
    parser.add_argument("--llama", help="llama.cpp's llama-server")
    parser.add_argument("--gguf", help="the same model for llama.cpp")
    parser.add_argument("--mixes", nargs="+", default=MIXES, help="STREAMS,PROMPTS,TOKENS each")
    parser.add_argument("--alone-s", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    if (args.llama is None) != (args.gguf is None):
        parser.error("--llama and --gguf go together")
    mixes = [Mix(*map(int, mix.split(","))) for mix in args.mixes]
    with tempfile.TemporaryDirectory(prefix="lightserve-pace-") as directory:
        model = Path(args.model or Path(directory) / "model")
        if args.model is None:
            write_random_model(model, **SIZES, **HEADS)
        print(f"{time.strftime('%Y-%m-%d %H:%M')}, load average {load_average()}\n")
        heads = ("alone, tokens/s", "beside", "kept", "gaps p50, p99, most (ms)", "prompts (s)")
        print_head("server", "streams", "prompts", *heads)
        for number in range(args.rounds):
            for name, start in servers(args, str(model)).items():
                with start(Path(directory) / "server.log") as url:
                    texts = Texts(model, number)
                    found = asyncio.run(run(url, mixes, texts, args.alone_s))
                for mix, kept in zip(mixes, found, strict=True):
                    show(name, mix, kept)


def show(name: str, mix: Mix, kept: Kept) -> None:
    """Print a row."""
    print_row(
        name,
        mix.num_streams,
        f"{mix.num_prompts} of {mix.prompt_tokens:,}",
        f"{kept.alone_per_s:.1f}",
        f"{kept.beside_per_s:.1f}",
        "yes" if kept.keeps else "no",
        ", ".join(f"{gap:.0f}" for gap in kept.gaps_ms),
        f"{kept.prompts_s:.1f}",
    )


if __name__ == "__main__":
    main()
