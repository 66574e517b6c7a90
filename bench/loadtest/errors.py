"""What is the user's mistake."""

from __future__ import annotations


class LoadTestError(Exception):
    """An option, a file or a server that cannot be used; the message is for the user."""
