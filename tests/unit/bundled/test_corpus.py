"""The bundled model's text generator and the acceptor that shares its tables."""

import math
import re
from collections.abc import Callable
from random import Random

import pytest

from tools.tiny_model.corpus import Exchange, accepts, draw_conversation, draw_exchange, topics_of
from tools.tiny_model.grammar import Reference, Slot, parse_template
from tools.tiny_model.lexicon import TABLES, derive
from tools.tiny_model.scripts import KINDS, TOPICS, Kind, Topic


def _draw(num: int, *, seed: int) -> list[Exchange]:
    rng = Random(seed)
    return [draw_exchange(rng) for _ in range(num)]


def test_generator_is_deterministic() -> None:
    rng, again, other = Random(1), Random(1), Random(2)
    documents = [draw_conversation(rng) for _ in range(50)]
    assert documents == [draw_conversation(again) for _ in range(50)]
    assert documents != [draw_conversation(other) for _ in range(50)]


def test_acceptor_accepts_what_the_generator_writes() -> None:
    refused = [e for e in _draw(4000, seed=3) if not accepts(e.prompt, e.answer)]
    assert refused == []


def _drop_word(exchange: Exchange, rng: Random) -> str:
    words = exchange.answer.split(" ")
    del words[rng.randrange(len(words))]
    return " ".join(words)


def _cut_end(exchange: Exchange, rng: Random) -> str:
    return exchange.answer[: rng.randrange(len(exchange.answer))]


def _cut_last_sentence(exchange: Exchange, _: Random) -> str:
    return exchange.answer.rpartition(". ")[0] + "."


def _add_sentence(exchange: Exchange, _: Random) -> str:
    return exchange.answer + " " + exchange.answer.rpartition(". ")[2]


def _shuffle_words(exchange: Exchange, rng: Random) -> str:
    words = exchange.answer.split(" ")
    while words == exchange.answer.split(" "):
        rng.shuffle(words)
    return " ".join(words)


def _salad(exchange: Exchange, rng: Random) -> str:
    tables = list(TABLES.values())
    return " ".join(rng.choice(rng.choice(tables)) for _ in exchange.answer.split(" "))


def _answer_something_else(_: Exchange, rng: Random) -> str:
    return draw_exchange(rng).answer


def _rename_once(exchange: Exchange, rng: Random) -> str:
    """Give one mention of a name from the prompt another name."""
    mentioned = [n for n in TABLES["name"] + TABLES["place"] if n in exchange.prompt.split(" ")]
    spots = [m for n in mentioned for m in re.finditer(rf"\b{n}\b", exchange.answer)]
    if not spots:  # nothing to rename: the empty answer is wrong as well
        return ""
    spot = rng.choice(spots)
    return exchange.answer[: spot.start()] + "Zebedee" + exchange.answer[spot.end() :]


@pytest.mark.parametrize(
    "mutate",
    [
        _drop_word,
        _cut_end,
        _cut_last_sentence,
        _add_sentence,
        _shuffle_words,
        _salad,
        _answer_something_else,
        _rename_once,
    ],
)
def test_acceptor_rejects_mutated_answers(mutate: Callable[[Exchange, Random], str]) -> None:
    rng = Random(4)
    for exchange in _draw(400, seed=5):
        mutated = mutate(exchange, rng)
        assert not accepts(exchange.prompt, mutated), (exchange.prompt, mutated)


def test_acceptor_rejects_wrong_pronoun() -> None:
    rng = Random(6)
    num_changed = 0
    while num_changed < 50:
        exchange = draw_exchange(rng, kind="story")
        for mine, other in ((" she ", " he "), (" he ", " she ")):
            if mine in exchange.answer:
                assert not accepts(exchange.prompt, exchange.answer.replace(mine, other, 1))
                num_changed += 1


def test_acceptor_rejects_foreign_prompt() -> None:
    exchange = draw_exchange(Random(7))
    assert list(topics_of("What is the capital of France?")) == []
    assert not accepts("What is the capital of France?", exchange.answer)


@pytest.mark.parametrize(("kind", "low", "high"), [("fact", 6, 14), ("description", 55, 100)])
def test_lengths_of_short_kinds(kind: Kind, low: int, high: int) -> None:
    rng = Random(8)
    num_words = [len(draw_exchange(rng, kind=kind).answer.split()) for _ in range(300)]
    assert low <= min(num_words)
    assert max(num_words) <= high


def test_entropy_counts_all_choices() -> None:
    """An answer to "Who has ..." takes one of two sentences with two free words each."""
    rng = Random(9)
    who = next(topic for topic in TOPICS if "Who" in topic.prompts[0])
    drawn = [draw_exchange(rng, kind="fact") for _ in range(1000)]
    nats = {round(e.nats, 6) for e in drawn if who in topics_of(e.prompt)}
    expected = {
        round(math.log(len(who.answer[0]) * len(TABLES[first]) * len(TABLES["companion"])), 6)
        for first in ("trade", "room")
    }
    assert nats == expected


def test_kinds_all_have_topics() -> None:
    assert {topic.kind for topic in TOPICS} == set(KINDS)


@pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.prompts[0])
def test_templates_name_known_tables_and_bound_variables(topic: Topic) -> None:
    for prompt in topic.prompts:
        bound: set[str] = set()
        steps = ((prompt,), *topic.answer)
        for step in steps:
            bindings = [_bindings(template, bound) for template in step if template]
            assert len({frozenset(b) for b in bindings}) == 1 or "" in step or not any(bindings)
            bound |= set().union(*bindings)


def _bindings(template: str, bound: set[str]) -> set[str]:
    """Return what a template binds, after checking that it uses nothing unbound."""
    new: set[str] = set()
    for part in parse_template(template):
        if isinstance(part, Slot):
            assert part.table in TABLES, template
            if part.variable:
                new |= set(derive(part.variable, TABLES[part.table][0]))
        elif isinstance(part, Reference):
            assert part.variable in bound | new, template
    return new


def test_tables_have_no_repeated_entries() -> None:
    for name, entries in TABLES.items():
        assert len(set(entries)) == len(entries), name


def test_article_a_fits_all_words() -> None:
    rng = Random(10)
    for _ in range(300):
        answer = draw_exchange(rng).answer
        assert not re.search(r"\b[Aa] [aeio]", answer), answer
