"""How large constraints may be, what they leave free, who compiles them; without llguidance."""

from __future__ import annotations

import os
import re
import threading

MAX_SCHEMA_BYTES = 32 * 1024
MAX_REGEX_BYTES = 8 * 1024
MAX_GRAMMAR_BYTES = 32 * 1024
MAX_GBNF_CHARS = 8 * 1024
"""Of a grammar that has to be translated: a tenth of a second."""

_GBNF_ROOT = re.compile(r"^[ \t]*root[ \t]*::=", re.MULTILINE)

WHITESPACE = r" |\r?\n[ \t]{0,16}"
"""What JSON may have between its tokens: a space, or a new line and its indentation. Without a
bound a model that is lost writes blanks until its tokens are used up."""

_NICENESS = 10


def is_gbnf(grammar: str) -> bool:
    """Return whether a grammar is in llama.cpp's notation, as xgrammar has it; else it is Lark."""
    return _GBNF_ROOT.search(grammar) is not None


def yield_to_others() -> None:
    """Lower the calling thread's priority: compiling must not slow down what is served already."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
