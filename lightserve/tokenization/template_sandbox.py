"""A Jinja environment that hostile or broken chat templates cannot leave, stall or blow up.

Jinja's immutable sandbox bars the way to Python's internals and to mutation. It has no limits, so
every render has a `Budget` that is charged at each place where a template can spend time or memory:

    loop step        `For` nodes are rewritten to iterate through the filter `charge_steps`
    call             `call`: macros, methods, functions; sizes of results
    operator         `call_binop`: sizes before multiplying, after adding
    `~`, [], {}, (), rewritten to pass through the filter `charge_value`
    slice, set block
    filter           each is wrapped, so that those that `map` applies are charged as well
    output           `finalize`

Every value is checked where it is made, so all are bounded: texts and containers by
MAX_OUTPUT_CHARS, numbers by MAX_INTEGER, ranges by Jinja. With filters and string methods limited
to the lists below, so is every single operation between two charges, and a render ends soon
after its deadline without being killed. A template is bounded itself before it is compiled: by
MAX_TEMPLATE_CHARS and MAX_NODES.
"""

# ruff: noqa: N802, SIM905 - Jinja finds visitors by these names; word lists read better

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jinja2
from jinja2 import ext, nodes
from jinja2.filters import (
    FILTERS,
    do_batch,
    do_center,
    do_format,
    do_indent,
    do_join,
    do_replace,
    do_trim,
    make_attrgetter,
    sync_do_slice,
)
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_OUTPUT_CHARS = 1_000_000
MAX_EMITTED_CHARS = 16 * MAX_OUTPUT_CHARS
"""Over all macros, set blocks and loops of one render, each emission counted."""
MAX_MADE_CHARS = 64 * MAX_OUTPUT_CHARS
"""Most characters of all values that one render makes, written or not: it may keep them all."""
CHARS_PER_ITEM = 16
"""Characters that an item of a list counts there beside its own text: its memory."""
MAX_TEMPLATE_CHARS = 256 * 1024
MAX_NODES = 20_000
"""Most nodes of a template's syntax tree: about a second to compile, and 80 MiB."""
MAX_SEARCH_STEPS = 100_000_000
"""Most steps of Python: a text's characters times the characters that it searches for."""
MAX_INTEGER = 10**4300
"""Python reads and writes numbers of so many digits, so requests have none that are larger."""
DEADLINE_S = 1.0

_FILTERS = frozenset(
    "abs attr batch capitalize center count d default dictsort e escape filesizeformat first float"
    " forceescape format groupby indent int items join last length list lower map max min random"
    " reject rejectattr replace reverse round safe select selectattr slice sort string sum title"
    " trim truncate unique upper urlencode wordcount xmlattr".split()
)
_GLOBALS = ("range", "dict", "namespace", "cycler", "joiner")
_STR_METHODS = frozenset(
    "capitalize casefold center count endswith find format index isalnum isalpha isascii isdecimal"
    " isdigit isidentifier islower isnumeric isprintable isspace istitle isupper join ljust lower"
    " lstrip partition removeprefix removesuffix replace rfind rindex rjust rpartition rsplit"
    " rstrip split splitlines startswith strip swapcase title upper zfill".split()
)
_PADDING_METHODS = ("center", "ljust", "rjust", "zfill")
_MAX_INDENT = 256
_FIELD = re.compile(r"%(?:\(\w*\))?[-+ #0]*(\d*)(?:\.(\d*))?([diouxXeEfFgGcrsa%]?)", re.ASCII)
"""A field of a format for `%`: width, precision and kind, which is empty where it is none."""
_LONGEST_NUMBER = 512
"""Characters of any number with `%f`, without width and precision."""


class TemplateLimit(jinja2.TemplateError):
    """A render used more time or memory than it may."""


