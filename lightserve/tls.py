"""The server's side of TLS, from PEM files."""

from __future__ import annotations

import ssl
from pathlib import Path

from lightserve.errors import ConfigError


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
