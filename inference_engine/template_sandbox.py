"""The sandbox of chat templates: Jinja's own, with an end to what a template may take.

Jinja's sandbox keeps a template from touching anything; it does not keep it from running for ever or from
making a text of any size. Here these are bounded, with `ResourceError` beyond:

- steps, all together: items of loops, calls of functions, macros and filters, expressions written;
- the seconds that the steps take, looked at before each;
- items in lists and objects, nested ones included, that a call is given or an expression writes;
- numbers in `+`, `*` and `**`, and those given to calls and filters, which may say how far to pad or repeat;
- lengths of what `+`, `*`, `~`, `%`, `replace`, `join`, `format` and `indent` make, before they make it;
- characters that expressions write, in blocks that are set aside too, and of the text as a whole.

What is left are single operations on values of these sizes, such as comparing two nested lists.

Data flow: template → its syntax tree, in which loops and `~` go through counted filters → `bounded_text`.

Worked example: a loop of 99,999 items inside another ends in its second round, after 200,000 steps.
"""

import functools
import itertools
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import nodes
    from jinja2.sandbox import SandboxedEnvironment

MAX_TEXT = 1 << 24
"""Characters of a text, items of a list."""
_MAX_STEPS = 200_000
_MAX_SECONDS = 5.0
_MAX_BITS = 1 << 12
_MAX_NUMBER = 1_000_000
_MAX_WRITTEN = 4 * MAX_TEXT
_MAX_PLAIN = 1 << 31  # characters that stand in the template itself, written by all steps together
_MAX_INDENT = 100
_MAX_ITEMS = 200_000
_LOOKS_AT_NO_ITEM = frozenset({"length", "count", "first", "last"})  # often called for every message
_LOOP, _CONCAT = "counted_loop", "counted_concat"
_NUMBER = re.compile(r"\d+")


class ResourceError(Exception):
    """A template takes more than it may."""


def bounded_text(
    template: str,
    values: Mapping[str, Any],
    filters: Mapping[str, Callable[..., Any]],
    functions: Mapping[str, Callable[..., Any]],
) -> str:
    """The text that a template makes of values, with filters and functions beside Jinja's.

    Raises ResourceError, and whatever a template may raise; ImportError without Jinja.
    """
    from jinja2 import pass_context

    bounds = _Bounds(len(template))
    sandbox = _sandbox(bounds)
    known = {**sandbox.filters, **filters}
    sandbox.filters = {name: _checked(bounds, name, function) for name, function in known.items()}
    sandbox.filters[_LOOP] = pass_context(lambda _, items: bounds.items(items))
    sandbox.filters[_CONCAT] = pass_context(lambda _, texts: bounds.joined("", texts))
    del sandbox.globals["lipsum"]
    sandbox.globals |= functions
    tree = _counted(sandbox.parse(template), sandbox)
    pieces: list[str] = []
    length = 0
    for piece in sandbox.from_string(tree).generate(values):
        length += len(piece)
        _check(length, MAX_TEXT, "characters")
        pieces.append(piece)
    return "".join(pieces)


def _sandbox(bounds: "_Bounds") -> "SandboxedEnvironment":
    """Jinja's sandbox, which asks before it calls, computes or writes."""
    from jinja2 import pass_context
    from jinja2.runtime import LoopContext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Sandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"+", "*", "**", "%"})

        def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
            if isinstance(function, LoopContext):  # a recursive loop
                return super().call(context, function, *map(bounds.items, args), **kwargs)
            method = getattr(function, "__wrapped__", function)
            name, subject = getattr(method, "__name__", ""), getattr(method, "__self__", None)
            bounds.check_call(str(name), subject, [*args, *kwargs.values()])
            return super().call(context, function, *args, **kwargs)

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            bounds.check_operation(operator, left, right)
            return super().call_binop(context, operator, left, right)

    return Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"],
        finalize=pass_context(lambda _, value: bounds.written(value)),
    )  # fmt: skip


