"""Whether a model's tokenizer files fit its weights: no id may be outside `vocab_size`.

Checked before anything listens. An id too large would index past the embedding, or name an end
of sequence that the model can never write. The other direction is usual and harmless: many
models pad their embedding beyond the tokenizer.
"""

from __future__ import annotations

from pathlib import Path

from lightserve.errors import ModelLoadError
from lightserve.models.config import CONFIG_FILE
from lightserve.tokenization.tokenizer import (
    GENERATION_CONFIG_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    Tokenizer,
    read_ids,
    read_optional,
)

_FILES_WITH_IDS = (CONFIG_FILE, GENERATION_CONFIG_FILE, TOKENIZER_CONFIG_FILE)
_ID_KEYS = ("bos_token_id", "eos_token_id")


def check_vocabulary(model_dir: Path, tokenizer: Tokenizer, *, vocab_size: int) -> None:
    """Check every id that this model's files name against `vocab_size` of its config.

    Raises:
        ModelLoadError: an id is too large; names file and key.
    """
    for source, token_id in tokenizer.largest_ids.items():
        if token_id >= vocab_size:
            raise ModelLoadError(
                f"{model_dir / TOKENIZER_FILE}: key {source!r} {_complaint(token_id, vocab_size)}"
            )
    for name in _FILES_WITH_IDS:
        fields = read_optional(model_dir, name)
        for key in _ID_KEYS:
            for token_id in read_ids(fields, key):
                if token_id >= vocab_size:
                    raise fields.error(key, _complaint(token_id, vocab_size))


def _complaint(token_id: int, vocab_size: int) -> str:
    return (
        f"holds token id {token_id}, but vocab_size in {CONFIG_FILE} is {vocab_size}: ids must be"
        f" at most {vocab_size - 1}"
    )
