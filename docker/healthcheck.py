"""Exit code 0 when the server takes requests: GET /readyz, which needs no key, says 200.

LIGHTSERVE_READY_URL is for a server on another port or with TLS. The certificate is not checked:
it is this container's own server, under a name that certificates do not have.
"""

from __future__ import annotations

import os
import ssl
import sys
import urllib.error
import urllib.request

URL = os.environ.get("LIGHTSERVE_READY_URL", "http://127.0.0.1:8000/readyz")


def main() -> int:
    """Ask once; Docker repeats."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    # No proxy: one from the container's environment could not reach a loopback address.
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )
    try:
        with opener.open(URL, timeout=4.0) as response:
            return 0 if response.status == 200 else 1
    except (urllib.error.URLError, OSError) as error:
        print(f"{URL}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
