"""Whether a model's files, or --pooling, have it make vectors of prompts or scores, and how.

The files are those of Sentence Transformers (Reimers and Gurevych, 2019): `modules.json` lists the
steps behind the transformer, and the folder of its pooling has a `config.json`. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePosixPath

from lightserve.errors import ConfigError, ModelLoadError
from lightserve.models.config import CONFIG_FILE, LOGIT_SCORE, MODULES_FILE, ModelConfig, num_ids
from lightserve.models.json_fields import JsonFields, read_json_object, read_json_objects

LIMITS_FILE = "sentence_bert_config.json"
OPTIONS_FILE = "config_sentence_transformers.json"


class Pooling(StrEnum):
    """The way from the hidden states of a prompt's tokens to one vector."""

    CLS = "cls"
    """That of the first token."""
    MEAN = "mean"
    LAST = "last"
    """That of the last token."""
    YES_NO = "yes-no"
    """No vector: the logits of two tokens behind a pair of texts become its score."""
    SCORE = "score"
    """No vector: a head makes the score of the first token's state."""


_OF_DECODERS = (Pooling.LAST, Pooling.YES_NO)
_MODES = {
    "pooling_mode_cls_token": Pooling.CLS,
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_lasttoken": Pooling.LAST,
}
_MODE_NAMES = {"cls": Pooling.CLS, "mean": Pooling.MEAN, "lasttoken": Pooling.LAST}
"""In newer files, one key with a name."""
_KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")
_ACTIVATIONS = {"Sigmoid": False, "Identity": True}
"""Whether scores are the logits as they are, by the last part of torch's name."""


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """The way in which a model makes vectors of prompts, or scores of pairs."""

    kind: Pooling
    size: int
    """Numbers of a vector."""
    is_whole: bool
    """Whether one step computes a prompt as a whole: its tokens see each other."""
    embeds_only: bool
    """Whether the model is for nothing else."""
    max_tokens: int | None = None
    """Most tokens of a prompt, where the files allow fewer than the model's context."""
    sizes: tuple[int, ...] = ()
    """Sizes to which vectors may be cut."""
    yes_no: tuple[int, int] | None = None
    """The two tokens of `Pooling.YES_NO`; None: those that are named yes and no."""
    type_step: int = 0
    """Added to the type ids of a pair's second text, see `Encoder.tells_pairs`."""
    has_plain_scores: bool = False
    """Whether scores are the logits as they are, not their sigmoid."""

    @property
    def scores(self) -> bool:
        """Whether it makes scores, and no vectors."""
        return self.kind in (Pooling.SCORE, Pooling.YES_NO)

    def can_have(self, size: int) -> bool:
        """Whether vectors may have so many numbers."""
        return size == self.size or size in self.sizes


def load_embedding(path: Path, config: ModelConfig, asked: str) -> Embedding | None:
    """Return how the model in directory `path` embeds or scores; None: it does neither.

    Args:
        path: of a model whose configuration is `config`.
        config: the result of `load_model_config`.
        asked: --pooling; auto goes by the model's files.

    Raises:
        ModelLoadError: its files ask for an unsupported step; names file and key.
        ConfigError: --pooling does not go with the model, or it needs one.
    """
    modules, yes_no, is_encoder = path / MODULES_FILE, None, config.encoder is not None
    if config.encoder is not None and config.encoder.has_score_head:
        if asked != "auto":
            raise ConfigError(f"pooling must be auto for a cross-encoder, got {asked}")
        kind = Pooling.SCORE
    elif asked != "auto":
        kind = Pooling(asked)
    elif (yes_no := _logit_score(path, modules, config.vocab_size)) is not None:
        kind = Pooling.YES_NO
    elif modules.is_file():
        kind = _pooling_of(path, modules)
    elif is_encoder or config.is_headless:
        kinds = "cls, mean, last" if is_encoder else Pooling.LAST.value
        raise ConfigError(
            f"{modules}: no such file: --pooling has to say how the model makes vectors: {kinds}"
        )
    else:
        return None
    if (kind is Pooling.YES_NO) if is_encoder else (kind not in _OF_DECODERS):
        known = "cls, mean or last" if is_encoder else "last or yes-no"
        seen = "all others" if is_encoder else "those before them alone"
        raise ConfigError(
            f"pooling must be {known} for {config.architecture.value}, whose tokens see {seen}, got"
            f" {kind.value}" + (f" ({modules})" if asked == "auto" else "")
        )
    fields = JsonFields(path / CONFIG_FILE, read_json_object(path / CONFIG_FILE))
    return Embedding(
        kind=kind,
        size=config.hidden_size,
        is_whole=is_encoder,
        embeds_only=is_encoder or config.is_headless or yes_no is not None,
        max_tokens=_max_tokens(path),
        sizes=_sizes(fields, config.hidden_size),
        yes_no=yes_no,
        type_step=num_ids(config) - config.vocab_size if kind is Pooling.SCORE else 0,
        has_plain_scores=_has_plain_scores(path, fields),
    )


