# ruff: noqa: E501 - templates read best on one line
from __future__ import annotations

import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from support.tokenizers_made import write_config
from transformers.utils.chat_template_utils import render_jinja_template

from lightserve.bundled import BUNDLED_MODEL_DIR
from lightserve.errors import InvalidRequest, ModelLoadError
from lightserve.tokenization import conversation
from lightserve.tokenization.chat_template import ChatTemplate, TemplateSource, find_chat_template
from lightserve.tokenization.conversation import ChatMessage, Conversation
from lightserve.tokenization.template_sandbox import TemplateSandbox

USER = [ChatMessage("user", "hi")]


def _template(text: str, **options: float) -> ChatTemplate:
    source = TemplateSource(text, "template")
    return ChatTemplate(source, special_tokens={"bos_token": "<s>"}, **options)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m['content'] }}{% endfor %}",
            "<s>[user]hi",
        ),
        ("{% if add_generation_prompt %}go{% endif %}", "go"),
        ("  {% for m in messages %}\n  x\n  {% endfor %}\n", "  x\n"),  # trim and lstrip blocks
        ("{% for m in messages %}a{% break %}{% endfor %}", "a"),
        (
            "{% for m in messages %}{{ loop.index0 }}{{ loop.last }}{{ loop.length }}{% endfor %}",
            "0True1",
        ),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "hi"}]'),
        ("{{ '<é>' | tojson }}", '"<é>"'),  # neither HTML nor ASCII escapes
        ("{{ messages[0].content.strip().upper().replace('H', 'J') }}", "JI"),
        ("{{ messages | map(attribute='content') | join('+') }}", "hi"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
        (
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
            "1",
        ),
        ("{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f('a') ~ f('b') }}", "<a><b>"),
        ("{% set x %}block{% endset %}{{ x | trim }}", "block"),
        ("{% generation %}marked{% endgeneration %}", "marked"),
        ("{{ strftime_now('%Y') | int > 2000 }}", "True"),
        ("{{ tools is none and documents is none }}", "True"),
        ("{{ (messages + messages) | length }}{{ 'ab' * 2 }}{{ 2 ** 3 }}{{ 7 % 4 }}", "2abab83"),
        (
            "{{ '{} {}'.format('a', 'b') }}{{ '-'.join(['x', 'y']) }}{{ 'a\nb' | indent(2) }}",
            "a bx-ya\n  b",
        ),
    ],
)
def test_what_templates_may_use(text: str, expected: str) -> None:
    assert _template(text).render(Conversation(messages=USER)) == expected


JINJAS_OWN = [
    "{{ [1, 2, 3.5] | sum }}|{{ [messages[0].role] | map('length') | sum }}|{{ [[1], [2]] | sum(start=[]) }}",
    "{{ '%s has %d (%.2f%%), %-5s|%05d|%x' | format('x', 3, 2.5, 'ab', 42, 255) }}",
    "{{ '%(a)s-%(b)s' | format(a=1, b='é') }}{{ '%s and %r' % ('x', 'y') }}{{ '%s' % messages[0].content }}",
    "{% for row in range(7) | batch(3, '-') %}{{ row | join(',') }};{% endfor %}",
    "{% for row in range(7) | slice(3, '-') %}{{ row | join(',') }};{% endfor %}",
    "{{ 'some words, here' | wordcount }}{{ 'ab' | center(9) }}|{{ 'long text here' | truncate(9, True, '~', 0) }}",
    "{{ 'x'.center(5) ~ 'x'.ljust(4) ~ 'x'.rjust(4) ~ '7'.zfill(3) ~ 'ab'.isprintable() }}",
    "{% set j = joiner(', ') %}{% for m in messages %}{{ j() }}{{ m.role }}{% endfor %}",
    "{% set c = cycler('odd', 'even') %}{% for i in range(3) %}{{ c.next() }}{% endfor %}{{ c.current }}",
    "{{ '{}-{x}-{0}'.format(1, x=2) if false else '{0}-{x}-{0}'.format(1, x=2) }}",
    "{{ 'a b&c/é' | urlencode }}{{ {'class': 'x', 'id': none} | xmlattr }}{{ 1234567 | filesizeformat }}",
    "{{ '<a>' | forceescape }}{{ ['one'] | random }}",
    "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{{ messages[0].role }}{% endgeneration %}{{ x }}",
    "{{ 18446744073709551616 }}{{ [2 ** 64, -1e30] | tojson }}{{ messages[0].big }}{{ messages[0].big | string }}",
]


@pytest.mark.parametrize("text", JINJAS_OWN)
def test_jinjas_own_tools_give_what_they_give_transformers(text: str) -> None:
    values = {"big": 10**30}
    messages = [{"role": "user", "content": "hi", **values}]
    expected = render_jinja_template([messages], chat_template=text)[0][0]
    given = Conversation(messages=[ChatMessage("user", "hi", values)])
    assert _template(text).render(given) == expected


