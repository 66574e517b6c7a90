"""docs/configuration.md, made from the declaration of the options.

Run `python -m tools.config_page > docs/configuration.md`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, get_type_hints

from lightserve.bundled import BUNDLED_MODEL_DIR
from lightserve.cli.options import limits_text, shown_default
from lightserve.config import SECTIONS, ServeConfig
from lightserve.config.fields import flag_name

_TYPES = {str: "string", int: "integer", float: "number", bool: "true or false"}

_HEAD = """\
# Configuration

This page is written by `python -m tools.config_page > docs/configuration.md`; do not edit it.

Every option of `lightserve serve` can be a flag (`--max-num-seqs 64`, `--batch-invariant`,
`--no-batch-invariant`) or a line of a YAML file that `--config FILE` names:

```yaml
# The flag's name without its dashes; - and _ are the same inside it.
max-num-seqs: 64
batch-invariant: true
kv-memory: 2GiB
```

Flags stand over the file, the file over
[`--preset`](scheduling.md#the-systems-of-four-papers), that over the defaults.
A file is one flat mapping of at most 1 MiB; unknown or repeated names, other types (`"80"` is no
integer) and values outside the limits are errors that name the line, with exit code 2. Paths in it
are relative to the working directory. API keys are never options:
`--api-key-file` names a file of them.

At its start the server logs every value that a flag, the file or a preset gave, and with
`--log-level debug` the defaults as well.
"""
_SECTION = """
## {title}

| option | type | default | limits | meaning |
| --- | --- | --- | --- | --- |
"""


def document() -> str:
    """Return the page."""
    types = get_type_hints(ServeConfig)
    parts = [_HEAD]
    for spec in dataclasses.fields(ServeConfig):
        if spec.name in SECTIONS:
            parts.append(_SECTION.format(title=SECTIONS[spec.name]))
        parts.append(_row(spec, types[spec.name]))
    return "".join(parts)


def _row(spec: dataclasses.Field[Any], kind: type) -> str:
    choices: tuple[str, ...] = spec.metadata["choices"]
    cells = (
        f"`{flag_name(spec.name)}`",
        _TYPES[kind] + (f" or {zero_word}" if (zero_word := spec.metadata["zero_word"]) else ""),
        _default(shown_default(spec)),
        ", ".join(f"`{choice}`" for choice in choices) or limits_text(spec),
        spec.metadata["help"],
    )
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |\n"


def _default(value: object) -> str:
    if value == "":
        return ""
    if value == str(BUNDLED_MODEL_DIR):  # differs from machine to machine
        return "bundled"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    print(document(), end="")
