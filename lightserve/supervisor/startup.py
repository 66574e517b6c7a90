"""Work before any process is started: the port, the model's files, the batch store."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import re
import shlex
import socket
import sys
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightserve.batches.access import is_unused, location_of, prepare
from lightserve.bundled import BUNDLED_MODEL_DIR
from lightserve.config import ServeConfig
from lightserve.config.options import ANY_NAME
from lightserve.cost.profile import read_profile
from lightserve.errors import (
    ConfigError,
    ModelLoadError,
    StartupError,
    StoreUnusable,
    read_named_file,
)
from lightserve.logs import LineWriter, one_line
from lightserve.models.config import check_tp, load_model_config, resolve_context_len
from lightserve.models.gguf_model import unpack
from lightserve.models.pooling import Embedding, load_embedding
from lightserve.models.weight_files import check_digests, check_weights
from lightserve.supervisor.spawn import num_frontends
from lightserve.tokenization.description import find_tokenizer

log = logging.getLogger(__name__)

# What `lightserve serve` prints when it is ready: commands that work as printed.

READY_PREFIX = "lightserve: ready on "

BUNDLED_PROMPT = "Tell me a story about Mira and the brass lantern."
PROMPT = "Write two sentences about the sea."
"""For models that know more than the bundled one's world."""
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Clients do not connect to an address that stands for all of the machine's, but to one of them."""


def print_banner(config: ServeConfig, port: int) -> None:
    """Print URL, curl line and OpenAI-client snippet to standard output; never waits."""
    model = Path(config.model)
    embedding = load_embedding(model, load_model_config(model), config.pooling)
    LineWriter(sys.stdout.fileno()).write(ready_message(config, port, embedding))


def ready_message(config: ServeConfig, port: int, embedding: Embedding | None = None) -> str:
    """Return what is printed: the greeting of this server; `embedding`: of its model."""
    greeting = banner
    if embedding is not None and embedding.embeds_only:
        greeting = functools.partial(texts_banner, embedding)
    is_bundled = Path(config.model) == BUNDLED_MODEL_DIR
    return greeting(
        config.model_name,
        base_url(config.host, port, scheme="https" if config.ssl_certfile else "http"),
        prompt=BUNDLED_PROMPT if is_bundled else PROMPT,
        needs_key=bool(config.api_key_file),
    )


def base_url(host: str, port: int, *, scheme: str = "http") -> str:
    """Return a URL of a server that listens on `host`, for clients on this machine."""
    host = _LOOPBACK.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def banner(model_name: str, url: str, *, prompt: str, needs_key: bool = False) -> str:
    """Return the greeting: a line for programs, then commands for people, which ask `prompt`.

    The snippet can be pasted into an interactive Python, where an empty line ends a loop.

    With `needs_key` the commands take the key from the environment variable OPENAI_API_KEY.
    """
    body = {
        "model": model_name,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 300,
        "stream": True,
    }
    snippet = f"""\
stream = client.chat.completions.create(
    model={model_name!r},
    messages=[{{"role": "user", "content": {prompt!r}}}],
    max_tokens=300,
    stream=True,
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)

print()"""
    return _greeting(model_name, url, "/v1/chat/completions", body, snippet, needs_key=needs_key)


def texts_banner(
    embedding: Embedding, model_name: str, url: str, *, prompt: str, needs_key: bool = False
) -> str:
    """Return the greeting of a model that makes vectors of texts, or scores, and nothing else."""
    path = "/embeddings"
    fields: dict[str, Any] = {"input": prompt}
    if embedding.scores:
        path, fields = "/rerank", {"query": prompt, "documents": ["By the sea.", "Yes, it can."]}
    body = {"model": model_name, **fields}
    snippet = f"print(client.post({path!r}, body={body!r}, cast_to=object))"
    return _greeting(model_name, url, f"/v1{path}", body, snippet, needs_key=needs_key)