def _checked(bounds: "_Bounds", name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that asks before it runs."""
    from jinja2 import Environment
    from jinja2.nodes import EvalContext
    from jinja2.runtime import Context

    @functools.wraps(function)  # Jinja's marks stay: whether it takes a context first
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = args[1:] if isinstance(args[0], (Context, EvalContext, Environment)) else args
        bounds.check_call(name, given[0], [*given[1:], *kwargs.values()])
        return function(*args, **kwargs)

    return checked


class _Bounds:
    """What one rendering has taken; never set back."""

    def __init__(self, template_length: int) -> None:
        self._steps, self._characters, self._end = 0, 0, time.monotonic() + _MAX_SECONDS
        self._most_steps = min(_MAX_STEPS, _MAX_PLAIN // (1 + template_length))

    def check_operation(self, operator: str, left: Any, right: Any) -> None:
        """Raises ResourceError where an operation's result is too large."""
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length(), right.bit_length()
            _check(bits[0] * abs(right) if operator == "**" else sum(bits), _MAX_BITS, "bits in a number")
        elif operator == "%" and isinstance(left, str):
            self.check_call("format", left, list(right) if isinstance(right, tuple) else [right])
        elif hasattr(left, "__len__") or hasattr(right, "__len__"):
            sizes = _size(left), _size(right)
            _check(sum(sizes) if operator == "+" else sizes[0] * sizes[1], MAX_TEXT, "characters or items")

    def check_call(self, name: str, subject: Any, given: Sequence[Any]) -> None:
        """Counts a call; raises ResourceError where its result may be far larger than what it is given."""
        self._step(1)
        if name not in _LOOKS_AT_NO_ITEM:
            self._check_nested([subject, *given])
        numbers = [abs(value) for value in given if isinstance(value, int)]
        _check(max(numbers, default=0), _MAX_INDENT if name == "tojson" else _MAX_NUMBER, "as a number")
        if name == "replace" and len(given) > 1:
            text, old, new = (str(value) for value in (subject, *given[:2]))
            _check(len(text) + text.count(old) * len(new), MAX_TEXT, "characters")
        elif name == "join" and isinstance(subject, str) and given and isinstance(given[0], Sequence):
            self.joined(subject, given[0])
        elif name == "join" and isinstance(subject, Sequence):
            self.joined(str(given[0]) if given else "", subject)
        elif name in ("format", "format_map", "indent", "expandtabs"):
            text = str(subject)
            widths = map(int, _NUMBER.findall(text)) if name.startswith("format") else ()
            longest = max(1, *widths, *map(_size, given))
            places = 1 + sum(map(text.count, "%{\n\t"))
            _check(len(text) + places * longest, MAX_TEXT, "characters")

    def _check_nested(self, values: list[Any]) -> None:
        """Raises ResourceError for too many items, each counted as often as it would be written."""
        count, waiting = 0, values
        while waiting:
            value = waiting.pop()
            if isinstance(value, (list, tuple, dict)):
                count += len(value)
                if count > _MAX_ITEMS:
                    raise ResourceError(f"it takes more than {_MAX_ITEMS:,} items at once")
                waiting.extend(value.values() if isinstance(value, dict) else value)

    def _step(self, count: int) -> None:
        self._steps += count
        _check(self._steps, self._most_steps, "steps")
        if time.monotonic() > self._end:
            raise ResourceError(f"it takes more than {_MAX_SECONDS:g} seconds")

    def items(self, items: Iterable[Any]) -> list[Any]:
        """A loop's items, counted."""
        taken = list(itertools.islice(items, self._most_steps + 1))
        self._step(len(taken))
        return taken

    def joined(self, separator: str, values: Iterable[Any]) -> str:
        """Texts in a row."""
        texts: list[str] = []
        length = 0
        for value in values:
            self._check_nested([value])
            texts.append(str(value))
            length += len(texts[-1]) + len(separator)
            _check(length, MAX_TEXT, "characters")
        return separator.join(texts)

    def written(self, value: Any) -> str:
        """What an expression writes."""
        self._step(1)
        self._check_nested([value])
        text = str(value)
        self._characters += len(text)
        _check(self._characters, _MAX_WRITTEN, "characters")
        return text


def _counted(tree: "nodes.Template", sandbox: "SandboxedEnvironment") -> "nodes.Template":
    """A template's tree with its loops and its `~` counted."""
    from jinja2 import nodes

    for loop in tree.find_all(nodes.For):
        loop.iter = nodes.Filter(loop.iter, _LOOP, [], [], None, None, lineno=loop.lineno)
    for parent in reversed(list(tree.find_all(nodes.Node))):  # what is inside comes first
        for field, value in list(parent.iter_fields()):
            changed = [_concat(item) for item in value] if isinstance(value, list) else _concat(value)
            setattr(parent, field, changed)
    tree.set_environment(sandbox)
    return tree


def _concat(node: Any) -> Any:
    """`~` as a filter over its list, anything else as it is."""
    from jinja2 import nodes

    if not isinstance(node, nodes.Concat):
        return node
    values = nodes.List(node.nodes, lineno=node.lineno)
    return nodes.Filter(values, _CONCAT, [], [], None, None, lineno=node.lineno)


def _size(value: Any) -> int:
    """Length of a text or collection, the size of a whole number; at least 1."""
    if isinstance(value, int):
        return max(1, abs(value))
    return max(1, len(value)) if hasattr(value, "__len__") else 1


def _check(found: int, allowed: int, what: str) -> None:
    if found > allowed:
        raise ResourceError(f"it takes more than {allowed:,} {what}")
