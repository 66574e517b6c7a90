"""How families of models write reasoning and tool calls into their text, and which one a model has.

One table of each. A format is chosen by what stands in the model's chat template, unless
--tool-call-parser and --reasoning-parser name one. What a template says nothing of is not looked
for. Sources: the chat templates of the repositories, as they are published.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

AUTO, NONE, HARMONY = "auto", "none", "harmony"


class Body(Enum):
    """How one call is written."""

    OBJECT = 'JSON: {"name": …, "arguments": {…}}'
    NAMED = "the name, a mark, and JSON of the arguments"
    OBJECT_OR_NAMED = "either of them"
    PYTHON = "name(key=value, …)"
    TAGS = "the name, and each argument between tags"
    BARE = "the name, and an object whose keys are bare and whose strings stand between marks"
    MESSAGE = "a message on a channel: see `frontend/harmony.py`"


class ArgumentTags(NamedTuple):
    """Tags around the arguments of `Body.TAGS`."""

    key: str
    key_end: str
    value: str
    value_end: str
    end: str
    """End of the call."""
    kind: str = ""
    """Between the key and `true` where the value is a string, or `false` where it is JSON."""


class Written(NamedTuple):
    """Text around names and arguments where a grammar writes calls."""

    before: str
    between: str
    """Name and arguments."""
    after: str
    separator: str
    """Separator of two calls."""
    start: str = ""
    end: str = ""


class CallFormat(NamedTuple):
    """How calls stand in a text."""

    body: Body
    signs: tuple[tuple[str, ...], ...]
    """A chat template that has all marks of one of these is of this format, …"""
    not_with: tuple[str, ...] = ()
    """… unless it has one of these."""
    openings: tuple[str, ...] = ()
    """Each begins calls wherever it stands."""
    at_start: bool = False
    """An answer may begin with a call that nothing opens."""
    before: tuple[str, ...] = ()
    """Text without meaning that may stand before a call."""
    name_ends: tuple[str, ...] = ()
    """Marks behind the name, one of which has to follow it."""
    name_start: str = ""
    """Before the name."""
    id_mark: str = ""
    """Behind the name an id may stand, with this in front, up to one of `name_ends`."""
    tags: ArgumentTags | None = None
    behind: tuple[str, ...] = ()
    """Text without meaning that may stand behind a call."""
    goes_on: bool = False
    """Further calls may follow one at once, without an opening of their own."""
    marks: tuple[str, ...] = ()
    """Tokens that are part of the text, even if the tokenizer has them as special ones."""
    call_id: str = "call_{random:.24}"
    """Ids of calls as the template takes them, of `random` letters and digits, the tool's `name`
    and the call's `number` in its conversation."""
    written: Written | None = None
    """None: what a grammar asks for is written as `llama3_json` has it."""


_OBJECT = Written('{"name": "', '", "arguments": ', "}", ", ")
_BLANK = "\u2581"


def _deepseek(words: str) -> str:
    """Return a token of DeepSeek's: a full-width bar at both ends, and blanks of SentencePiece."""
    return f"<\uff5c{words.replace(' ', _BLANK)}\uff5c>"


