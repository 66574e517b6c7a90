"""How large constraints may be, and what they leave free; without llguidance."""

from __future__ import annotations

MAX_SCHEMA_BYTES = 32 * 1024
MAX_REGEX_BYTES = 8 * 1024
MAX_GRAMMAR_BYTES = 32 * 1024

WHITESPACE = r" |\r?\n[ \t]{0,16}"
"""What JSON may have between its tokens: a space, or a new line and its indentation. Without a
bound a model that is lost writes blanks until its tokens are used up."""
