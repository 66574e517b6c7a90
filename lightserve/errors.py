"""The exception tree: everything lightserve raises on purpose.

    LightserveError
    ├── InvalidRequest     a client's mistake: becomes a 4xx in OpenAI's error shape
    ├── ConfigError        an operator's mistake: exit code 2 and one line on stderr
    ├── ModelLoadError     model files that cannot be served: exit code 1 and one line
    ├── StartupError       anything else that keeps the server from starting: exit code 1
    ├── DeviceError        a worker's GPU failed in a step: the group of workers is replaced
    ├── GrammarError       a schema, pattern or grammar that cannot be enforced
    ├── ChatError          `lightserve chat` got no answer: exit code 1 and one line
    ├── LoadTestError      `lightserve bench` got no server or no file: exit code 1 and one line
    ├── DecisionLogError   a decision log that cannot be read or was changed: exit code 1, one line
    ├── BatchError         `lightserve batch` got no answer: exit code 1 and one line
    ├── StoreError         the batch store cannot be read or written: 503, or 507 if it is full
    ├── ProtocolError      a peer process sent what this version does not understand
    │   └── FrameTooLarge  a message that no peer would accept
    └── ChannelFull        a bounded queue to a peer is full

`assert` is kept for invariants; internal text never reaches a client.
"""

from __future__ import annotations

from pathlib import Path

MAX_FILE_BYTES = 1024 * 1024
"""Most bytes of a text file that an option names."""


class LightserveError(Exception):
    """Base of every exception that lightserve raises on purpose."""


class InvalidRequest(LightserveError):
    """A request that a client must change before sending it again.

    `message` states the limit and the given value; `param` names the field (None: the body as a
    whole); `code` is a short machine-readable word; `status` is the HTTP status; `retry_after_s`,
    with 429, is when the same request may be taken.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str = "invalid_value",
        status: int = 400,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.message = message
        self.param = param
        self.code = code
        self.status = status


class ConfigError(LightserveError):
    """A flag or configuration value outside its limits; the text names flag, limit and value."""


class ModelLoadError(LightserveError):
    """Model files that cannot be served; the text names the file and, if any, the key."""


class StartupError(LightserveError):
    """A start-up failure outside configuration and model files, such as a port in use."""


class StoreUnusable(StartupError):
    """A batch store that this server cannot have; `reason` says why, without saying where it is."""

    def __init__(self, place: object, reason: object) -> None:
        super().__init__(f"--batch-store {place}: {reason}")
        self.reason = str(reason)


class DeviceError(LightserveError):
    """A step that failed on its GPU, whose state is lost with it; the text says what CUDA said."""


class DecisionLogError(LightserveError):
    """A decision log that cannot be read, or is not as it was written."""


class ChatError(LightserveError):
    """A server that cannot be reached, refused, or broke an answer off; the text is for people."""


class LoadTestError(LightserveError):
    """A server that cannot be loaded, or a result file of a load test that cannot be used."""


class BatchError(LightserveError):
    """A server that cannot be reached, or refused; the text is for people."""


class StoreError(LightserveError):
    """A batch store that cannot be read or written; `is_full`: for want of space."""

    def __init__(self, message: str, *, is_full: bool = False) -> None:
        super().__init__(message)
        self.is_full = is_full


class GrammarError(LightserveError):
    """A schema, pattern or grammar that cannot be enforced; the text says why, for its author."""


class ProtocolError(LightserveError):
    """A message with an unknown tag, a wrong type or another protocol version."""


class FrameTooLarge(ProtocolError):
    """A message that is larger than any peer accepts; it was not sent."""

    def __init__(self, name: str, num_bytes: int, max_bytes: int) -> None:
        super().__init__(f"{name} of {num_bytes} bytes exceeds {max_bytes}")
        self.num_bytes = num_bytes
        self.max_bytes = max_bytes


class ChannelFull(LightserveError):
    """The bounded queue to a peer is full; the message was not sent."""


def read_named_file(flag: str, path: Path) -> str:
    """Return the text of a file that an option names.

    Raises:
        ConfigError: it cannot be read, is a directory or a pipe, is too large, or not in UTF-8;
            the text names the option and the file, and has nothing of what is in it.
    """
    try:
        if not path.is_file():  # opening a pipe would wait for its other end
            what = "must be a file, not a directory or a pipe" if path.exists() else "no such file"
            raise ConfigError(f"{flag} {path}: {what}")
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ConfigError(f"{flag} {path}: larger than {MAX_FILE_BYTES} bytes")
        return data.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag} {path}: not valid UTF-8") from error