class Budget:
    """The rest that one render may still spend."""

    def __init__(self, *, deadline_s: float) -> None:
        # What counts is the time that this thread computes, not what others took from it, but
        # to ask for that costs a system call; it is never ahead of the clock on the wall.
        self._earliest_s = time.monotonic() + deadline_s
        self._deadline_s = time.thread_time() + deadline_s
        self._num_chars_left = MAX_EMITTED_CHARS
        self._num_made_left = MAX_MADE_CHARS

    def spend(self, num_chars: int = 0) -> None:
        """Account for one operation that emitted this many characters."""
        self._num_chars_left -= num_chars
        if self._num_chars_left < 0:
            raise TemplateLimit(f"writes more than {MAX_EMITTED_CHARS} characters")
        if time.monotonic() > self._earliest_s and time.thread_time() > self._deadline_s:
            raise TemplateLimit("takes too long")

    def make(self, value: Any) -> Any:
        """Account for a value that an operation has made, and return it if it is bounded."""
        if isinstance(value, str):
            self._num_made_left -= len(value)
        elif isinstance(value, list | tuple | dict | set | frozenset):
            self._num_made_left -= CHARS_PER_ITEM * len(value)
        if self._num_made_left < 0:
            raise TemplateLimit(f"makes values of more than {MAX_MADE_CHARS} characters in all")
        return check_size(value)


def check_size(value: Any) -> Any:
    """Return `value` if its text is bounded. Raises TemplateLimit.

    Containers are walked, since a list may hold itself many times over at no cost in memory.
    """
    num_left = MAX_OUTPUT_CHARS
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            num_left -= len(item)
        elif isinstance(item, int) and abs(item) > MAX_INTEGER:
            raise TemplateLimit("computes with numbers of more than 4300 digits")
        elif isinstance(item, Namespace):
            raise TemplateLimit("uses a namespace as a value")  # it could be a graph of any size
        elif isinstance(item, dict):
            pending.extend(item)
            pending.extend(item.values())
        elif isinstance(item, list | tuple | set | frozenset):
            pending.extend(item)
        num_left -= 1
        if num_left < -1 or len(pending) > MAX_OUTPUT_CHARS:
            raise TemplateLimit(f"makes a value of more than {MAX_OUTPUT_CHARS} characters")
    return value


def _check_replace(text: str, old: Any, new: Any) -> None:
    old, new = str(old), str(new)
    num_hits = text.count(old) if old else len(text) + 1
    if len(text) + num_hits * (len(new) - len(old)) > MAX_OUTPUT_CHARS:
        raise TemplateLimit("replaces into too long a text")


def _check_join(separator: Any, items: list[Any]) -> None:
    check_size(items)
    if len(str(separator)) * len(items) > MAX_OUTPUT_CHARS:
        raise TemplateLimit("joins into too long a text")


def _check_format(text: str, values: Any) -> None:
    """Check a text for `str.format`: each of its fields may be all that it is given."""
    if any(char in text for char in "%:*"):
        raise TemplateLimit("uses a format with widths")
    _check_fields(len(text), text.count("{"), values)


def _check_percent(text: str, values: Any) -> None:
    """Check a text for `%`, whose fields may have widths, as numbers, and names."""
    num_chars = len(text)
    num_fields = 0
    for width, precision, kind in _FIELD.findall(text):
        if not kind or max(len(width), len(precision)) > 7:
            raise TemplateLimit("uses a format with other widths than small numbers")
        num_fields += 1
        num_chars += int(width or 0) + int(precision or 0) + _LONGEST_NUMBER
    _check_fields(num_chars, num_fields, values)


def _check_fields(num_chars: int, num_fields: int, values: Any) -> None:
    if num_chars + num_fields * _num_chars_of(values) > MAX_OUTPUT_CHARS:
        raise TemplateLimit("formats into too long a text")


def _num_chars_of(value: Any) -> int:
    """Return how long a value's text may be."""
    check_size(value)
    return len(repr(value))


def _check_width(width: Any) -> None:
    if isinstance(width, int) and width > MAX_OUTPUT_CHARS:
        raise TemplateLimit("pads to too great a width")


def _center(value: Any, width: Any = 80) -> str:
    _check_width(width)
    return do_center(value, width)


def _trim(value: Any, chars: Any = None) -> str:
    _check_search(str(value), str(chars or ""))
    return do_trim(value, chars)


def _batch(value: Iterable[Any], linecount: Any, fill_with: Any = None) -> Iterator[list[Any]]:
    _check_width(linecount)
    return do_batch(value, linecount, fill_with)