def _logit_score(path: Path, modules: Path, vocab_size: int) -> tuple[int, int] | None:
    """Return the two tokens that the files have a score made of; None: they have none made."""
    for number, entry in enumerate(read_json_objects(modules) if modules.is_file() else ()):
        fields = JsonFields(modules, entry, prefix=f"{number}.")
        if fields.string("type").endswith(LOGIT_SCORE):
            file = path / _folder(fields) / CONFIG_FILE
            own = JsonFields(file, read_json_object(file))
            keys = ("true_token_id", "false_token_id")
            yes, no = (own.integer(key, low=0, high=vocab_size - 1) for key in keys)
            return yes, no
    return None


def _has_plain_scores(path: Path, config: JsonFields) -> bool:
    """Return what the files say of scores; they are sigmoids unless said otherwise."""
    names = []
    if (path / OPTIONS_FILE).is_file():
        names.append(JsonFields(path / OPTIONS_FILE, read_json_object(path / OPTIONS_FILE)))
    if config.has("sentence_transformers"):
        names.append(config.child("sentence_transformers"))
    places = [(fields, "activation_fn") for fields in names]
    for fields, key in (*places, (config, "sbert_ce_default_activation_function")):
        if fields.has(key):
            if (name := fields.string(key).rpartition(".")[2]) not in _ACTIVATIONS:
                known = ", ".join(_ACTIVATIONS)
                raise fields.error(key, f"must be one of torch's {known}, got {name!r}")
            return _ACTIVATIONS[name]
    return False


def _folder(fields: JsonFields) -> PurePosixPath:
    """Return the folder of a module."""
    folder = PurePosixPath(fields.string("path"))
    if folder.is_absolute() or ".." in folder.parts:
        raise fields.error("path", "must name a folder of the model directory")
    return folder


def _pooling_of(path: Path, modules: Path) -> Pooling:
    """Return the contents of `modules.json` and of the folder that it names."""
    folder = None
    for number, entry in enumerate(read_json_objects(modules)):
        fields = JsonFields(modules, entry, prefix=f"{number}.")
        kind = fields.string("type").rpartition(".")[2]
        if kind not in _KNOWN_MODULES:
            known = ", ".join(_KNOWN_MODULES)
            raise fields.error("type", f"names {kind!r}; supported are {known}")
        if kind == "Pooling":
            folder = _folder(fields)
    if folder is None:
        raise ModelLoadError(f"{modules}: has no module of the type Pooling")
    file = path / folder / CONFIG_FILE
    fields = JsonFields(file, read_json_object(file))
    if fields.has("pooling_mode"):
        return fields.choice("pooling_mode", _MODE_NAMES)
    chosen = [key for key, value in fields.items() if key.startswith("pooling_mode_") and value]
    if len(chosen) != 1 or chosen[0] not in _MODES:
        raise ModelLoadError(
            f"{file}: must have one of {', '.join(_MODES)} true, and no other, got {chosen}"
        )
    return _MODES[chosen[0]]


def _max_tokens(path: Path) -> int | None:
    file = path / LIMITS_FILE
    if not file.is_file():
        return None
    fields = JsonFields(file, read_json_object(file))
    return fields.integer("max_seq_length") if fields.has("max_seq_length") else None


def _sizes(fields: JsonFields, size: int) -> tuple[int, ...]:
    """Return the sizes that a model was trained for (Matryoshka, Kusupati et al., 2022)."""
    if fields.has("matryoshka_dimensions"):
        sizes = fields.array("matryoshka_dimensions")
        if not all(type(each) is int and 0 < each <= size for each in sizes):
            raise fields.error("matryoshka_dimensions", f"must be integers from 1 to {size}")
        return tuple(sizes)
    is_any = fields.boolean("is_matryoshka", default=False)
    return tuple(range(1, size + 1)) if is_any else ()