BOMBS = {
    "dunder-walk": "{{ ''.__class__.__mro__ }}",
    "dunder-by-attr-filter": "{{ ('' | attr('__class__')).__mro__ }}",
    "dunder-in-format": "{{ '{0.__class__.__mro__}'.format(1) }}",
    "mutation": "{{ messages.append(1) }}",
    "nested-loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "nested-loops-without-calls": "{% set r = range(99999) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
    "big-string": "{{ 'a' * 10**9 }}",
    "big-list": "{{ [1] * 10**9 }}",
    "endless-macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "exponential-macro": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "doubling-concat": "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling-plus": "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling-block": "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(99) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "doubling-list": "{% set ns = namespace(x=['a']) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "namespace-graph": "{% set ns = namespace(x=1) %}{% for i in range(60) %}{% set ns.x = namespace(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "squaring": "{% set ns = namespace(n=2) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "center": "{{ 'a'.center(10**9) }}",
    "center-filter": "{{ 'a' | center(10**9) }}",
    "rjust": "{{ 'a'.rjust(10**9) }}",
    "zfill": "{{ 'a'.zfill(10**9) }}",
    "batch": "{{ [1] | batch(10**9, 'x') | list }}",
    "slice": "{{ [1] | slice(10**9, 'x') | list }}",
    "sum": "{% set x = [[1]] * 99999 %}{{ (x * 10) | sum(start=x) | length }}",
    "format-filter": "{{ ('%s' * 99999) | format('a' * 900000) }}",
    "format-filter-width": "{{ '%999999999d' | format(1) }}",
    "format-names": "{{ ('%(x)s' * 99999) | format(x='a' * 900000) }}",
    "format-fields": "{{ ('{0}' * 99999).format('a' * 900000) }}",
    "format-named-fields": "{{ ('{x}' * 99999).format(x='a' * 900000) }}",
    "percent-star": "{{ '%*d' % (999999999, 1) }}",
    "percent-precision": "{{ '%.999999999f' % 1 }}",
    "percent-many": "{{ ('%9999999s' * 999) % ((1,) * 999) }}",
    "cycler": "{% set c = cycler('a' * 900000) %}{% for i in range(99999) %}{{ c.next() }}{% endfor %}",
    "percent-width": "{{ '%999999999d' % 1 }}",
    "format-width": "{{ '{:999999999}'.format(1) }}",
    "range": "{{ range(10**9) | list }}",
    "replace": "{% set x = 'a' * 900000 %}{{ x.replace('a', x) }}",
    "replace-filter": "{% set x = 'a' * 900000 %}{{ x | replace('a', x) }}",
    "join": "{{ ('a' * 900000).join(['b', 'b', 'b']) }}",
    "join-filter": "{% set x = 'a' * 900000 %}{{ ['b', 'b', 'b'] | join(x) }}",
    "indent": "{{ 'a\nb' | indent(10**9) }}",
    "json-indent": "{{ [1] | tojson(indent=10**9) }}",
    "loop-in-macro": "{% set x = 'a' * 900000 %}{% macro g() %}{% for i in range(99999) %}{{ x }}{% endfor %}{% endmacro %}{{ g() }}",
    "constant-in-loop": "{% for i in range(99999) %}" + "a" * 1000 + "{% endfor %}",
    "recursive-loop": "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "lipsum": "{{ lipsum(10**6) }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}",
    "syntax": "{% for %}",
    "unknown-tag": "{% evil %}",
}


@pytest.mark.parametrize("text", BOMBS.values(), ids=BOMBS.keys())
def test_bombs_are_refused_when_loading(text: str) -> None:
    with pytest.raises(ModelLoadError, match="template: chat template cannot be used") as caught:
        _template(text, deadline_s=0.2)
    assert "MemoryError" not in str(caught.value)  # a limit must come first


@pytest.mark.parametrize("name", ["join", "join-filter"])
def test_what_joins_too_much_is_refused_before_it_is_joined(name: str) -> None:
    """What any filter returns is bounded as well, but by then it has been made."""
    with pytest.raises(ModelLoadError, match="joins into too long a text"):
        _template(BOMBS[name])


@pytest.mark.parametrize("text", BOMBS.values(), ids=BOMBS.keys())
def test_bombs_set_off_by_a_message_are_refused(text: str) -> None:
    armed = "{% if messages[0].content == 'boom' %}" + text + "{% else %}ok{% endif %}"
    try:
        template = _template(armed, deadline_s=0.2)
    except ModelLoadError:
        return  # refused even earlier
    with pytest.raises(InvalidRequest) as caught:
        template.render(Conversation(messages=[ChatMessage("user", "boom")]))
    assert caught.value.param == "messages"
    assert template.render(Conversation(messages=USER)) == "ok"


KEPT = range(400)
HOARDS = {
    "slices": "{% set s = 'x' * 1000000 %}" + "".join(f"{{% set a{n} = s[1:] %}}" for n in KEPT),
    "slices-of-lists": "{% set s = [1] * 400000 %}"
    + "".join(f"{{% set a{n} = s[1:] %}}" for n in KEPT),
    "repetitions": "".join(f"{{% set a{n} = 'x' * 1000000 %}}" for n in KEPT),
    "sums": "{% set s = 'x' * 999999 %}" + "".join(f"{{% set a{n} = s + 'y' %}}" for n in KEPT),
    "splits": "{% set s = 'x ' * 400000 %}"
    + "".join(f"{{% set a{n} = s.split(' ') %}}" for n in KEPT),
    "a filter that map applies": "{{ range(3000) | map('string') | map('replace', '', 'y' * 200000)"
    " | list | length }}",
    "separators": "{{ ([1] * 300000) | tojson(separators=('x' * 1000000, ':')) }}",
    "indents": "{% set ns = namespace(v=[1] * 2000) %}{% for i in range(400) %}"
    "{% set ns.v = [ns.v] %}{% endfor %}{{ ns.v | tojson(indent=16) }}",
    "a recursion": "{% macro f(x) %}{% set y = x + 'a' %}{{ f(y) }}{% endmacro %}"
    "{{ f('x' * 990000) }}",
    "searches": "{{ ('a' * 900000).rfind('b' + 'a' * 450000) }}",
    "strips": "{{ ('a' * 400000).strip('b' * 900000 ~ 'a') }}",
    "trims": "{{ ('a' * 400000) | trim('b' * 900000 ~ 'a') }}",
    "text": "{{ 1 }}" * 40_000,
    "nodes": "{% set a = 1 %}" * 17_000,
}
"""What is never written, is still kept, or takes one operation too long."""


@pytest.mark.parametrize("name", HOARDS)
def test_what_a_template_keeps_is_bounded(name: str) -> None:
    """Memory of a render, whatever becomes of it, and of what is refused before it is compiled."""
    tracemalloc.start()
    try:
        with pytest.raises(ModelLoadError, match="chat template cannot be used"):
            _template(HOARDS[name])
        assert tracemalloc.get_traced_memory()[1] <= 200 * 2**20
    finally:
        tracemalloc.stop()


def test_probes_of_a_template_are_bounded_in_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may be just within the limits; without them the template is used as it is."""
    num_renders = [0]
    render = TemplateSandbox.render

    def counting(*args: Any, **kwargs: Any) -> str:
        num_renders[0] += 1
        return render(*args, **kwargs)

    monkeypatch.setattr(TemplateSandbox, "render", counting)
    text = "{% for m in messages %}{{ m.content }}{% endfor %}"
    _template(text)
    most, num_renders[0] = num_renders[0], 0
    monkeypatch.setattr(conversation, "PROBES_S", -1.0)
    template = _template(text)
    assert num_renders[0] == 4 < most, "two of each of the forms with tools and without"
    assert template.render(Conversation(messages=USER)) == "hi"


def test_a_text_that_grows_with_each_message_is_within_the_limits() -> None:
    template = _template(
        "{% set ns = namespace(text='') %}{% for m in messages %}"
        "{% set ns.text = ns.text + m.content[1:] | trim %}{% endfor %}{{ ns.text }}"
    )
    messages = [ChatMessage("user", " " + "x" * 500)] * 400
    assert template.render(Conversation(messages=messages)) == "x" * 200_000


def test_one_bomb_does_not_disturb_other_threads() -> None:
    nested = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    template = _template(
        "{% if messages[0].content == 'boom' %}" + nested + "{% endif %}ok", deadline_s=0.3
    )
    failures: list[Exception] = []

    def explode() -> None:
        try:
            template.render(Conversation(messages=[ChatMessage("user", "boom")]))
        except InvalidRequest as error:
            failures.append(error)

    thread = threading.Thread(target=explode)
    thread.start()
    texts = [template.render(Conversation(messages=USER)) for _ in range(50)]
    thread.join(timeout=30)
    assert len(failures) == 1
    assert set(texts) == {"ok"}


def test_rejections_reach_the_client_and_do_not_keep_the_server_from_starting() -> None:
    template = _template("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        template.render(Conversation(messages=USER))


def test_internal_errors_do_not_reach_the_client() -> None:
    template = _template("{{ messages[0].content.nothing.more if messages[0].content == 'x' }}")
    with pytest.raises(InvalidRequest) as caught:
        template.render(Conversation(messages=[ChatMessage("user", "x")]))
    assert caught.value.message.endswith("it fails on them")


def test_a_long_conversation_stays_within_the_limits() -> None:
    template = _template(
        "{% for m in messages %}{{ m.content }}"
        "{% if loop.index0 == messages | length - 1 %}!{% endif %}{% endfor %}"
    )
    assert template.render(Conversation(messages=[ChatMessage("user", "x" * 400)] * 2000)).endswith(
        "x!"
    )


def test_messages_beyond_the_output_limit_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="1000000"):
        _template("{{ messages[0].content }}").render(
            Conversation(messages=[ChatMessage("user", "x" * 1_000_001)])
        )


def test_where_templates_are_found(tmp_path: Path) -> None:
    assert find_chat_template(tmp_path) is None
    write_config(tmp_path, "tokenizer_config.json", {"chat_template": "one"})
    assert find_chat_template(tmp_path) == TemplateSource(
        "one", f"{tmp_path}/tokenizer_config.json: key 'chat_template'"
    )
    named = [{"name": "rag", "template": "x"}, {"name": "default", "template": "two"}]
    write_config(tmp_path, "tokenizer_config.json", {"chat_template": named})
    found = find_chat_template(tmp_path)
    assert found is not None
    assert found.text == "two"
    (tmp_path / "chat_template.jinja").write_text("three")
    found = find_chat_template(tmp_path)
    assert found is not None
    assert found.text == "three"
    (tmp_path / "mine.jinja").write_text("four")
    found = find_chat_template(tmp_path, str(tmp_path / "mine.jinja"))
    assert found is not None
    assert found.text == "four"


def qwen(path: Path, form: str, *messages: ChatMessage) -> str:
    """Return a conversation as the files of a first Qwen-VL say."""
    write_config(path, "generation_config.json", {"chat_format": form})
    source = find_chat_template(path)
    assert source is not None
    assert source.origin == f"{path}/generation_config.json: key 'chat_format'"
    template = ChatTemplate(source, special_tokens={})
    assert not template.option_names, "a request's option would change nothing"
    return template.render(Conversation(messages=list(messages)))


SEEN = ChatMessage("user", "Old\nNew?", parts=("Old ", None, "\n", None, "New?"))
PICTURES = "Old Picture 1: <img><imgpad></img>\n\nPicture 2: <img><imgpad></img>\nNew?"  # as the authors' `from_list_format`


def test_chats_of_qwen_are_those_of_its_authors_program(tmp_path: Path) -> None:
    """Turns by `make_context`, and in each the images by `from_list_format`."""
    turns = (ChatMessage("user", "Hi"), ChatMessage("assistant", "Yes?"))
    assert qwen(tmp_path, "chatml", *turns, SEEN) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nYes?<|im_end|>\n"
        f"<|im_start|>user\n{PICTURES}<|im_end|>\n<|im_start|>assistant\n"
    )
    system = ChatMessage("system", "Be brief.")
    assert qwen(tmp_path, "chatml", system, SEEN).startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOld Picture 1: "
    )
    with pytest.raises(InvalidRequest, match="it has system, user and assistant alone"):
        qwen(tmp_path, "chatml", *turns, ChatMessage("tool", "x"))


def test_a_qwen_that_is_none_for_chats_reads_one_message(tmp_path: Path) -> None:
    write_config(tmp_path, "generation_config.json", {"chat_format": "raw"})
    assert find_chat_template(tmp_path) is None, "a text model: completions have all of it"
    write_config(tmp_path, "config.json", {"visual": {}})
    assert qwen(tmp_path, "raw", SEEN) == PICTURES
    with pytest.raises(InvalidRequest, match="it has one message, of a user"):
        qwen(tmp_path, "raw", SEEN, ChatMessage("assistant", "A"), SEEN)
    write_config(tmp_path, "generation_config.json", {"chat_format": "other"})
    assert find_chat_template(tmp_path) is None


@pytest.mark.parametrize("value", [3, [], [{"name": "rag", "template": "x"}], [1]])
def test_malformed_templates_name_the_key(tmp_path: Path, value: object) -> None:
    write_config(tmp_path, "tokenizer_config.json", {"chat_template": value})
    with pytest.raises(ModelLoadError, match="chat_template"):
        find_chat_template(tmp_path)


def test_bundled_template_names_each_role_once() -> None:
    source = find_chat_template(BUNDLED_MODEL_DIR)
    assert source is not None
    template = ChatTemplate(source, special_tokens={"bos_token": "B", "eos_token": "E"})
    text = template.render(
        Conversation(messages=[ChatMessage("system", "Sys"), ChatMessage("user", "Question")])
    )
    assert "Sys" in text
    assert text.count("Question") == 1
