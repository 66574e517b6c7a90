"""What a newcomer copies from README, the ready message and the help: that it works as printed."""

from __future__ import annotations

import codeop
import dataclasses
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

import lightserve
from lightserve.bundled import BUNDLED_MODEL_DIR
from lightserve.cli import serve as cli_serve
from lightserve.config import SECTIONS, ServeConfig
from lightserve.config.fields import flag_name
from lightserve.models.pooling import Embedding, Pooling
from lightserve.supervisor.startup import BUNDLED_PROMPT, PROMPT, ready_message
from tools.tiny_model.corpus import topics_of

ROOT = Path(lightserve.__file__).parents[1]


def _prompts(text: str) -> list[str]:
    asked = re.findall(r'"content": "([^"]+)"', text)
    return asked + re.findall(r'echo "([^"]+)" \| lightserve chat', text)


PAGES = ["README.md", "docs/install.md", "docs/api.md", "docs/access.md", "docker/README.md"]
SCRIPTS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("page", [*PAGES, *SCRIPTS])
def test_examples_ask_what_the_bundled_model_has_learnt(page: str) -> None:
    asked = _prompts((ROOT / page).read_text())
    assert len(asked) >= 2 or page != "README.md"
    assert [prompt for prompt in asked if not any(topics_of(prompt))] == []


def test_the_batch_asks_what_the_bundled_model_has_learnt() -> None:
    asked = (ROOT / "examples" / "prompts.txt").read_text().splitlines()
    assert [prompt for prompt in asked if not any(topics_of(prompt))] == []


@pytest.mark.parametrize(
    ("model", "expected"), [(str(BUNDLED_MODEL_DIR), BUNDLED_PROMPT), ("/models/qwen", PROMPT)]
)
def test_the_ready_message_asks_what_the_model_can_answer(model: str, expected: str) -> None:
    printed = ready_message(ServeConfig(model=model), 8000)
    other = PROMPT if expected is BUNDLED_PROMPT else BUNDLED_PROMPT
    assert printed.count(expected) == 2 and other not in printed


def made_of_texts(kind: Pooling) -> Embedding:
    return Embedding(kind=kind, size=8, is_whole=True, embeds_only=True)


def test_a_model_that_only_embeds_is_asked_for_vectors() -> None:
    printed = ready_message(ServeConfig(model="/models/bge"), 8000, made_of_texts(Pooling.CLS))
    assert "/v1/embeddings" in printed and "client.post('/embeddings'" in printed
    assert "chat" not in printed and printed.count(PROMPT) == 2 and printed.count("\n\n") >= 2


def test_a_model_that_only_scores_is_asked_to_rank() -> None:
    printed = ready_message(ServeConfig(model="/models/bge"), 8000, made_of_texts(Pooling.SCORE))
    assert "/v1/rerank" in printed and "client.post('/rerank'" in printed
    assert "chat" not in printed and printed.count(PROMPT) == 2


@pytest.mark.parametrize("kind", [None, Pooling.CLS, Pooling.SCORE])
def test_the_snippet_can_be_pasted_into_an_interactive_python(kind: Pooling | None) -> None:
    config = ServeConfig(model=str(BUNDLED_MODEL_DIR))
    printed = ready_message(config, 8000, None if kind is None else made_of_texts(kind))
    lines = printed[printed.index("from openai import") :].splitlines()
    pending: list[str] = []
    for line in lines:
        pending.append(line)
        # As the interpreter does: None asks for another line, a SyntaxError is shown.
        if codeop.compile_command("\n".join(pending)) is not None:
            pending.clear()
    assert pending == []


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("::1", "http://[::1]:8000"),
        ("192.0.2.7", "http://192.0.2.7:8000"),
    ],
)
def test_the_ready_message_has_an_address_to_connect_to(host: str, url: str) -> None:
    lines = ready_message(ServeConfig(host=host, insecure_no_auth=True), 8000).splitlines()
    assert lines[0] == f"lightserve: ready on {url} (model lightserve-tiny)"
    assert lines[2].startswith(f"curl -N {url}/v1/")


def test_the_help_has_every_option_in_one_section() -> None:
    text = CliRunner().invoke(cli_serve.command, ["--help"], terminal_width=1000).output
    heads = re.findall(r"^(\S.*):$", text, re.MULTILINE)
    assert heads == list(SECTIONS.values())
    # -h as well where the command has been called as part of the whole before.
    flags = re.findall(r"^  (?:-h, )?(--[a-z0-9-]+)", text, re.MULTILINE)
    fields = [flag_name(spec.name) for spec in dataclasses.fields(ServeConfig)]
    assert flags == [*fields, "--config", "--preset", "--help"]
    sizes = [part.count("\n  --") for part in re.split(r"^\S.*:$", text, flags=re.MULTILINE)[1:]]
    assert min(sizes) >= 2 and max(sizes) <= 24
