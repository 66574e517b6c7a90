"""The text that the bundled model learns: prompts with answers, and the check of an answer.

Pure and seeded: every function that draws takes a `random.Random` and depends on nothing else.
Used by `train` (training text), `check` (prompts and verdicts) and the tests. No torch.
"""

from collections.abc import Iterator
from random import Random
from typing import Literal, NamedTuple

from tools.tiny_model.grammar import Grammar
from tools.tiny_model.lexicon import TABLES, derive
from tools.tiny_model.scripts import KINDS, TOPICS, Kind, Topic

_GRAMMAR = Grammar(TABLES, derive)

_SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are a friendly storyteller.",
    "Answer briefly and kindly.",
    "You are a careful guide who knows every village.",
    "Be concise.",
)


class Exchange(NamedTuple):
    """One question and its answer."""

    kind: Kind
    prompt: str
    answer: str
    nats: float
    """Minus the natural logarithm of the answer's probability, given the prompt."""


class Conversation(NamedTuple):
    """One document of the training text."""

    form: Literal["chat", "raw"]
    """`chat`: rendered by the chat template; `raw`: prompt, line break, answer."""
    system: str
    """The system message; empty for none."""
    exchanges: tuple[Exchange, ...]


def draw_exchange(rng: Random, *, kind: Kind | None = None) -> Exchange:
    """Draw a prompt and its answer, of a given kind or of a random one; advances `rng`."""
    chosen: Kind = rng.choice(KINDS) if kind is None else kind
    topic = rng.choice([topic for topic in TOPICS if topic.kind == chosen])
    prompt = _GRAMMAR.expand(rng.choice(topic.prompts), env={}, rng=rng)
    answer = _GRAMMAR.expand_script(topic.answer, env=prompt.env, rng=rng)
    return Exchange(chosen, prompt.text, answer.text, answer.nats)


def draw_conversation(rng: Random) -> Conversation:
    """Draw a document: mostly one exchange, at times several, a system message or no template."""
    if rng.random() < 0.1:
        return Conversation("raw", "", (draw_exchange(rng),))
    system = _draw_system_message(rng) if rng.random() < 0.2 else ""
    num_exchanges = rng.choice((1, 1, 1, 2, 3))
    return Conversation("chat", system, tuple(draw_exchange(rng) for _ in range(num_exchanges)))


def accepts(prompt: str, answer: str) -> bool:
    """Say whether the grammar can write exactly this answer to this prompt."""
    return any(
        _GRAMMAR.match_script(topic.answer, answer, env=env)
        for topic in TOPICS
        for template in topic.prompts
        for env in _GRAMMAR.match(template, prompt)
    )


def topics_of(prompt: str) -> Iterator[Topic]:
    """Yield the topics that one of whose prompts this is (none: the model never learnt it)."""
    for topic in TOPICS:
        if any(True for template in topic.prompts for _ in _GRAMMAR.match(template, prompt)):
            yield topic


def _draw_system_message(rng: Random) -> str:
    """Draw a system message: a usual one, or words at random, as users write anything there."""
    if rng.random() < 0.5:
        return rng.choice(_SYSTEM_MESSAGES)
    tables = list(TABLES.values())
    return " ".join(rng.choice(rng.choice(tables)) for _ in range(rng.randint(3, 40)))
