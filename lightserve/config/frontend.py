"""Options of what clients meet: the model, addresses, keys, limits of requests and connections."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lightserve.bundled import BUNDLED_MODEL_DIR
from lightserve.config.fields import option
from lightserve.errors import ConfigError
from lightserve.http_headers import is_loopback

_ORIGIN = re.compile(r"https?://([a-z0-9._-]+|\[[0-9a-f:]+\])(:[0-9]{1,5})?")

METRICS_HOST = "127.0.0.1"
"""Where metrics are served unless told otherwise."""


ANY_NAME = "*"
"""Among the names of a model: clients may use any."""


def split_names(text: str) -> tuple[str, ...]:
    """Return the names in a list that commas separate, each once."""
    names = (name.strip() for name in text.split(","))
    return tuple(dict.fromkeys(name for name in names if name))


@dataclass(frozen=True, kw_only=True)
class FrontendOptions:
    """See the module's docstring."""

    model: str = option(
        str(BUNDLED_MODEL_DIR),
        "Directory with a Hugging Face model, or a hub id. Default: the bundled small model.",
    )
    served_model_name: str = option(
        "",
        "Names clients use for the model, separated by commas; the first one is its own. With *"
        " among them any name is accepted. Default: the last part of --model.",
    )
    model_sha256: str = option(
        "",
        "JSON file of SHA-256 digests, by name of file in the model directory: checked before the"
        " server listens. Every file of weights must be in it.",
    )
    generation_config: str = option(
        "auto",
        "Sampling where a request says nothing: what the model's generation_config.json"
        " recommends (auto), or temperature 1 and no truncation (none).",
        choices=("auto", "none"),
    )
    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(8000, "Port to listen on; 0 takes a free one.", low=0, high=65535)
    http_workers: int = option(
        0,
        "Number of frontend processes, or auto: one for each four cores, at most 8.",
        low=0,
        high=64,
        zero_word="auto",
    )
    api_key_file: str = option(
        "",
        "File of API keys, a line each: NAME, then a key or sha256:DIGEST, then perhaps admin."
        " SIGHUP reads it again.",
    )
    insecure_no_auth: bool = option(
        False, "Serve without API keys even on an address that other machines reach."
    )
    allowed_hosts: str = option(
        "",
        "Names, separated by commas, that the Host header may have besides loopback ones while"
        " there are no API keys.",
    )
    allowed_origins: str = option(
        "",
        "Origins, separated by commas, whose web pages may use the server (CORS), such as"
        " https://chat.example; * is any, which needs API keys.",
    )
    ssl_certfile: str = option("", "PEM file of a certificate chain: serves https.")
    ssl_keyfile: str = option(
        "", "PEM file of its key. Default: the key is in --ssl-certfile as well."
    )
    enable_docs: bool = option(False, "Show the API's description as a page at /docs.")
    max_body_bytes: int = option(4_194_304, "Largest body of a request.", low=1024)
    max_held_body_bytes: int = option(
        268_435_456,
        "Bytes of the bodies of all requests that one frontend has in flight; more get a 429.",
        low=1,
    )
    max_json_depth: int = option(
        64, "Most objects and lists inside each other in a body.", low=4, high=256
    )
    max_header_bytes: int = option(
        65536, "Largest head of a request: its line and headers.", low=1024
    )
    max_headers: int = option(100, "Most headers of a request.", low=8)
    header_timeout_s: float = option(
        10.0, "Time for the head of a request to arrive; connections that miss it end.", low=0.1
    )
    body_timeout_s: float = option(120.0, "Time for a body to arrive.", low=0.1)
    min_body_bytes_per_s: int = option(
        1024, "Least rate of a body, over each 10 seconds in which it arrives.", low=1
    )
    max_pending_body_bytes: int = option(
        67_108_864,
        "All bodies together that are arriving at a frontend; beyond it the client with the most"
        " in sum loses the one that has not come on for longest.",
        low=1024,
    )
    max_kept_answer_bytes: int = option(
        268_435_456,
        "Memory of a frontend for answers that are not streamed, until they are read, and for what"
        " the readers of streams are behind; beyond it the client with the most in sum loses the"
        " one that has not come on for longest.",
        low=1_048_576,
    )
    max_connections: int = option(
        8192, "Open connections per frontend; a new one then ends the longest idle one.", low=1
    )
    max_connections_per_ip: int = option(
        4096, "Open connections of one client address per frontend; more are refused.", low=1
    )
    sse_keepalive_s: float = option(
        15.0, "A stream that has had nothing to say for this time sends a comment.", low=0.05
    )
    max_completions: int = option(
        128, "Most completions of one request, prompts times n.", low=1, high=4096
    )
    max_answer_items: int = option(
        2_000_000,
        "Most tokens and log-probabilities of one answer: prompts times n times max_tokens times"
        " (1 + log-probabilities), and what it says of the prompts.",
        low=1,
    )
    metrics_host: str = option(
        METRICS_HOST,
        "Address on which metrics are served; one that other machines reach wants the key of an"
        " operator.",
    )
    metrics_port: int = option(
        8001, "Port of GET /metrics; 0 takes a free one, -1 opens none.", low=-1, high=65535
    )

    @property
    def is_loopback(self) -> bool:
        """Whether `host` can be reached from this machine only."""
        return is_loopback(self.host)

    @property
    def metrics_need_key(self) -> bool:
        """Whether the metrics port wants an operator's key: where other machines reach it."""
        return bool(self.api_key_file) and not is_loopback(self.metrics_host)

    @property
    def origins(self) -> frozenset[str]:
        """What `allowed_origins` names."""
        return frozenset(split_names(self.allowed_origins))

    def check_access(self) -> None:
        """Refuse an open door, and options that would have no effect."""
        for flag, names in (
            ("--served-model-name", self.served_model_name),
            ("--allowed-hosts", self.allowed_hosts),
            ("--allowed-origins", self.allowed_origins),
        ):
            if names and not split_names(names):
                raise ConfigError(f"{flag} must have at least one name, got {names!r}")
        if self.api_key_file and self.insecure_no_auth:
            raise ConfigError("--insecure-no-auth contradicts --api-key-file")
        if not (self.is_loopback or self.api_key_file or self.insecure_no_auth):
            raise ConfigError(
                f"--host {self.host!r} can be reached from other machines: give --api-key-file,"
                " or --insecure-no-auth to serve every client"
            )
        if self.metrics_port >= 0 and not (
            is_loopback(self.metrics_host) or self.api_key_file or self.insecure_no_auth
        ):
            raise ConfigError(
                f"--metrics-host {self.metrics_host!r} can be reached from other machines: give"
                " --api-key-file, or --insecure-no-auth to serve every client"
            )
        if self.allowed_hosts and (self.api_key_file or not self.is_loopback):
            raise ConfigError("--allowed-hosts needs a loopback --host and no --api-key-file")
        for origin in sorted(self.origins - {"*"}):
            if _ORIGIN.fullmatch(origin) is None:
                raise ConfigError(
                    "--allowed-origins must have origins such as https://chat.example or"
                    f" http://localhost:3000, in small letters and without a path, got {origin!r}"
                )
        if "*" in self.origins and not self.api_key_file:
            raise ConfigError("--allowed-origins '*' needs --api-key-file")
        if self.max_pending_body_bytes < self.max_body_bytes:
            raise ConfigError(
                f"--max-pending-body-bytes must be at least --max-body-bytes,"
                f" {self.max_body_bytes}, got {self.max_pending_body_bytes}"
            )
        if self.ssl_keyfile and not self.ssl_certfile:
            raise ConfigError("--ssl-keyfile needs --ssl-certfile")
        if self.metrics_port == -1 and self.metrics_host != METRICS_HOST:
            raise ConfigError(f"--metrics-host {self.metrics_host!r} needs --metrics-port, not -1")
