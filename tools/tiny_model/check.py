"""Check the bundled model: `python -m tools.tiny_model.check [--model DIR]`.

Samples answers at temperature 1 to prompts that training has not drawn, and judges them by the
generator's grammar; measures the held-out loss against the generator's own entropy, which is the
least loss that any model can reach. Seconds to a minute on two cores.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from random import Random
from statistics import fmean, pstdev
from typing import NamedTuple

import torch
import transformers
from torch.nn import functional

from lightserve.bundled import BUNDLED_MODEL_DIR
from tools.tiny_model.corpus import Exchange, accepts, draw_exchange
from tools.tiny_model.rows import training_text
from tools.tiny_model.scripts import KINDS, Kind

_PROMPT_SEED = 21
_LOSS_SEED = 22
_SAMPLING_SEED = 23
_MAX_ANSWER_TOKENS = 400
"""No answer of the grammar is this long: one that is cut here has failed."""


class Bundle(NamedTuple):
    """The model as a user has it: bfloat16 weights and the tokenizer."""

    model: transformers.LlamaForCausalLM
    tokenizer: transformers.PreTrainedTokenizerFast


class Answer(NamedTuple):
    """One sampled answer."""

    exchange: Exchange
    """The prompt, with the generator's own answer."""
    text: str
    num_tokens: int
    """Sampled tokens, EOS included."""
    ended: bool
    """Whether the model wrote EOS by itself."""

    @property
    def accepted(self) -> bool:
        """Whether the grammar can write this answer to this prompt."""
        return self.ended and accepts(self.exchange.prompt, self.text)


class SamplingReport(NamedTuple):
    """Counts over the sampled answers."""

    num_prompts: int
    num_ended: int
    num_accepted: int
    num_distinct: int
    num_novel: int
    num_passed: int
    """Ended, accepted, in no training document and equal to no earlier answer."""
    mean_tokens: dict[Kind, float]
    coefficient_of_variation: float
    """Of the answers' numbers of tokens, kinds pooled."""


class LossReport(NamedTuple):
    """Held-out loss over answer tokens (EOS included), nats per token."""

    loss: float
    entropy: float
    """The generator's own: the least possible loss."""
    gap_per_answer: dict[Kind, float]
    """Nats per answer above the generator's entropy."""


def load_bundle(directory: Path) -> Bundle:
    """Load a model directory with transformers, in bfloat16."""
    model = transformers.LlamaForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    return Bundle(model.train(False), tokenizer)


def draw_exchanges(seed: int, *, num: int) -> list[Exchange]:
    """Draw exchanges of the three kinds in turn."""
    rng = Random(seed)
    return [draw_exchange(rng, kind=KINDS[index % len(KINDS)]) for index in range(num)]


