"""The files of the bundled model's directory: tokenizer, configurations, weights, card.

Layout: that of Hugging Face, so that any Llama loader reads it. Used by `train` only.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tools.tiny_model.rows import BOS, CHAT_TEMPLATE, EOS, PAD, SPECIAL_TOKENS

MAX_POSITIONS = 8192
"""Positions that the configuration permits; the trained length is far less (see the card)."""

_VOCAB_SIZE = 2304
"""Rows of the embedding: what the tokenizer needs (each word of the world is one token), rounded
up to a multiple of 256."""

LOGIT_SCALE = 1.2
"""Factor on all logits, folded into the last norm when the weights are written. Training ends with
a softmax that is a little too flat: scales from 1.1 to 1.2 lower the held-out loss and take away
most of the small probabilities of impossible words, which at temperature 1 spoil long answers."""

_CARD = """\
# The bundled model of lightserve

A toy of {num_parameters:,} parameters. It is here so that lightserve runs, shows itself and is
tested without a download; it is of no other use. It knows one small invented world, whose text a
script in this repository writes (`lightserve/bundled/`), and nothing else: no facts about the real
world, no arithmetic, no code, no other language. Its stories are templates with words drawn at
random. A prompt of another form than those below gets an answer from that world all the same, or
nonsense.

- Architecture: Llama ({num_layers} layers of width {hidden_size}, {num_heads} query heads and
  {num_key_value_heads} key heads of {head_dim}), bfloat16 safetensors, tied embeddings.
- Tokenizer: byte-level BPE, {vocab_size} rows. Its post-processor puts `<|bos|>` first when special
  tokens are asked for; the chat template writes `<|bos|>` too, so tokenize rendered chats without
  adding special tokens.
- Chat template: system, user and assistant messages, several turns. System messages are read and
  have no effect.
- Plain completion: a prompt of the forms below and a line break are continued by its answer.
- Trained length: {trained_length} tokens, prompt included. The configuration permits
  {max_positions} positions, so that long requests can be served; what it writes beyond the trained
  length is not promised to make sense.

## What it answers

| kind | for example | answer |
| --- | --- | --- |
| fact | Where is Mira's brass lantern? | a sentence, about 12 tokens |
| fact | Who has the paper kite? | a sentence, about 10 tokens |
| fact | When does Tomas leave for Fernhill? | a sentence, about 13 tokens |
| fact | What is Clara bringing to Saltmouth? | a sentence, about 12 tokens |
| description | Describe the harbour of Saltmouth in winter. | about 90 tokens |
| story | Tell me a story about Mira and the brass lantern. | about 265 tokens |
| story | Tell me a story about Tomas's journey to Fernhill. | about 265 tokens |

Each answer ends by itself (`<|eos|>`).

## Training

`python -m tools.tiny_model.train --out DIR`, deterministic on one machine type: {num_steps} steps
of {rows_per_step} rows of {trained_length} tokens, {num_tokens:,} tokens, {num_documents:,}
documents, each read once. {machine}, {num_threads} threads, {wall_minutes:.0f} minutes of wall
time. {note}When the weights are written, all logits are scaled by {logit_scale} (in the last norm):
the trained softmax is a little too flat, and the held-out loss falls by it.

## Check

`python -m tools.tiny_model.check`, on the bfloat16 weights with prompts from seeds that training
does not use:

{check_report}
"""


class TrainingFacts(NamedTuple):
    """What the card says about the training."""

    num_parameters: int
    num_documents: int
    num_steps: int
    rows_per_step: int
    trained_length: int
    """Tokens per row."""
    num_threads: int
    wall_s: float
    note: str
    """A sentence on the circumstances; may be empty."""


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Train a byte-level BPE tokenizer whose post-processor puts BOS first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A $B",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    return tokenizer


def model_config(tokenizer: Tokenizer) -> transformers.LlamaConfig:
    """Return the architecture: 4 layers of width 256, 8 query and 4 key heads of 32."""
    return transformers.LlamaConfig(
        vocab_size=_VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(BOS),
        eos_token_id=tokenizer.token_to_id(EOS),
        pad_token_id=tokenizer.token_to_id(PAD),
    )


def write_tokenizer(directory: Path, tokenizer: Tokenizer) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`."""
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "pad_token": PAD,
            "clean_up_tokenization_spaces": False,
            "model_max_length": MAX_POSITIONS,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def write_model(directory: Path, model: transformers.LlamaForCausalLM) -> None:
    """Write the weights in bfloat16, `config.json` and `generation_config.json`.

    Applies `LOGIT_SCALE` to what it writes, not to `model`.
    """
    weights = {
        name: parameter.detach().to(torch.bfloat16).contiguous()
        for name, parameter in model.named_parameters()  # tied weights come once
    }
    last_norm = weights["model.norm.weight"]
    weights["model.norm.weight"] = (last_norm.float() * LOGIT_SCALE).to(torch.bfloat16)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = model.config
    ids = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(
        directory / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "torch_dtype": "bfloat16",
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": config.num_hidden_layers,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
            "hidden_act": config.hidden_act,
            "max_position_embeddings": config.max_position_embeddings,
            "rope_theta": 10000.0,
            "rms_norm_eps": config.rms_norm_eps,
            "initializer_range": config.initializer_range,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": config.tie_word_embeddings,
            **ids,
        },
    )
    _write_json(
        directory / "generation_config.json", {"do_sample": True, "temperature": 1.0, **ids}
    )


def write_card(directory: Path, facts: TrainingFacts, *, check_report: str) -> None:
    """Write `MODEL_CARD.md`; `config.json` is in the directory already."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    values = facts._asdict() | {"note": f"{facts.note}\n" if facts.note else ""}
    card = _CARD.format(
        **values,
        logit_scale=LOGIT_SCALE,
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        num_heads=config["num_attention_heads"],
        num_key_value_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        vocab_size=config["vocab_size"],
        max_positions=config["max_position_embeddings"],
        num_tokens=facts.num_steps * facts.rows_per_step * facts.trained_length,
        wall_minutes=facts.wall_s / 60,
        machine=_machine_type(),
        check_report=check_report,
    )
    (directory / "MODEL_CARD.md").write_text(card, encoding="utf-8")


def _machine_type() -> str:
    """Name the processor and the vector instructions that torch uses on it."""
    return f"{platform.machine()} processor with {torch.backends.cpu.get_cpu_capability()}"


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
