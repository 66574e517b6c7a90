"""A GGUF file as a model directory: its metadata as config.json and tokenizer files. Torch-free.

Written once for each file (path, length, time of change) beside the profiles; the tensors stay
where they are, behind a link.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lightserve.cost.profile import cache_dir
from lightserve.errors import ModelLoadError
from lightserve.models.config import CONFIG_FILE, load_model_config
from lightserve.models.gguf import GgufFile, read_gguf
from lightserve.models.gguf_config import config_of
from lightserve.tokenization.vocabulary_files import SPLITS, decoder, described, merges

log = logging.getLogger(__name__)

WEIGHTS_FILE = "model.gguf"
_WITHOUT_CACHE = "lightserve-gguf-"
"""Beginning of the name of a directory that is in no cache."""
_LAYOUT = "6"
"""Version of the written files: files of another version are written anew."""

_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_CASES = (r"\p{Lu}\p{Lt}", r"\p{Ll}")
"""Letters by case."""


def _by_case(ending: str, digits: str, *, without: str = "", behind: str = "/") -> str:
    """Return how texts are split where capitals before small letters begin a word.

    `without`: letters that words have not; `behind`: marks, beside ends of lines, that other
    marks may have behind them.
    """
    upper, lower = (rf"[{case}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]" for case in _CASES)
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{ending}"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{ending}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n{behind}]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_ASCII_MARKS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_THREE = r"\p{N}{1,3}"
_DEEPSEEK_V3 = (
    _THREE,
    r"[一-龥぀-ゟ゠-ヿ]+",  # noqa: RUF001
    rf"{_ASCII_MARKS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_AS_LLAMA3 = (
    *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    "jina-v5-nano",
)
_AS_GLM4 = ("glm4", "glm5")
_AS_QWEN2 = (
    *("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan"),
    *("solar-open", "grok-2"),
)
_AS_GPT2 = (
    *("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4"),
    *("gigachat", "a.x-4.0", "mellum", "modern-bert"),
)
_SINGLE_DIGITS = (
    *("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
    "mellum2",
)
_WITH_BOS = (*_AS_LLAMA3, "tekken")
"""Pre-tokenisers whose texts begin with BOS where the file does not say."""
_WHOLE_WORDS = (*_AS_LLAMA3, *_AS_GLM4, "tekken")
"""Pre-tokenisers that take a word that is a token as this token, whatever the merges make of it."""
_SPLITS: dict[str, tuple[str, ...]] = {
    **{name: (split,) for name, split in SPLITS.items()},
    **dict.fromkeys((*_AS_LLAMA3, "dbrx", "smaug-bpe", "chatglm-bpe"), (SPLITS["llama-bpe"],)),
    **dict.fromkeys(_AS_GLM4, (SPLITS["llama-bpe"],)),
    **dict.fromkeys(_AS_QWEN2, (SPLITS["qwen2"],)),
    **dict.fromkeys((*_SINGLE_DIGITS, *_AS_GPT2), ()),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), (r" ?[^(\s|.,!?…。，、।۔،)]+",)),  # noqa: RUF001
    **dict.fromkeys(
        ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), (_by_case(_ENDING, _THREE),)
    ),
    "qwen35": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "tekken": (_by_case("", r"\p{N}"),),
    "kimi-k2": (r"\p{Han}+|" + _by_case(_ENDING, _THREE, without=r"&&[^\p{Han}]", behind=""),),
    "seed-coder": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT_2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT_2, r"[0-9][0-9][0-9]"),
    "deepseek-llm": (
        r"[\r\n]",
        r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
        r"\s?[!-/:-~！-／：-～‘-‟　-。]+",  # noqa: RUF001
        r"\s+$",
        r"[一-龥ࠀ-一가-퟿]+",
        r"\p{N}+",
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK_V3),
}
"""Splits of texts before tokens are merged, step by step, by `tokenizer.ggml.pre`; without a step:
as GPT-2's are."""
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_WITH_BLANKS = ("<unk>", "<s>", "<|endoftext|>")
"""Tokens of Phi-3 behind which blanks stay."""
_ENDS = frozenset(
    {
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>"),
        *("<|calls|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]"),
        *("[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "[e~["),
        "<|tool_response>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
        *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
    }
)
"""Tokens that end an answer whatever the keys say, as in llama.cpp's `llama-vocab.cpp`."""
_PLAIN_END = "</s>"
"""Another one, where the file has it as a control token: Gemma's is a tag of HTML."""
_END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_CALL_ENDS, _ANSWER_ENDS = {"<|call|>", "<|calls|>"}, {"<|return|>", "<|flush|>"}
_MESSAGE_END = "<|end|>"
"""Ends an answer, but for models that have one of both: there it ends one message of several."""


def unpacked_root() -> Path:
    """Return the directory of all directories that stand for GGUF files."""
    return cache_dir().parent / "gguf"


def stands_for_file(path: Path) -> bool:
    """Whether a directory is one of `unpack`, whose link may lead out of it."""
    path = path.resolve()
    if path.parent == unpacked_root().resolve():
        return True
    is_named = path.name.startswith(_WITHOUT_CACHE)
    if not is_named or path.parent != Path(tempfile.gettempdir()).resolve():
        return False
    state = path.stat()
    return state.st_uid == os.getuid() and not state.st_mode & 0o077


def unpack(path: Path) -> Path:
    """Return the model directory that stands for a GGUF file; written at the first time.

    Where the cache cannot be written it is a directory of this process, gone with it.

    Raises:
        ModelLoadError: the file is no whole GGUF file, or not of a model that can be served.
    """
    path = path.resolve()
    state = path.stat()
    identity = f"{_LAYOUT} {path} {state.st_size} {state.st_mtime_ns}"
    target = unpacked_root() / hashlib.sha256(identity.encode()).hexdigest()[:32]
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(dir=target.parent))
        try:
            _write(path, beside)
            with contextlib.suppress(OSError):  # another server was faster
                beside.rename(target)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    except OSError as error:
        return _unpack_without_cache(path, error)
    return target


def _unpack_without_cache(path: Path, why: OSError) -> Path:
    try:
        target = Path(tempfile.mkdtemp(prefix=_WITHOUT_CACHE))
        atexit.register(shutil.rmtree, target, ignore_errors=True)
        _write(path, target)
    except OSError as error:
        raise ModelLoadError(
            f"{path}: its tokeniser and sizes can be written neither below {unpacked_root()}"
            f" ({why.strerror}; XDG_CACHE_HOME names another place) nor below"
            f" {tempfile.gettempdir()} ({error.strerror}; TMPDIR names another place)"
        ) from error
    log.warning(
        "%s: %s; the GGUF file is read anew at each start (XDG_CACHE_HOME names another cache)",
        unpacked_root(),
        why.strerror,
    )
    return target


def _write(path: Path, directory: Path) -> None:
    """Write the directory that stands for a GGUF file. Raises OSError and ModelLoadError."""
    gguf = read_gguf(path)
    files = {
        CONFIG_FILE: config_of(gguf),
        "tokenizer.json": _tokenizer(gguf),
        "tokenizer_config.json": _tokenizer_config(gguf),
        "generation_config.json": _generation_config(gguf),
    }
    for name, content in files.items():
        with (directory / name).open("w", encoding="utf-8") as file:
            json.dump(content, file)  # piece by piece, not as one text
    _check_config(path, directory)
    (directory / WEIGHTS_FILE).symlink_to(path)


def _check_config(path: Path, directory: Path) -> None:
    """Refuse a model that cannot be served before it is kept, naming the GGUF file."""
    try:
        load_model_config(directory)
    except ModelLoadError as error:
        complaint = str(error).removeprefix(f"{directory / CONFIG_FILE}: ")
        raise ModelLoadError(f"{path}: in the words of {CONFIG_FILE}: {complaint}") from error


class _Made(list[Any]):
    """A list for `json.dump` whose items are made when they are written, once."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = iter(items)
        super().__init__(islice(self._items, 1))  # whether it is empty is asked first

    def __iter__(self) -> Iterator[Any]:
        return chain(super().__iter__(), self._items)


def _tokenizer(gguf: GgufFile) -> dict[str, Any]:
    """Return the contents of tokenizer.json."""
    kind = gguf.string("tokenizer.ggml.model")
    pieces = gguf.strings("tokenizer.ggml.tokens")
    if not pieces or len(pieces) > gguf.tensors["token_embd.weight"].shape[0]:
        raise gguf.error("tokenizer.ggml.tokens", f"has {len(pieces)} tokens for the embedding")
    vocab = {piece: number for number, piece in enumerate(pieces)}
    match kind:
        case "gpt2":
            parts = _byte_level(gguf, vocab)
        case "llama" | "gemma4":
            parts = _sentencepiece(gguf, vocab, pieces)
        case _:
            raise gguf.error("tokenizer.ggml.model", f"must be gpt2, llama or gemma4, got {kind!r}")
    return described(added=_added_tokens(gguf, pieces), **parts)


def _added_tokens(gguf: GgufFile, pieces: list[str]) -> list[dict[str, Any]]:
    """Return the tokens that are found in texts before they are split.

    One that ends answers is a control token even where the file says otherwise. Phi-3's take the
    blanks behind them, but for three, which llama.cpp, too, knows by the model's name.
    """
    kinds = _kinds(gguf, len(pieces))
    ends = np.fromiter((piece in _ENDS for piece in pieces), bool, count=len(pieces))
    is_special = (kinds == _CONTROL) | (kinds == _UNKNOWN) | ends
    model = str(gguf.metadata.get("general.name", "")).lower()
    takes_blanks = "phi-3" in model or "phi3" in model
    flags = {"single_word": False, "lstrip": False, "normalized": False}
    return [
        {
            "id": at,
            "content": pieces[at],
            "special": bool(is_special[at]),
            "rstrip": takes_blanks and pieces[at] not in _WITH_BLANKS,
            **flags,
        }
        for at in np.flatnonzero(is_special | (kinds == _USER_DEFINED)).tolist()
        if pieces[at]
    ]


def _kinds(gguf: GgufFile, num_pieces: int) -> npt.NDArray[np.generic]:
    """Return the kind of each token; without the key all are text."""
    if (key := "tokenizer.ggml.token_type") not in gguf.metadata:
        return np.ones(num_pieces, dtype=np.int32)
    if len(kinds := gguf.numbers(key)) != num_pieces:
        raise gguf.error(key, f"must have {num_pieces} entries")
    return kinds


def _is_gemma4(gguf: GgufFile) -> bool:
    return gguf.string("tokenizer.ggml.model") == "gemma4"


def _pre_tokeniser(gguf: GgufFile) -> str:
    return gguf.string("tokenizer.ggml.pre", default="default")


def _byte_level(gguf: GgufFile, vocab: dict[str, int]) -> dict[str, Any]:
    """Return a tokeniser as GPT-2's, whose merges the file has."""
    if (pre := _pre_tokeniser(gguf)) not in _SPLITS:
        known = ", ".join(_SPLITS)
        raise gguf.error("tokenizer.ggml.pre", f"must be one of {known}, got {pre!r}")
    splits = _SPLITS[pre]
    kind = {"type": "Split", "behavior": "Isolated", "invert": False}
    steps: list[dict[str, Any]] = [kind | {"pattern": {"Regex": split}} for split in splits]
    if pre in _SINGLE_DIGITS:
        steps.append({"type": "Digits", "individual_digits": True})
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    steps.append(byte_level | {"use_regex": not splits})
    return {
        "normalizer": {"type": "NFC"} if pre in ("qwen2", "qwen35") else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": byte_level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": vocab,
            "merges": _Made(_stored_merges(gguf, vocab)),
            "ignore_merges": pre in _WHOLE_WORDS,
        },
    }


def _stored_merges(gguf: GgufFile, vocab: dict[str, int]) -> Iterator[str]:
    """Iterate over the merges that the file has."""
    for merge in gguf.each_string("tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise gguf.error("tokenizer.ggml.merges", f"has {merge!r}, not of known tokens")
        yield merge


def _made_merges(gguf: GgufFile, pieces: list[str]) -> Iterable[Any]:
    """Return the merges that scores stand for: the best piece of two neighbours comes first."""
    has_scores = "tokenizer.ggml.scores" in gguf.metadata
    scores = gguf.numbers("tokenizer.ggml.scores") if has_scores else np.zeros(len(pieces))
    if len(scores) != len(pieces):
        raise gguf.error("tokenizer.ggml.scores", f"must have {len(pieces)} entries")
    try:
        return merges(pieces, scores, np.ones(len(pieces), dtype=bool))
    except ValueError as error:
        raise gguf.error("tokenizer.ggml.tokens", str(error)) from error


def _sentencepiece(gguf: GgufFile, vocab: dict[str, int], pieces: list[str]) -> dict[str, Any]:
    """Return a tokeniser as Llama 2's, or as Gemma 4's, whose merges the file has."""
    is_gemma4 = _is_gemma4(gguf)
    pairs = _stored_merges(gguf, vocab) if is_gemma4 else _made_merges(gguf, pieces)
    has_prefix = gguf.boolean("tokenizer.ggml.add_space_prefix", default=not is_gemma4)
    steps: list[dict[str, Any]] = [{"type": "Prepend", "prepend": "▁"}] if has_prefix else []
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})
    none = len(pieces) if is_gemma4 else 0
    unknown = gguf.integer("tokenizer.ggml.unknown_token_id", default=none)
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "decoder": decoder(has_prefix=has_prefix),
        "model": {
            "type": "BPE",
            "vocab": vocab,
            "merges": _Made(pairs),
            "unk_token": pieces[unknown] if unknown < len(pieces) else None,
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }


def _tokenizer_config(gguf: GgufFile) -> dict[str, Any]:
    """Return special tokens and the chat template."""
    num_pieces = gguf.count("tokenizer.ggml.tokens")
    is_llama = gguf.string("tokenizer.ggml.model") == "llama"
    adds_bos = is_llama or _pre_tokeniser(gguf) in _WITH_BOS
    adds_bos = gguf.boolean("tokenizer.ggml.add_bos_token", default=adds_bos)
    config: dict[str, Any] = {
        "add_bos_token": adds_bos or _is_gemma4(gguf),  # as in llama.cpp, whatever the file says
        "add_eos_token": gguf.boolean("tokenizer.ggml.add_eos_token", default=False),
    }
    by_default = {"bos": 1, "eos": 2} if is_llama and num_pieces > 2 else {}
    ids: dict[str, int] = {}
    for name in ("bos", *_END_KEYS):
        if (key := f"tokenizer.ggml.{name}_token_id") in gguf.metadata:
            ids[name] = _token_id(gguf, key, num_pieces)
        elif name in by_default:
            ids[name] = by_default[name]
    for name in ids.keys() & {"bos", "eos"}:
        config[f"{name}_token"] = gguf.string_at("tokenizer.ggml.tokens", ids[name])
    ends = {token_id for name, token_id in ids.items() if name != "bos"}
    config["eos_token_id"] = _ends_of_answers(gguf, num_pieces, ends) or None
    templates = {name: gguf.string(key) for name, key in _TEMPLATES.items() if key in gguf.metadata}
    if "default" in templates:
        config["chat_template"] = templates
    return config


