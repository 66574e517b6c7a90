"""Random small encoders of every served family, as Sentence Transformers saves them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor

WORDS = ("the", "a", "lamp", "Mira", "tower", "sea", "old", "brass", "keeps", "light")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
VOCAB_SIZE = 64
CLS, SEP = 2, 3
REFERENCE_FILE = "reference.json"
"""The configuration as transformers knows it."""


@dataclass(frozen=True)
class TinyEncoder:
    """One random encoder."""

    name: str
    family: str
    """transformers' prefix."""
    pooling: str = "mean_tokens"
    config: Mapping[str, Any] = field(default_factory=dict)
    is_old: bool = False
    """Whether config.json has the keys of the model's own files, not transformers'."""
    is_cross: bool = False
    """Whether it ends with a head that scores pairs."""


TINY_ENCODERS = (
    TinyEncoder("bert", "Bert"),
    TinyEncoder("bert-cls-tanh", "Bert", "cls_token", {"hidden_act": "gelu_new"}),
    TinyEncoder("roberta", "Roberta", "cls_token"),
    TinyEncoder("xlm-roberta", "XLMRoberta", config={"type_vocab_size": 1}),
    TinyEncoder("nomic", "NomicBert"),
    TinyEncoder("nomic-own-keys", "NomicBert", is_old=True),
)

CROSS_ENCODERS = (
    TinyEncoder("bert-cross", "Bert", is_cross=True),
    TinyEncoder("roberta-cross", "Roberta", is_cross=True),
    TinyEncoder("xlm-roberta-cross", "XLMRoberta", config={"type_vocab_size": 1}, is_cross=True),
)

_OLD_KEYS = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
}


def write_tiny_encoder(tiny: TinyEncoder, path: Path) -> None:
    """Write model, tokenizer and the files of Sentence Transformers."""
    torch.manual_seed(7)
    config = getattr(transformers, f"{tiny.family}Config")(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=42 if "ROBERTA" in tiny.family.upper() else 40,
        initializer_range=0.15,
        **({"num_labels": 1} if tiny.is_cross else {}),
        **tiny.config,
    )
    kind = "ForSequenceClassification" if tiny.is_cross else "Model"
    model = getattr(transformers, f"{tiny.family}{kind}")(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:  # biases and norms begin as zeros and ones
                weight.add_(0.1 * torch.randn_like(weight))
            elif "embeddings" in name:
                weight.copy_(torch.randn_like(weight))
    model.save_pretrained(path)
    (path / REFERENCE_FILE).write_bytes((path / "config.json").read_bytes())
    if tiny.is_old:
        _write_old_config(path / "config.json")
    write_tokenizer(path)
    if not tiny.is_cross:
        write_pooling(path, tiny.pooling)


def _write_old_config(file: Path) -> None:
    values = json.loads(file.read_text())
    values = {_OLD_KEYS.get(key, key): value for key, value in values.items()}
    rope = values.pop("rope_parameters")
    del values["hidden_act"], values["head_dim"]
    values |= {
        "rotary_emb_base": rope["rope_theta"],
        "rotary_emb_fraction": 1.0,
        "activation_function": "swiglu",
        "prenorm": False,
        "qkv_proj_bias": False,
        "auto_map": {"AutoModel": "no--such.code"},
    }
    file.write_text(json.dumps(values))


def write_tokenizer(path: Path) -> None:
    """Write a tokenizer.json of words, with [CLS] in front and [SEP] behind."""
    pieces = [*SPECIAL, *WORDS, *(f"w{number}" for number in range(VOCAB_SIZE - 14))]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(path / "tokenizer.json"))


def write_pooling(path: Path, mode: str, **others: Any) -> None:
    """Write modules.json and the configuration of its pooling."""
    kinds = ("Transformer", "Pooling", "Normalize")
    folders = ("", "1_Pooling", "2_Normalize")
    modules = [
        {"idx": n, "name": str(n), "path": folder, "type": f"sentence_transformers.models.{kind}"}
        for n, (kind, folder) in enumerate(zip(kinds, folders, strict=True))
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir(exist_ok=True)
    modes = dict.fromkeys(
        ("cls_token", "mean_tokens", "max_tokens", "lasttoken", "weightedmean_tokens"), False
    )
    pooling = {f"pooling_mode_{name}": value for name, value in (modes | {mode: True}).items()}
    (path / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 32, **pooling, **others})
    )


def reference_vectors(
    path: Path, prompts: list[list[int]], pooling: str, *, family: str
) -> list[Tensor]:
    """Return transformers' vector of each prompt alone, float32 [hidden_size], of length 1."""
    kind = getattr(transformers, f"{family}Config")
    config = kind.from_dict(json.loads((path / REFERENCE_FILE).read_text()))
    model = getattr(transformers, f"{family}Model").from_pretrained(path, config=config).eval()
    found = []
    for token_ids in prompts:
        with torch.no_grad():
            hidden = model(torch.tensor([token_ids])).last_hidden_state[0]
        match pooling:
            case "cls_token":
                vector = hidden[0]
            case "mean_tokens":
                vector = hidden.mean(0)
            case _:
                vector = hidden[-1]
        found.append(torch.nn.functional.normalize(vector, dim=0))
    return found


def reference_scores(path: Path, pairs: list[tuple[str, str]]) -> list[float]:
    """Return transformers' score of each pair alone: the sigmoid of its logit."""
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"))
    model = transformers.AutoModelForSequenceClassification.from_pretrained(path).eval()
    found = []
    for first, second in pairs:
        has_types = model.config.model_type == "bert"  # as the tokenizers of the others have none
        inputs = tokenizer(first, second, return_token_type_ids=has_types, return_tensors="pt")
        with torch.no_grad():
            found.append(float(model(**inputs).logits.sigmoid()))
    return found


def write_tiny_judge(path: Path) -> None:
    """Write a random Qwen3 whose tokenizer has the tokens yes and no, as Qwen3-Reranker is."""
    torch.manual_seed(11)
    config = transformers.Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.3,
        tie_word_embeddings=False,
        eos_token_id=SEP,
        bos_token_id=None,
    )
    transformers.Qwen3ForCausalLM(config).eval().save_pretrained(path)
    words = ("yes", "no", "Query", "Document", "Instruct", "<", ">", ":", "\n")
    pieces = [*SPECIAL, *WORDS, *words, *(f"w{number}" for number in range(VOCAB_SIZE - 23))]
    model = models.WordLevel({piece: n for n, piece in enumerate(pieces)}, unk_token="[UNK]")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(path / "tokenizer.json"))


def logits_apart(path: Path, prompts: list[str], yes: str, no: str) -> list[float]:
    """Return how far the logits of two tokens are apart that transformers finds behind prompts."""
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"))
    model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    asked = tokenizer.convert_tokens_to_ids([yes, no])
    found = []
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
        with torch.no_grad():
            logits = model(inputs["input_ids"]).logits[0, -1, asked]
        found.append(float(logits[0] - logits[1]))
    return found