def _slice(value: Any, slices: Any, fill_with: Any = None) -> Iterator[list[Any]]:
    _check_width(slices)
    return sync_do_slice(value, slices, fill_with)


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    _check_percent(str(value), kwargs or args)
    return do_format(value, *args, **kwargs)


@jinja2.pass_eval_context
def _join(context: Any, value: Iterable[Any], d: str = "", attribute: Any = None) -> str:
    items = list(value)
    _check_join(d, items)
    return str(do_join(context, items, d, attribute))


@jinja2.pass_eval_context
def _replace(context: Any, s: Any, old: Any, new: Any, count: int | None = None) -> str:
    _check_replace(str(s), old, new)
    return do_replace(context, s, old, new, count)


def _indent(s: Any, width: Any = 4, first: bool = False, blank: bool = False) -> str:
    size = width if isinstance(width, int) else len(str(width))
    if size > _MAX_INDENT or str(s).count("\n") * size > MAX_OUTPUT_CHARS:
        raise TemplateLimit("indents too far")
    return str(do_indent(s, width, first, blank))


class _Charging(NodeTransformer):
    """Rewrites a template so that loops and everything that makes values are charged."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """Charge each step with the constant text that its body may emit."""
        self.generic_visit(node)
        num_chars = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        assert isinstance(node.iter, nodes.Expr)
        node.iter = _filtered(node.iter, "charge_steps", nodes.Const(num_chars))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """Check the operands of `~` one by one, then the whole."""
        self.generic_visit(node)
        node.nodes = [_filtered(operand, "charge_value") for operand in node.nodes]
        return _filtered(node, "charge_value")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        """Check a slice, which is a copy; any other item is there already."""
        self.generic_visit(node)
        return _filtered(node, "charge_value") if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        """Check a literal container: it may hold one big value several times."""
        self.generic_visit(node)
        return _filtered(node, "charge_value")

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        """See `visit_List`."""
        self.generic_visit(node)
        return _filtered(node, "charge_value")

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        """See `visit_List`; a tuple may also be a target of an assignment."""
        self.generic_visit(node)
        return _filtered(node, "charge_value") if node.ctx == "load" else node

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        """Check the text that a set block gathers."""
        self.generic_visit(node)
        inner = node.filter
        whole = nodes.Filter(inner, "charge_value", [], [], None, None, lineno=node.lineno)
        node.filter = whole
        return node


def _filtered(node: nodes.Expr, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


class _Generation(ext.Extension):
    """`{% generation %}…{% endgeneration %}`, which training marks with, renders as its body.

    Variables that are set in it end with it, as in a macro.
    """

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [nodes.Scope(body, lineno=line)]


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The environment. Renders of several threads do not disturb each other."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "**", "%"))

    def __init__(self) -> None:
        # Nothing is folded when compiling: a constant could be as costly as any other value.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[ext.loopcontrols, _Generation],
            finalize=self._on_output,
        )
        self._current = threading.local()
        self.globals = {name: self.globals[name] for name in _GLOBALS}
        self.filters = {}
        own = {"join": _join, "replace": _replace, "indent": _indent, "center": _center}
        own |= {
            "trim": _trim,
            "batch": _batch,
            "slice": _slice,
            "format": _format,
            "sum": self._sum,
        }
        for name, function in ({name: FILTERS[name] for name in _FILTERS} | own).items():
            self.add_filter(name, function)
        self.filters |= {"charge_value": self._charge_value, "charge_steps": self._charge_steps}

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Offer a filter, whose results are charged."""

        @functools.wraps(function)
        def charged(*args: Any, **kwargs: Any) -> Any:
            return self._charge_value(function(*args, **kwargs))

        self.filters[name] = charged

    def render(
        self, template: jinja2.Template, values: dict[str, Any], *, deadline_s: float
    ) -> str:
        """Render within the limits. Raises jinja2.TemplateError and whatever a template raises."""
        self._current.budget = Budget(deadline_s=deadline_s)
        check_size(list(values.values()))
        parts: list[str] = []
        num_chars = 0
        for part in template.generate(values):
            parts.append(part)
            num_chars += len(part)
            if num_chars > MAX_OUTPUT_CHARS:
                raise TemplateLimit(f"writes more than {MAX_OUTPUT_CHARS} characters")
        return "".join(parts)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise TemplateLimit(
                f"must have at most {MAX_TEMPLATE_CHARS} characters, got {len(source)}"
            )
        template = super()._parse(source, name, filename)
        if (num_nodes := _num_nodes(template)) > MAX_NODES:
            raise TemplateLimit(f"must have at most {MAX_NODES} nodes, got {num_nodes}")
        return template

    def _generate(
        self,
        source: nodes.Template,
        name: str | None,
        filename: str | None,
        defer_init: bool = False,
    ) -> str:
        charged = _Charging().visit(source)
        return super()._generate(charged, name, filename, defer_init)

    @property
    def _budget(self) -> Budget:
        budget: Budget = self._current.budget
        return budget

    def _on_output(self, value: Any) -> Any:
        self._charge_value(value)
        return value

    def _charge_value(self, value: Any) -> Any:
        self._budget.spend(len(value) if isinstance(value, str) else 0)
        if isinstance(value, Iterator):
            return value  # lazy filters such as map; charged as they are consumed
        return self._budget.make(value)

    def _charge_steps(self, items: Any, num_chars: int) -> Iterator[Any]:
        if isinstance(items, Undefined):
            iter(items)  # raises in strict modes, is empty otherwise
        for item in items:
            self._budget.spend(num_chars)
            yield item

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Keep to string methods that cannot make long texts out of short ones."""
        if isinstance(obj, str) and attr not in _STR_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call within the limits."""
        _check_method(__obj, args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, Namespace):
            return result  # kept out of every other value by check_size
        return __self._charge_value(result)

    @jinja2.pass_context
    def _sum(
        self, context: Context, iterable: Iterable[Any], attribute: Any = None, start: Any = 0
    ) -> Any:
        """Add as `+` does, within the limits."""
        if attribute is not None:
            iterable = map(make_attrgetter(self, attribute), iterable)
        total = start
        for item in iterable:
            if isinstance(item, str):
                raise TypeError("unsupported operand type(s) for sum: texts")
            total = self.call_binop(context, "+", total, item)
        return total

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator within the limits."""
        budget = self._budget
        budget.spend()
        if operator == "*":
            _check_product(left, right)
        elif operator == "**":
            _check_power(left, right)
        elif operator == "%" and isinstance(left, str):
            _check_percent(left, right)
        return budget.make(super().call_binop(context, operator, left, right))


def _num_nodes(template: nodes.Node) -> int:
    """Return how many nodes a syntax tree has; a dictionary's pairs are nodes too."""
    count, pending = 0, [template]
    while pending:
        pending.extend(pending.pop().iter_child_nodes())
        count += 1
    return count