_SAMPLING = {
    "temp": ("temperature", 2.0),
    "top_k": ("top_k", 2**31 - 1),
    "top_p": ("top_p", 1.0),
    "min_p": ("min_p", 1.0),
    "penalty_repeat": ("repetition_penalty", 10.0),
}
"""Keys below `general.sampling.`, as generation_config.json has them, and the most they may be."""


def _generation_config(gguf: GgufFile) -> dict[str, Any]:
    """Return how the file recommends to sample; keys without a like have the file's own names."""
    config: dict[str, Any] = {}
    for key, value in gguf.metadata.items():
        _, found, name = key.partition("general.sampling.")
        if found and name not in _SAMPLING:
            config[name] = value if isinstance(value, int | float | str) else True
        elif found:
            own, most = _SAMPLING[name]
            if not 0 <= (number := gguf.number(key)) <= most:
                raise gguf.error(key, f"must be from 0 to {most:g}, got {number:g}")
            config[own] = int(number) if own == "top_k" else number
    if (key := "tokenizer.ggml.suppress_tokens") in gguf.metadata:
        num_tokens = gguf.count("tokenizer.ggml.tokens")
        config["suppress_tokens"] = [
            token_id for token_id in gguf.numbers(key).tolist() if 0 <= token_id < num_tokens
        ]
    return config


_TEMPLATES = {"default": "tokenizer.chat_template", "tool_use": "tokenizer.chat_template.tool_use"}
"""Keys of chat templates by the names that tokenizer_config.json has for them."""


def _ends_of_answers(gguf: GgufFile, num_pieces: int, by_key: set[int]) -> list[int]:
    """Return the ids of all tokens that end an answer, by key or by name."""
    pieces = list(gguf.each_string("tokenizer.ggml.tokens"))
    kinds = _kinds(gguf, num_pieces)
    ends = by_key | {
        number
        for number, piece in enumerate(pieces)
        if piece in _ENDS or (piece == _PLAIN_END and kinds[number] == _CONTROL)
    }
    names = {pieces[number] for number in ends}
    if names & _CALL_ENDS and names & _ANSWER_ENDS:
        ends -= {number for number in ends if pieces[number] == _MESSAGE_END}
    return sorted(ends)


def _token_id(gguf: GgufFile, key: str, num_tokens: int) -> int:
    if (token_id := gguf.integer(key)) >= num_tokens:
        raise gguf.error(key, f"must be below {num_tokens}, got {token_id}")
    return token_id
