"""The scripts of the bundled model's world: which prompts there are and how they are answered.

Notation: see `grammar`. Rules that keep the world learnable for a very small model: each sentence
of a long answer can occur at one step only, so that the step is plain from the words before it;
what must be copied (hero, thing, place, companion) is mentioned again every sentence or two.
"""

from typing import Literal, NamedTuple

from tools.tiny_model.grammar import Script

Kind = Literal["fact", "description", "story"]
KINDS: tuple[Kind, ...] = ("fact", "description", "story")
"""Kinds of prompt, in increasing order of their answers' length (about 10, 80, 250 tokens)."""


class Topic(NamedTuple):
    """Prompts that ask for the same thing, and the script of the answer."""

    kind: Kind
    prompts: tuple[str, ...]
    answer: Script


_WHERE = Topic(
    "fact",
    (
        "Where is <hero=name>'s <material=material> <thing=thing>?",
        "Where did <hero=name> leave the <material=material> <thing=thing>?",
        "Have you seen <hero=name>'s <material=material> <thing=thing>?",
    ),
    (
        (
            "The <material> <thing> is {preposition} <hero>'s {furniture}.",
            "Look for the <material> <thing> in <hero>'s {room}.",
            "It is <hero>'s <material> <thing> that lies {preposition} the {furniture}.",
        ),
    ),
)

_WHO = Topic(
    "fact",
    (
        "Who has the <material=material> <thing=thing>?",
        "Who keeps the <material=material> <thing=thing> now?",
    ),
    (
        (
            "The {trade} {companion} has the <material> <thing>.",
            "The <material> <thing> is with {companion} in the {room}.",
        ),
    ),
)

_WHEN = Topic(
    "fact",
    (
        "When does <hero=name> leave for <place=place>?",
        "On which day will <hero=name> travel to <place=place>?",
    ),
    (
        (
            "On {weekday} {daypart}, <hero> leaves for <place> with a {temper} {animal}.",
            "At {hour} on {weekday}, <hero> and {companion} leave for <place>.",
        ),
    ),
)

_WHAT = Topic(
    "fact",
    (
        "What is <hero=name> bringing to <place=place>?",
        "What does <hero=name> carry to <place=place>?",
    ),
    (
        (
            "It is a {material} {thing} that <hero> carries to <place>.",
            "A {material} {thing} and some {fruit} for {companion} in <place>.",
        ),
    ),
)

_DESCRIPTION = Topic(
    "description",
    (
        "Describe the <region=region> of <place=place> in <season=season>.",
        "What is the <region=region> of <place=place> like in <season=season>?",
        "Tell me about the <region=region> of <place=place> in <season=season>.",
    ),
    (
        (
            "The <region> of <place> is {mood} in <season>, and a {look} road leads to it.",
            "In <season>, the <region> of <place> is a {mood} place at the end of a {look} road.",
        ),
        (
            "A {stone} {building} stands near the {landmark}, and {birds} {bird_act} on its roof.",
            "Near the {landmark}, {birds} {bird_act} around a {stone} {building}.",
        ),
        (
            "The {traders} of <place> sell {food} and {fruit}, and the air smells of {smell}.",
            "The air of <place> smells of {smell} and {spice}, and the {traders} sell {food}.",
        ),
        (
            "",
            "The oldest house has {number} windows and a {colour} door.",
        ),
        (
            "On {weekday} {daypart}s, people bring {music} to the square and {dance} for hours.",
            "Every {weekday}, old friends play {game} in the square while others {dance}.",
        ),
        (
            "",
            "If there is {storm}, the {trade} lends {cloth} to the guests.",
        ),
        (
            "Late at night, {number} {lamps} {glow}, and the <region> of <place> falls asleep.",
            "When {number} {lamps} {glow} at last, the <region> of <place> falls asleep.",
        ),
    ),
)