_SLOW_METHODS = ("rfind", "rindex", "rpartition", "rsplit", "strip", "lstrip", "rstrip")


def _check_search(text: str, sought: str) -> None:
    if len(text) * len(sought) > MAX_SEARCH_STEPS:
        raise TemplateLimit("looks for too long a text")


def _check_method(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    text = getattr(function, "__self__", None)
    name = getattr(function, "__name__", "")
    if name == "format":  # Jinja's own wrapper around the method
        text = getattr(getattr(function, "__wrapped__", None), "__self__", None)
    if not isinstance(text, str):
        return
    if name == "replace" and len(args) >= 2:
        _check_replace(text, args[0], args[1])
    elif name == "join" and args:
        items = args[0]
        if isinstance(items, Iterator):
            raise TemplateLimit("joins what is not a list")
        _check_join(text, list(items))
    elif name in _SLOW_METHODS and args:
        _check_search(text, str(args[0]))
    elif name in _PADDING_METHODS and args:
        _check_width(args[0])
    elif name == "format":
        _check_format(text, [args, kwargs])


def _check_product(left: Any, right: Any) -> None:
    for sequence, count in ((left, right), (right, left)):
        is_repetition = isinstance(sequence, str | list | tuple) and isinstance(count, int)
        if is_repetition and len(sequence) * count > MAX_OUTPUT_CHARS:
            raise TemplateLimit("multiplies into too long a value")


def _check_power(left: Any, right: Any) -> None:
    if not isinstance(left, int | float) or not isinstance(right, int | float) or abs(right) > 64:
        raise TemplateLimit("raises to a power beyond 64")
