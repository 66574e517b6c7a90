"""Access to an HTTP server: API keys, headers that name the caller, TLS.

API keys: a text file of names and keys; in memory, names and digests only.

A line of the file is `NAME KEY`, or `NAME sha256:DIGEST` so that the file itself gives no key
away, and perhaps `admin`, `gateway` and quotas: `rpm=60 tpm=100000 batch_lines=5000`. Empty lines
and lines that begin with `#` mean nothing. The supervisor reads the file and hands the digests to
the frontends, which see no key but those that clients send.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import ssl
from collections.abc import Sequence, Set
from pathlib import Path

import msgspec

from lightserve.errors import ConfigError, read_named_file

MIN_KEY_CHARS = 16
MAX_KEYS = 1024
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_KEY = re.compile(r"[\x21-\x7e]{1,512}")
_DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")
_WORDS = "admin, gateway, rpm=N, tpm=N and batch_lines=N, each once"
_QUOTA = re.compile(r"(rpm|tpm|batch_lines)=(-?[0-9]{1,12})")


class Quota(msgspec.Struct, frozen=True):
    """Limits of a key; 0: no limit of its own."""

    rpm: int = 0
    """Requests per minute."""
    tpm: int = 0
    """Tokens per minute, of prompts and of answers."""
    batch_lines: int = 0
    """Lines of batches in progress that have no result yet, and responses in the background."""


NO_QUOTA = Quota()
MAX_QUOTA = 1_000_000_000


class ApiKey(msgspec.Struct, frozen=True):
    """One key. Several may have the same name while one replaces the other."""

    name: str
    """Name in logs."""
    digest: bytes
    """SHA-256 of the key's bytes."""
    is_admin: bool = False
    """Whether it also opens the routes for operators."""
    is_gateway: bool = False
    """Whether its requests may say whose they are: clients behind it share what it has."""
    quota: Quota = NO_QUOTA


def digest_of(key: bytes) -> bytes:
    """Return what is kept of a key."""
    return hashlib.sha256(key).digest()


def find_key(keys: Sequence[ApiKey], given: bytes) -> ApiKey | None:
    """Return the key that `given` is, in a time that does not depend on which one or how nearly."""
    digest = digest_of(given)
    found = None
    for key in keys:
        if hmac.compare_digest(key.digest, digest):
            found = key
    return found


def read_api_keys(path: Path) -> list[ApiKey]:
    """Read a file of keys.

    Raises:
        ConfigError: it cannot be read, holds no key, or a line is wrong; the text has the line's
            number and never its words, as one of them may be a key.
    """
    lines = read_named_file("--api-key-file", path).splitlines()
    keys = [
        _parse(line, f"--api-key-file {path}, line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not 1 <= len(keys) <= MAX_KEYS:
        raise ConfigError(f"--api-key-file {path}: must have 1 to {MAX_KEYS} keys, got {len(keys)}")
    if len({key.digest for key in keys}) < len(keys):
        raise ConfigError(f"--api-key-file {path}: holds the same key twice")
    return keys


def _parse(line: str, where: str) -> ApiKey:
    name, *words = line.split()
    if _NAME.fullmatch(name) is None:
        raise ConfigError(f"{where}: the name must be 1 to 64 letters, digits and . _ @ -")
    if not words:
        raise ConfigError(f"{where}: must be NAME KEY, optionally followed by {_WORDS}")
    secret, *rest = words
    flags = {word for word in rest if word in ("admin", "gateway")}
    quota = _parse_quota([word for word in rest if word not in flags], where)
    if len(flags) + len(quota) < len(rest):
        raise ConfigError(f"{where}: gives a word twice")
    if secret.startswith("sha256:"):
        match = _DIGEST.fullmatch(secret)
        if match is None:
            raise ConfigError(f"{where}: sha256: must be followed by 64 hexadecimal digits")
        digest = bytes.fromhex(match[1])
        if digest == digest_of(b""):
            raise ConfigError(f"{where}: this is the digest of an empty key")
    elif len(secret) < MIN_KEY_CHARS or _KEY.fullmatch(secret) is None:
        raise ConfigError(f"{where}: a key is {MIN_KEY_CHARS} to 512 printable ASCII characters")
    else:
        digest = digest_of(secret.encode())
    return ApiKey(
        name,
        digest,
        is_admin="admin" in flags,
        is_gateway="gateway" in flags,
        quota=Quota(**quota),
    )


def _parse_quota(words: Sequence[str], where: str) -> dict[str, int]:
    quota: dict[str, int] = {}
    for word in words:
        if (match := _QUOTA.fullmatch(word)) is None:
            raise ConfigError(f"{where}: must be NAME KEY, optionally followed by {_WORDS}")
        name, number = match[1], int(match[2])
        if not 1 <= number <= MAX_QUOTA:
            raise ConfigError(f"{where}: {name} must be 1 to {MAX_QUOTA}, got {number}")
        quota[name] = number
    return quota


# ----------------------------------------------------------------------
# What headers of a request say about who asks, for every HTTP server of the project.


def bearer_key(authorization: bytes) -> bytes:
    """Return the key in an Authorization header; nothing if there is none."""
    scheme, _, key = authorization.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


def is_loopback(name: str) -> bool:
    """Whether a name or an address, perhaps in brackets, can be reached from this machine only."""
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


def names_machine(host: bytes, names: Set[str]) -> bool:
    """Whether a Host header has one of the names, in small letters, or a loopback one.

    A web page whose own name has been pointed at this machine (DNS rebinding) sends that name.
    """
    given = host.decode("latin-1").lower()
    name, colon, port = given.rpartition(":")
    if not colon or not port.isdecimal():
        name = given
    return name in names or is_loopback(name)


# ----------------------------------------------------------------------
# The server's side of TLS, from PEM files.


def server_context(certfile: str, keyfile: str) -> ssl.SSLContext:
    """Return a context that serves this certificate over TLS 1.2 or newer; `keyfile` may be "".

    Raises:
        ConfigError: the files cannot be read or do not belong together, or the key has a password,
            for which a server cannot ask.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    for flag, path in (("--ssl-certfile", certfile), ("--ssl-keyfile", keyfile)):
        if path and not Path(path).is_file():
            raise ConfigError(f"{flag} {path}: no such file")
    try:
        context.load_cert_chain(certfile, keyfile or None, password=_no_password)
    except ssl.SSLError as error:
        reason = (error.reason or "not PEM").replace("_", " ").lower()
        raise ConfigError(f"--ssl-certfile, --ssl-keyfile: cannot be used: {reason}") from error
    except OSError as error:
        raise ConfigError(f"--ssl-certfile, --ssl-keyfile: {error.strerror or error}") from error
    except ValueError as error:  # of _no_password
        raise ConfigError(f"--ssl-keyfile: {error}") from error
    return context


def _no_password() -> str:
    raise ValueError("has a password, which cannot be given")