_CALLS = _deepseek("tool calls begin"), _deepseek("tool calls end")
_CALL, _END = _deepseek("tool call begin"), _deepseek("tool call end")
_SEP = _deepseek("tool sep")
_DEEPSEEK = CallFormat(
    Body.NAMED,
    signs=((_CALLS[0], "```json"),),
    openings=(_CALLS[0],),
    before=(_CALL, f"function{_SEP}"),
    name_ends=("\n```json\n", _SEP),
    behind=("```", _END, _CALLS[1]),
    goes_on=True,
    marks=(*_CALLS, _CALL, _SEP, _END),
    written=Written(
        f"{_CALL}function{_SEP}", "\n```json\n", f"\n```{_END}", "\n", _CALLS[0], _CALLS[1]
    ),
)
_MISTRAL = CallFormat(
    Body.OBJECT_OR_NAMED,
    signs=(("[TOOL_CALLS]",),),
    openings=("[TOOL_CALLS]",),
    before=("[",),
    name_ends=("[ARGS]",),
    id_mark="[CALL_ID]",
    behind=(",", "]"),
    goes_on=True,
    marks=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    call_id="{random:.9}",
    written=_OBJECT._replace(start="[TOOL_CALLS] [", end="]"),
)
_LIST = CallFormat(
    Body.OBJECT,
    signs=(("<|tool_call|>",),),
    openings=("<|tool_call|>",),
    before=("[",),
    behind=(",", "]", "<|/tool_call|>"),
    goes_on=True,
    marks=("<|tool_call|>", "<|/tool_call|>"),
    written=_OBJECT._replace(start="<|tool_call|>[", end="]"),
)
_ACTION = "<|action_start|><|plugin|>"
_KIMI_CALLS = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_KIMI_CALL = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_DSML = "\uff5cDSML\uff5c"
_MINIMAX = "<minimax:tool_call>", "</minimax:tool_call>"
_QWEN_CODER = CallFormat(
    Body.TAGS,
    signs=(("<function=", "<parameter="),),
    openings=("<tool_call>", "<function="),
    name_start="<function=",
    name_ends=(">",),
    tags=ArgumentTags("<parameter=", ">", "", "</parameter>", "</function>"),
    behind=("</tool_call>",),
    marks=("<tool_call>", "</tool_call>"),
)
BARE_QUOTE = '<|"|>'
"""Mark at both ends of a string of `Body.BARE`."""

