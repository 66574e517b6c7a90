"""How large constraints may be, what they leave free, who compiles them; without llguidance."""

from __future__ import annotations

import os
import threading

MAX_SCHEMA_BYTES = 32 * 1024
MAX_REGEX_BYTES = 8 * 1024
MAX_GRAMMAR_BYTES = 32 * 1024

WHITESPACE = r" |\r?\n[ \t]{0,16}"
"""What JSON may have between its tokens: a space, or a new line and its indentation. Without a
bound a model that is lost writes blanks until its tokens are used up."""

_NICENESS = 10


def yield_to_others() -> None:
    """Lower the calling thread's priority: compiling must not slow down what is served already."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