def _greeting(
    model_name: str, url: str, path: str, body: dict[str, Any], snippet: str, *, needs_key: bool
) -> str:
    """Return a greeting: `snippet` goes on from an OpenAI client."""
    key_header = ' -H "Authorization: Bearer $OPENAI_API_KEY"' if needs_key else ""
    key_argument = "" if needs_key else ', api_key="none"'
    curl = (
        f"curl -N {url}{path} -H 'Content-Type: application/json'{key_header}"
        f" -d {shlex.quote(json.dumps(body))}"
    )
    client = f"""\
from openai import OpenAI

client = OpenAI(base_url={url + "/v1"!r}{key_argument})
"""
    return f"{READY_PREFIX}{url} (model {model_name})\n\n{curl}\n\n{client}{snippet}\n"


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.tiktoken"]
_HUB_DUPLICATES = ["consolidated*", "original/*"]
"""Files with the weights once more, in the format of the model's makers."""
_BACKLOG = 2048
_OWN_THREADS = 8
_CHILD_THREADS = 16
"""Each process has about 10 at the start, and some for parsing, tokenising and compiling later."""


def bind_port(host: str, port: int) -> socket.socket:
    """Take the port without listening yet, so that clients are refused until it makes sense.

    Raises:
        OSError: it cannot be had; UnicodeError: `host` is no name.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        if port:  # one that the system chooses could be another's that does not listen yet
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


def bind_http_port(config: ServeConfig) -> socket.socket:
    """Take the port of the API. Raises StartupError, naming flag and value."""
    try:
        return bind_port(config.host, config.port)
    except (OSError, UnicodeError) as error:
        raise _port_error(config, error) from error


def check_threads(config: ServeConfig) -> None:
    """Check that there can be as many threads as the processes need.

    Tried, as limits are of users, of containers and of the machine; a process that meets one later
    ends in the middle of some library.

    Raises:
        StartupError: there cannot.
    """
    num_needed = _OWN_THREADS + _CHILD_THREADS * (
        1 + num_frontends(config) + (config.batch_store != "none") + len(config.local_ranks)
    )
    may_end = threading.Event()
    threads: list[threading.Thread] = []
    try:
        for _ in range(num_needed):
            thread = threading.Thread(target=may_end.wait, daemon=True)
            thread.start()
            threads.append(thread)
    except RuntimeError as error:
        raise StartupError(
            f"the limit of processes and threads (ulimit -u, or pids of the container) leaves"
            f" {len(threads)}, but {num_needed} are needed"
        ) from error
    finally:
        may_end.set()
        for thread in threads:
            thread.join()


def listen(listener: socket.socket, config: ServeConfig) -> None:
    """Start listening. Raises StartupError when another server was faster."""
    try:
        listener.listen(_BACKLOG)
    except OSError as error:
        raise _port_error(config, error) from error


def resolve_model(config: ServeConfig) -> ServeConfig:
    """Return the configuration with `model` a local directory and the served name kept.

    Raises:
        ModelLoadError: there is no such directory, or a GGUF file cannot be served.
        StartupError: a hub id that cannot be fetched.
    """
    path = Path(config.model).expanduser()
    if path.is_file():  # by its content, as programs name theirs by digests, too
        path = unpack(path)
    if not path.is_dir():
        if path.exists() or _HUB_ID.fullmatch(config.model) is None:
            raise ModelLoadError(
                f"--model: {config.model!r} is no directory and no hub id (lightserve models lists"
                " what is here)"
            )
        path = _fetch(config.model)
    names = [*config.model_names, *([ANY_NAME] if config.takes_any_model_name else [])]
    return dataclasses.replace(config, model=str(path.resolve()), served_model_name=",".join(names))


def check_model(config: ServeConfig) -> None:
    """Check the files of a resolved model without torch; quickly, but with --model-sha256.

    The tokeniser's contents are left to the frontends: a large one takes seconds and more
    memory than the whole supervisor.

    Raises:
        ModelLoadError: naming file and key.
        ConfigError: --max-model-len is above the model's, --chat-template, --model-sha256 or
            --profile cannot be read.
    """
    path = Path(config.model)
    model = load_model_config(path, has_draft_head=config.has_draft_head)
    resolve_context_len(config.max_model_len, model)
    embedding = load_embedding(path, model, config.pooling)
    if config.speculation != "off" and embedding is not None and embedding.embeds_only:
        name = model.architecture.value
        raise ConfigError(f"--speculation {config.speculation}: {name} writes no tokens")
    if model.encoder is not None and config.kv_dtype != "auto":
        raise ConfigError(f"--kv-dtype {config.kv_dtype}: {model.architecture.value} keeps no KV")
    if config.chat_template:
        read_named_file("--chat-template", Path(config.chat_template))
    if config.profile not in ("auto", "off"):
        _check_profile(Path(config.profile))
    check_tp(model, config.tp)
    files = check_weights(path, model)
    if config.model_sha256:
        if not Path(config.model_sha256).is_file():
            raise ConfigError(f"--model-sha256 {config.model_sha256}: no such file")
        check_digests(path, files, Path(config.model_sha256))
    find_tokenizer(path)


@dataclass(frozen=True)
class TakenStore:
    """The batch store of a server that starts."""

    problem: str = ""
    """Why it cannot be used; empty: it can, or the server was told to keep none."""
    is_needed: bool = False
    """Whether the batches process has to be there from the start."""


def take_store(config: ServeConfig, held: ExitStack) -> TakenStore:
    """Take the batch store for this server until `held` is closed.

    The directory that --batch-store auto stands for is no reason not to serve.

    Raises:
        StartupError: --batch-store names one that cannot be used.
    """
    try:
        if not (location := location_of(config)):
            return TakenStore()
        held.enter_context(prepare(location, config.file_store))
        return TakenStore(is_needed=config.names_store or not is_unused(location))
    except StoreUnusable as error:
        if config.names_store:
            raise
        log.info("files and batches cannot be kept: %s", one_line(error))
        return TakenStore(problem=error.reason)


def _check_profile(path: Path) -> None:
    """Check that it is a profile; whether it is this server's is left to the workers."""
    if not path.is_file():
        raise ConfigError(f"--profile {path}: no such file")
    try:
        read_profile(path)
    except OSError as error:
        raise ConfigError(f"--profile {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"--profile {path} is no profile: {error}") from error


def _fetch(hub_id: str) -> Path:
    """Return a repository of the hub as a directory. Raises StartupError, in one line."""
    from huggingface_hub import constants, errors, snapshot_download  # noqa: PLC0415 - slow

    try:
        return Path(
            snapshot_download(
                hub_id, allow_patterns=_HUB_PATTERNS, ignore_patterns=_HUB_DUPLICATES, max_workers=4
            )
        )
    except errors.GatedRepoError:
        why = "the hub gives it only to those who have accepted its terms there (HF_TOKEN)"
    except errors.RepositoryNotFoundError:
        why = "the hub has no such repository, or a private one (HF_TOKEN)"
    except errors.LocalEntryNotFoundError as error:
        first = str(error).splitlines()[0].removeprefix("Got: ")
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else first
        why = f"it is not in {constants.HF_HUB_CACHE}, and the hub cannot be reached: {reason}"
    except Exception as error:  # a dozen types of three libraries
        why = f"the hub did not give it: {one_line(error)}"
    raise StartupError(
        f"--model {hub_id}: no such directory, and {why} (lightserve models lists what is here)"
    )


def _port_error(config: ServeConfig, error: OSError | UnicodeError) -> StartupError:
    reason = error.strerror if isinstance(error, OSError) else None
    return StartupError(
        f"cannot listen on {config.host} port {config.port}: {reason or error}"
        " (--port takes another, or 0 for a free one)"
    )