CALL_FORMATS: dict[str, CallFormat] = {
    HARMONY: CallFormat(Body.MESSAGE, signs=(("<|channel|>", "<|message|>"),)),
    "kimi_k2": CallFormat(
        Body.NAMED,
        signs=((_KIMI_CALLS[0],), ("tool_declare<|im_middle|>",)),
        openings=(_KIMI_CALLS[0],),
        before=(_KIMI_CALL[0], "functions."),
        name_ends=(_KIMI_CALL[1],),
        id_mark=":",
        behind=(_KIMI_CALL[2], _KIMI_CALLS[1]),
        goes_on=True,
        marks=(*_KIMI_CALLS, *_KIMI_CALL),
        call_id="functions.{name}:{number}",
        written=Written(
            f"{_KIMI_CALL[0]}functions.", f":0{_KIMI_CALL[1]}", _KIMI_CALL[2], "", *_KIMI_CALLS
        ),
    ),
    "deepseek_v32": CallFormat(
        Body.TAGS,
        signs=((_DSML,),),
        openings=(f"<{_DSML}function_calls>", f"<{_DSML}tool_calls>"),
        name_start=f'<{_DSML}invoke name="',
        name_ends=('">',),
        tags=ArgumentTags(
            f'<{_DSML}parameter name="',
            '">',
            "",
            f"</{_DSML}parameter>",
            f"</{_DSML}invoke>",
            kind='" string="',
        ),
        behind=(f"</{_DSML}function_calls>", f"</{_DSML}tool_calls>"),
        goes_on=True,
        marks=(_DSML,),
    ),
    "minimax": CallFormat(
        Body.TAGS,
        signs=((_MINIMAX[0],),),
        openings=(_MINIMAX[0],),
        name_start='<invoke name="',
        name_ends=('">',),
        tags=ArgumentTags('<parameter name="', '">', "", "</parameter>", "</invoke>"),
        behind=(_MINIMAX[1],),
        goes_on=True,
        marks=_MINIMAX,
    ),
    "gemma4": CallFormat(
        Body.BARE,
        signs=(("<|tool_call>call:",),),
        openings=("<|tool_call>",),
        name_start="call:",
        name_ends=("{",),
        behind=("<tool_call|>",),
        marks=("<|tool_call>", "<tool_call|>", BARE_QUOTE),
    ),
    "seed_oss": _QWEN_CODER._replace(
        signs=(("<seed:tool_call>",),),
        openings=("<seed:tool_call>", "<function="),
        behind=("</seed:tool_call>",),
        marks=("<seed:tool_call>", "</seed:tool_call>"),
    ),
    "mistral_args": _MISTRAL._replace(
        signs=(("[TOOL_CALLS]", "[ARGS]"),), written=Written("[TOOL_CALLS]", "[ARGS]", "", "")
    ),
    "mistral": _MISTRAL,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK._replace(
        signs=((_CALLS[0],),), written=Written(_CALL, _SEP, _END, "", _CALLS[0], _CALLS[1])
    ),
    "glm45": CallFormat(
        Body.TAGS,
        signs=(("<arg_key>",),),
        openings=("<tool_call>",),
        name_ends=("\n", "<arg_key>", "</tool_call>"),
        tags=ArgumentTags("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>"),
        marks=(
            *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>"),
            *("<arg_value>", "</arg_value>"),
        ),
    ),
    "qwen3_coder": _QWEN_CODER,
    "granite": _LIST._replace(
        signs=(("<|tool_call|>", "<|start_of_role|>"),), openings=("<|tool_call|>", "<tool_call>")
    ),
    "phi4_mini": _LIST._replace(
        signs=(("<|tool_call|>",), ("<|tool|>", "<|/tool|>"), ("functools[",)),
        openings=("<|tool_call|>", "functools["),
        written=_OBJECT._replace(start="<|tool_call|>[", end="]<|/tool_call|>"),
    ),
    "internlm": CallFormat(
        Body.OBJECT,
        signs=(("<|action_start|>", "<|plugin|>"),),
        openings=(_ACTION,),
        behind=("<|action_end|>",),
        marks=("<|action_start|>", "<|plugin|>", "<|action_end|>"),
        written=Written(f'{_ACTION}\n{{"name": "', '", "arguments": ', "}<|action_end|>", ""),
    ),
    "olmo3": CallFormat(
        Body.PYTHON,
        signs=(("<function_calls>",),),
        openings=("<function_calls>",),
        behind=("</function_calls>",),
        goes_on=True,
        marks=("<function_calls>", "</function_calls>"),
    ),
    "lfm2": CallFormat(
        Body.PYTHON,
        signs=(("<|tool_call_start|>",), ("<|tool_list_start|>",)),
        openings=("<|tool_call_start|>",),
        before=("[",),
        behind=(",", "]", "<|tool_call_end|>"),
        goes_on=True,
        marks=("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    "hermes": CallFormat(
        Body.OBJECT,
        signs=(("<tool_call>",),),
        not_with=("]<]minimax[>[",),  # MiniMax-M3's tags, whose names are those of arguments
        openings=("<tool_call>",),
        behind=("</tool_call>",),
        marks=("<tool_call>", "</tool_call>"),
        written=Written('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n"),
    ),
    "pythonic": CallFormat(
        Body.PYTHON,
        signs=(("func_name1(params_name1=",),),
        at_start=True,
        before=("[",),
        behind=(",", "]"),
        goes_on=True,
    ),
    "llama3_json": CallFormat(
        Body.OBJECT,
        signs=(('"parameters"', "ipython"),),
        at_start=True,
        before=("<|python_tag|>", "<|python_start|>"),
        behind=(";", "<|python_end|>"),
        goes_on=True,
        written=Written('{"name": "', '", "parameters": ', "}", "; "),
    ),
    "glm4": CallFormat(
        Body.NAMED,
        signs=(("[gMASK]", "<|observation|>"),),
        openings=("<|assistant|>",),
        at_start=True,
        name_ends=("\n",),
        goes_on=True,
        marks=("<|assistant|>",),
        written=Written("", "\n", "", "\n"),
    ),
}
"""By --tool-call-parser; the first whose signs a template has is its own."""


class ReasoningFormat(NamedTuple):
    """How reasoning stands before an answer; in `harmony` of one that a grammar writes, or that is
    forced to begin."""

    signs: tuple[tuple[str, ...], ...]
    """Signs of the format in a chat template, like those of calls."""
    openings: tuple[str, ...] = ()
    endings: tuple[str, ...] = ()
    answer: tuple[str, str] | None = None
    """Tags that may stand around the answer."""
    marks: tuple[str, ...] = ()
    """Tokens within `openings` that are part of the text."""


_CHANNEL, _MESSAGE = "<|channel|>", "<|message|>"
_FINAL = f"{_CHANNEL}final{_MESSAGE}"
HARMONY_CALL = f"{_CHANNEL}commentary"
"""Begins a call, behind which there may be reasoning once more."""

REASONING_FORMATS: dict[str, ReasoningFormat] = {
    HARMONY: ReasoningFormat(
        CALL_FORMATS[HARMONY].signs,
        (f"{_CHANNEL}analysis{_MESSAGE}",),
        (f"<|end|><|start|>assistant{_FINAL}", _FINAL),
    ),
    "mistral": ReasoningFormat((("[THINK]",),), ("[THINK]",), ("[/THINK]",)),
    "granite": ReasoningFormat(
        (("Here is my thought process",), ("<|start_of_role|>", "<think>", "<response>")),
        ("<think>", "Here is my thought process:", "Here's my thought process:"),
        ("</think>", "Here is my response:", "Here's my response:"),
        ("<response>", "</response>"),
    ),
    "gemma4": ReasoningFormat(
        (("<|channel>", "<channel|>"),),
        ("<|channel>thought",),
        ("<channel|>",),
        marks=("<|channel>",),
    ),
    "kimi": ReasoningFormat(
        (("\u25c1think\u25b7",),), ("\u25c1think\u25b7",), ("\u25c1/think\u25b7",)
    ),
    "seed_oss": ReasoningFormat((("<seed:think>",),), ("<seed:think>",), ("</seed:think>",)),
    "think": ReasoningFormat((("</think>",), ("<think>",)), ("<think>",), ("</think>",)),
}
"""By --reasoning-parser, in the same way."""


class ModelFormats(NamedTuple):
    """Formats that are looked for in a model's text."""

    tools: str = NONE
    """A key of `CALL_FORMATS`, or none."""
    reasoning: str = NONE
    """A key of `REASONING_FORMATS`, or none."""

    @property
    def enforced_tools(self) -> str:
        """The format in which a grammar writes calls."""
        if self.tools == NONE or CALL_FORMATS[self.tools].written is not None:
            return self.tools
        return "llama3_json"

    @property
    def marks(self) -> tuple[str, ...]:
        """Tokens that are part of the text, but for those of `harmony`."""
        reasoning = REASONING_FORMATS.get(self.reasoning, ReasoningFormat(()))
        tools = () if self.tools == NONE else CALL_FORMATS[self.tools].marks
        return (*tools, *reasoning.openings, *reasoning.endings, *reasoning.marks)


def choose_formats(
    template: str | None, *, tools: str = AUTO, reasoning: str = AUTO
) -> ModelFormats:
    """Return the formats that options name, or where they say auto, those of a chat template."""
    if reasoning == AUTO:
        found = _first({name: f.signs for name, f in REASONING_FORMATS.items()}, template)
        reasoning = HARMONY if tools == HARMONY else found
    if tools == AUTO:
        signs = {
            name: form.signs
            for name, form in CALL_FORMATS.items()
            if not any(mark in (template or "") for mark in form.not_with)
        }
        found = _first(signs, template)
        # Calls on channels are found where the channels are read.
        tools = NONE if found == HARMONY and reasoning != HARMONY else found
    return ModelFormats(tools, reasoning)


def _first(signs: dict[str, tuple[tuple[str, ...], ...]], template: str | None) -> str:
    if template is None:
        return NONE
    for name, choices in signs.items():
        if any(all(mark in template for mark in marks) for marks in choices):
            return name
    return NONE