def chat_prompt(prompt: str, *, tokenizer: transformers.PreTrainedTokenizerFast) -> str:
    """Render one user message by the chat template, up to where the answer starts."""
    messages = [{"role": "user", "content": prompt}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


@torch.inference_mode()
def sample_answers(
    bundle: Bundle, *, exchanges: Sequence[Exchange], seed: int = _SAMPLING_SEED
) -> list[Answer]:
    """Sample one answer to each prompt at temperature 1, all tokens allowed, in one batch."""
    model, tokenizer = bundle
    torch.manual_seed(seed)
    rendered = [chat_prompt(exchange.prompt, tokenizer=tokenizer) for exchange in exchanges]
    inputs = tokenizer(
        rendered,
        add_special_tokens=False,  # the template writes BOS
        padding=True,
        padding_side="left",
        return_token_type_ids=False,
        return_tensors="pt",
    )
    outputs = model.generate(  # type: ignore[misc]  # the stub misses the mixin
        **inputs,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=_MAX_ANSWER_TOKENS,
    )
    eos_id = tokenizer.eos_token_id
    answers = []
    for exchange, row in zip(exchanges, outputs[:, inputs["input_ids"].shape[1] :], strict=True):
        token_ids = row.tolist()
        ended = eos_id in token_ids
        length = token_ids.index(eos_id) if ended else len(token_ids)
        text = str(tokenizer.decode(token_ids[:length]))
        answers.append(Answer(exchange, text, length + ended, ended))
    return answers


def judge(answers: Sequence[Answer], *, training_documents: str) -> SamplingReport:
    """Count what the requirement asks of sampled answers."""
    seen: set[str] = set()
    num_novel = num_passed = 0
    for answer in answers:
        novel = answer.text not in training_documents
        num_novel += novel
        num_passed += answer.accepted and novel and answer.text not in seen
        seen.add(answer.text)
    lengths = [answer.num_tokens for answer in answers]
    return SamplingReport(
        num_prompts=len(answers),
        num_ended=sum(answer.ended for answer in answers),
        num_accepted=sum(answer.accepted for answer in answers),
        num_distinct=len(seen),
        num_novel=num_novel,
        num_passed=num_passed,
        mean_tokens={
            kind: fmean(a.num_tokens for a in answers if a.exchange.kind == kind) for kind in KINDS
        },
        coefficient_of_variation=pstdev(lengths) / fmean(lengths),
    )


@torch.inference_mode()
def measure_loss(bundle: Bundle, *, num_exchanges: int = 300) -> LossReport:
    """Measure the held-out loss on the generator's own answers, with the chat template."""
    model, tokenizer = bundle
    gaps: dict[Kind, list[float]] = {kind: [] for kind in KINDS}
    total_nats = total_entropy = 0.0
    num_tokens = 0
    for exchange in draw_exchanges(_LOSS_SEED, num=num_exchanges):
        prompt = chat_prompt(exchange.prompt, tokenizer=tokenizer)
        prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
        answer_ids = tokenizer.encode(exchange.answer, add_special_tokens=False)
        answer_ids.append(tokenizer.eos_token_id)
        logits = model(input_ids=torch.tensor([prompt_ids + answer_ids])).logits[0]
        predictions = logits[len(prompt_ids) - 1 : -1].float()  # [num_answer_tokens, vocab]
        nats = functional.cross_entropy(predictions, torch.tensor(answer_ids), reduction="sum")
        gaps[exchange.kind].append(nats.item() - exchange.nats)
        total_nats += nats.item()
        total_entropy += exchange.nats
        num_tokens += len(answer_ids)
    return LossReport(
        loss=total_nats / num_tokens,
        entropy=total_entropy / num_tokens,
        gap_per_answer={kind: fmean(values) for kind, values in gaps.items()},
    )


def format_reports(sampling: SamplingReport, loss: LossReport) -> str:
    """Write both reports as Markdown list items."""
    lengths = ", ".join(f"{kind} {mean:.1f}" for kind, mean in sampling.mean_tokens.items())
    gaps = ", ".join(f"{kind} {gap:.3f}" for kind, gap in loss.gap_per_answer.items())
    count = sampling.num_prompts
    return "\n".join(
        (
            f"- Held-out loss: {loss.loss:.4f} nats per answer token (the generator's own entropy, "
            f"the least possible: {loss.entropy:.4f}).",
            f"- Above that entropy, nats per answer: {gaps}.",
            f"- Sampled at temperature 1, all tokens allowed, {count} prompts: "
            f"{sampling.num_passed} passed everything.",
            f"- Ended by EOS {sampling.num_ended}, accepted by the grammar "
            f"{sampling.num_accepted}, distinct {sampling.num_distinct}, "
            f"not in the training text {sampling.num_novel} (each of {count}).",
            f"- Mean tokens per answer, EOS included: {lengths}.",
            f"- Pooled coefficient of variation of the lengths: "
            f"{sampling.coefficient_of_variation:.3f}.",
        )
    )


def check_model(directory: Path, *, num_prompts: int) -> str:
    """Run both checks on a model directory and return the report."""
    bundle = load_bundle(directory)
    exchanges = draw_exchanges(_PROMPT_SEED, num=num_prompts)
    answers = sample_answers(bundle, exchanges=exchanges)
    for answer in islice((a for a in answers if not a.accepted), 8):
        print(f"rejected: {answer.exchange.prompt}\n  {answer.text}", flush=True)
    documents = training_text(directory / "tokenizer.json")
    return format_reports(judge(answers, training_documents=documents), measure_loss(bundle))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Check the bundled model.")
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL_DIR)
    parser.add_argument("--prompts", type=int, default=200)
    arguments = parser.parse_args()
    print(check_model(arguments.model, num_prompts=arguments.prompts))


if __name__ == "__main__":
    main()
