"""What is settled before any process is started: the port, the model's files."""

from __future__ import annotations

import dataclasses
import re
import socket
import threading
from pathlib import Path

from lightserve.config import ServeConfig
from lightserve.config.frontend import ANY_NAME
from lightserve.cost.profile import read_profile
from lightserve.errors import ConfigError, ModelLoadError, StartupError
from lightserve.logs import one_line
from lightserve.models.config import check_tp, load_model_config, resolve_context_len
from lightserve.models.weight_files import check_digests, check_weights
from lightserve.supervisor.specs import num_frontends

_TOKENIZER_FILE = "tokenizer.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja"]
_HUB_DUPLICATES = ["consolidated*", "original/*"]
"""The same weights once more, in the format of the model's makers."""
_BACKLOG = 2048
_OWN_THREADS = 8
_CHILD_THREADS = 16
"""Each process has about 10 at the start, and some for parsing, tokenising and compiling later."""


def bind_port(config: ServeConfig) -> socket.socket:
    """Take the port without listening yet, so that clients are refused until it makes sense.

    Raises:
        StartupError: naming host and port.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _port_error(config, error) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _port_error(config, error) from error
    return listener


def check_threads(config: ServeConfig) -> None:
    """Check that there can be as many threads as the processes need.

    Tried, as limits are of users, of containers and of the machine; a process that meets one later
    ends in the middle of some library.

    Raises:
        StartupError: there cannot.
    """
    num_needed = _OWN_THREADS + _CHILD_THREADS * (1 + num_frontends(config) + config.tp)
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
            f" {len(threads)}, at least {num_needed} are needed"
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
        ModelLoadError: there is no such directory.
        StartupError: a hub id that cannot be fetched.
    """
    path = Path(config.model).expanduser()
    if not path.is_dir():
        if path.exists() or _HUB_ID.fullmatch(config.model) is None:
            raise ModelLoadError(f"--model: {config.model!r} is no directory and no hub id")
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
    model = load_model_config(path)
    resolve_context_len(config.max_model_len, model)
    if config.chat_template:
        _check_chat_template(Path(config.chat_template))
    if config.profile not in ("auto", "off"):
        _check_profile(Path(config.profile))
    check_tp(model, config.tp)
    files = check_weights(path, model)
    if config.model_sha256:
        if not Path(config.model_sha256).is_file():
            raise ConfigError(f"--model-sha256 {config.model_sha256}: no such file")
        check_digests(path, files, Path(config.model_sha256))
    if not (path / _TOKENIZER_FILE).is_file():
        raise ModelLoadError(f"{path / _TOKENIZER_FILE}: no such file")


def _check_chat_template(path: Path) -> None:
    """Check that there is text; what it says is left to the frontends, as the tokeniser's."""
    try:
        if not path.is_file():
            raise ConfigError(f"--chat-template {path}: no such file")
        path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--chat-template {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--chat-template {path}: not valid UTF-8") from error


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
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - slow, and rarely needed

    try:
        return Path(
            snapshot_download(
                hub_id,
                allow_patterns=_HUB_PATTERNS,
                ignore_patterns=_HUB_DUPLICATES,
                max_workers=4,
            )
        )
    except Exception as error:  # a dozen types of three libraries
        raise StartupError(
            f"--model: {hub_id!r} is no directory, and the hub did not give it: {one_line(error)}"
        ) from error


def _port_error(config: ServeConfig, error: OSError) -> StartupError:
    return StartupError(
        f"cannot listen on {config.host} port {config.port}: {error.strerror or error}"
        " (--port takes another, or 0 for a free one)"
    )