_LOST_THING = Topic(
    "story",
    (
        "Tell me a story about <hero=name> and the <material=material> <thing=thing>.",
        "Write a story about <hero=name> and a <material=material> <thing=thing>.",
        "Please tell me how <hero=name> lost a <material=material> <thing=thing>.",
    ),
    (
        (
            "Once upon a time, a {temper} {trade} named <hero> lived in the {region} of {place}.",
            "Long ago, in the {region} of {place}, there lived a {temper} {trade} named <hero>.",
        ),
        (
            "<hero> owned a <material> <thing>, which had been a present from <her> {relative}.",
            "<Her> {relative} had given <hero> a <material> <thing> one {season} day.",
        ),
        (
            "Every {daypart}, <she> put the <material> <thing> {preposition} the {furniture} "
            "and {sang} a {tune} tune.",
        ),
        (
            "But one {weather} {weekday}, the <material> <thing> was gone.",
            "Then came a {weather} {weekday}, and the <material> <thing> was gone.",
        ),
        (
            "<hero> searched the {room}, the {corner} and the {furniture}, but found only a "
            "{colour} {gift}.",
        ),
        (
            "So <hero> packed some {food} and a bag of {fruit} and walked {direction} "
            "towards the {landmark}.",
        ),
        (
            "After {number} miles, <hero> met <friend=companion>, a {temper} {trade} with "
            "a {animal} called {animal_name}.",
        ),
        (
            '"I saw a {bird} carry something {colour} over the {building}," {said} <friend>.',
            '"Something {colour} fell near the {building} at {hour}," {said} <friend>.',
        ),
        (
            "Together, <hero> and <friend> followed the {landmark} until the {storm} began.",
            "<hero> and <friend> crossed the {stone} bridge together and climbed {pace}.",
        ),
        (
            "",
            "They waited under a {height} {tree} and told {tune} stories until {hour}.",
        ),
        ("At last, <friend> pointed at a {height} {tree} and {told} that there was a nest.",),
        ("There, between {lining} and {colour} threads, lay the <material> <thing>.",),
        (
            "A young <thief=bird> sat beside it and looked at <hero> {pace}.",
            "Beside it sat a <thief=bird>, which looked at <hero> and did not move.",
        ),
        ("<hero> was not angry, for the <thief> had only wanted a {mood} home.",),
        ("<She> gave the <thief> a {colour} {gift} and {pace} took the <material> <thing> back.",),
        ("That {daypart}, <friend> cooked {food} with {spice}, and <hero> {sang} until {hour}.",),
        (
            "From then on, <hero> kept the <material> <thing> in the {room} and visited "
            "<friend> every {weekday}.",
        ),
        (
            "And the <thief>, they say, still sings each {daypart}.",
            "And whenever the <thief> flew past, <hero> felt {feeling}.",
        ),
    ),
)

_JOURNEY = Topic(
    "story",
    (
        "Tell me a story about <hero=name>'s journey to <place=place>.",
        "Write a story in which <hero=name> travels to <place=place>.",
        "Please tell me how <hero=name> went to <place=place>.",
    ),
    (
        (
            "There once was a {temper} {trade} named <hero>, who had never been to <place>.",
            "Many years ago, a {temper} {trade} named <hero> dreamed of going to <place>.",
        ),
        (
            "One {season} {daypart}, a {bird} brought a {message} from <her> {relative} "
            "in <place>.",
            "On a {weather} {weekday}, a {message} arrived for <hero> from <her> {relative} "
            "in <place>.",
        ),
        ('"Come to <place> before {weekday}," it read, "and bring the {material} <thing=thing>."',),
        (
            "<hero> found the <thing> {preposition} the {furniture}, wrapped it in {colour} cloth "
            "and set out {pace}.",
        ),
        (
            "",
            "The {trade} gave <him> {food} for the road and wished <him> {wish}.",
        ),
        (
            "The road to <place> led {direction} through a {look} valley full of {smell}.",
            "The road to <place> ran {direction} past {number} farms and a {look} hill.",
        ),
        (
            "At the {landmark}, <hero> found a {animal} that was stuck in the mud.",
            "Behind the {building}, <hero> found a {animal} that had lost its way.",
        ),
        (
            "<She> helped it {pace}, and its owner, the {trade} <friend=companion>, "
            "was very {feeling}.",
        ),
        (
            '"Nobody should walk to <place> alone," {said} <friend>, "so let us go together."',
            '"I know a {look} path to <place>," {said} <friend>, "and I have {fruit} to share."',
        ),
        (
            "In the {daypart}, the {storm} came, and <hero> and <friend> hid in a {shelter}.",
            "When the {storm} came, <hero> and <friend> slept under a {height} {tree}.",
        ),
        (
            "",
            "<friend> made a fire of {tree} wood, and <hero> told a {tune} tale about {birds}.",
        ),
        ("The next day, they had to pass a {height} gate guarded by {number} {birds}.",),
        (
            "<hero> offered them some {food}, and the birds {pace} let <him> and <friend> pass.",
            "<friend> {sang} a {tune} song, and the birds {pace} made way for <hero>.",
        ),
        ("At {hour} on {weekday}, they saw the {number} {colour} roofs of <place>.",),
        ("<Her> {relative} was waiting with {music} and a pot of {food}.",),
        (
            "<hero> unwrapped the <thing> and put it {preposition} the {corner}, where everyone "
            "could see it.",
        ),
        (
            "<hero> stayed in <place> for {number} weeks and learned to be a {trade}.",
            "<hero> stayed in <place> all {season} and planted a {tree} by the {landmark}.",
        ),
        ("And each {season}, <hero> and <friend> walk the road to <place> again.",),
    ),
)

TOPICS: tuple[Topic, ...] = (_WHERE, _WHO, _WHEN, _WHAT, _DESCRIPTION, _LOST_THING, _JOURNEY)
"""All topics; several of a kind are equally likely."""
