"""A sandbox for chat templates with limits of time, of memory and of output.

A template is a program of another author. The sandbox of jinja denies it files and the interpreter.
This one also charges every operation that can enlarge a text, with the most characters that it can
produce, before it runs: concatenation, repetition, formatting, most filters, methods of strings,
output. Passes of loops and calls are charged as well, so that no loop is endless. The sum has a
limit that grows with the conversation. A single operation cannot be interrupted, so powers and
widths have their own limits.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce, wraps
from operator import add
from string import Formatter
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment

#: Seconds that a rendering may take; an ordinary one takes a thousandth.
SECONDS = 10.0
#: Limit of the charge of a rendering: CHARACTERS + SHARE * characters of the conversation.
CHARACTERS, SHARE = 1 << 24, 64
#: Characters that are charged for each value of a list or dict, in addition to its text.
PART = 16
#: Most bits of a whole number that a template computes.
MAX_BITS = 1 << 16
#: Patterns of a width or a precision that has five digits or more or is an argument: in a format
#: with %, and in the part of a format in braces after its colon.
_WIDE = re.compile(r"%[-#0 +.\d()\w]*?(?:\d{5}|\*)")
_WIDE_FIELD = re.compile(r"\d{5}|\{")
#: Filters whose result is not larger than their input: they are not charged.
_SELECTING = frozenset(
    {"abs", "attr", "count", "d", "default", "dictsort", "first", "float", "groupby", "int"}
    | {"items", "last", "length", "list", "map", "max", "min", "random", "reject", "rejectattr"}
    | {"reverse", "safe", "select", "selectattr", "sort", "truncate", "unique"}
)
#: Methods of strings whose result can be as long as the product of string and arguments.
_MULTIPLYING = frozenset({"expandtabs", "format", "format_map", "join", "translate"})


class TemplateLimitError(TemplateError):
    """A template takes more time or memory than a conversation needs."""


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox in which chat templates are rendered, one at a time."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, finalize=self._output)
        self.code_generator_class = _ChargingGenerator
        for name in self.filters.keys() - _SELECTING:
            self.add_filter(name, self.filters[name])
        del self.globals["lipsum"]  # random text
        self.begin({})

    def begin(self, sizes: Mapping[int, int]) -> None:
        """Reset the limits for the rendering of a conversation; `sizes`: its :func:`sizes_of`."""
        self._sizes = sizes
        self._most = self._left = CHARACTERS + SHARE * max(sizes.values(), default=0)
        self._end = time.monotonic() + SECONDS

    def charge(self, amount: int) -> bool:
        """Subtract `amount` + 1 from the characters that are left. Returns True, so that the call
        can be a condition. Raises TemplateLimitError if none are left, and after SECONDS."""
        self._left -= amount + 1
        if self._left < 0:
            raise TemplateLimitError(f"it makes more than {self._most:,} characters")
        if time.monotonic() > self._end:
            raise TemplateLimitError(f"it takes more than {SECONDS:g} seconds")
        return True

    def joined(self, parts: tuple[Any, ...]) -> str:
        """Several values with the operator ``~`` between them."""
        self.charge(sum(map(self._size, parts)))
        return str_join(parts)

    def added(self, parts: tuple[Any, ...]) -> Any:
        """Several values with the operator ``+`` between them."""
        self.charge(sum(map(self._size, parts)))
        return reduce(add, parts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        texts = (str, bytes, list, tuple)
        are_numbers = isinstance(left, int) and isinstance(right, int)
        if operator == "%" and isinstance(left, str):
            self.charge(self._formatted(left, right))
        elif operator == "*" and not are_numbers:
            sequence, count = (left, right) if isinstance(left, texts) else (right, left)
            if isinstance(sequence, texts) and isinstance(count, int):
                self.charge(len(sequence) * max(count, 0))
        elif operator in ("*", "**") and are_numbers:
            bits = left.bit_length()
            bits = bits + right.bit_length() if operator == "*" else bits * max(right, 0)
            if bits > MAX_BITS:
                raise TemplateLimitError(f"it computes a number of more than {MAX_BITS:,} bits")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        # Methods of strings and numbers are charged; the sandbox wraps str.format.
        method = getattr(function, "__wrapped__", function)
        owner = getattr(method, "__self__", None)
        amount = 0
        if isinstance(owner, (str, bytes, int)):
            name, args = method.__name__, tuple(map(_as_list, args))
            if name == "replace" and len(args) > 1:
                amount = _replaced(owner, *args)
            elif name in ("format", "format_map"):
                amount = self._formatted(str(owner), (*args, *kwargs.values()))
            else:
                length = 0 if isinstance(owner, int) else len(owner)
                given = sum(map(self._extent, (*args, *kwargs.values())))
                amount = (length + 1) * given if name in _MULTIPLYING else length + given
        self.charge(amount)
        return super().call(context, function, *args, **kwargs)

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Make `function` a filter that is charged before it runs."""
        # jinja passes such a function its context or environment before the value.
        first = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)
        def charged(*args: Any, **kwargs: Any) -> Any:
            if len(args) == first + 1 and isinstance(args[first], str) and not kwargs:
                self.charge(len(args[first]))
                return function(*args)
            value, *others = map(_as_list, args[first:])
            args = (*args[:first], value, *others)
            given = (*others, *kwargs.values())
            if name == "replace" and len(others) > 1:
                amount = _replaced(str(value), *others)
            elif name == "format":
                amount = self._formatted(str(value), given)
            else:
                amount = self._size(value) * (1 + sum(map(self._extent, given)))
                if name == "sum" and any(isinstance(argument, (list, tuple)) for argument in given):
                    amount *= len(value)  # lists are copied at each addition
            self.charge(amount)
            return function(*args, **kwargs)

        self.filters[name] = charged

    def _output(self, value: Any) -> Any:
        """Charge an output. :meth:`charge` reads the clock, so it is called only above the
        limit."""
        self._left -= len(value) if isinstance(value, str) else self._size(value)
        return value if self._left >= 0 else self.charge(0)

    def _formatted(self, text: str, given: Any) -> int:
        """Largest length of `text` after the values `given` are formatted into it."""
        try:
            specs = [spec for _, _, spec, _ in Formatter().parse(text) if spec]
        except ValueError:  # no format in braces
            specs = []
        if _WIDE.search(text) or any(map(_WIDE_FIELD.search, specs)):
            raise TemplateLimitError("it formats by a width that is computed or very large")
        return len(text) + (text.count("%") + text.count("{")) * self._size(given)

    def _extent(self, value: Any) -> int:
        """Size of an argument; for a number its value, since it is a width or a count."""
        return max(value, 0) if isinstance(value, int) else self._size(value)

    def _size(self, value: Any) -> int:
        """Approximate number of characters of `value` as text; a list that occurs twice counts
        twice."""
        if isinstance(value, str):
            return len(value)
        size, stack = 0, [value]
        while stack and size <= self._left:
            part = stack.pop()
            if isinstance(part, (str, bytes)):
                size += len(part)
            elif (part_size := self._sizes.get(id(part))) is not None:
                size += part_size
            elif isinstance(part, dict):
                stack += [*part.keys(), *part.values()]
            elif isinstance(part, (list, tuple)):
                stack += part
            size += PART
        return size


def sizes_of(value: Any) -> dict[int, int]:
    """The size of every list and dict in `value`, by its id."""
    sizes: dict[int, int] = {}

    def add_up(value: Any) -> int:
        if isinstance(value, str):
            return len(value) + PART
        size = PART
        if isinstance(value, dict):
            size += sum(map(len, value)) + PART * len(value) + sum(map(add_up, value.values()))
        elif isinstance(value, list):
            size += sum(map(add_up, value))
        else:
            return size
        sizes[id(value)] = size
        return size

    add_up(value)
    return sizes


def _as_list(value: Any) -> Any:
    """The list of an iterator's values, so that they can be counted; other values unchanged."""
    return list(value) if isinstance(value, Iterator) else value


def _replaced(text: Any, old: Any, new: Any, *_: Any) -> int:
    """Largest length of `text` after `old` is replaced by `new`."""
    return len(text) + text.count(old) * len(new) if isinstance(old, type(text)) else 0


class _ChargingGenerator(CodeGenerator):
    """Compiles ``~`` and ``+`` to calls that charge the result, and charges each pass of a loop and
    each call of a macro with the literal text in it."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self._call("joined", node.nodes, frame)

    def visit_Add(self, node: nodes.Add, frame: Frame) -> None:
        parts: list[nodes.Expr] = [node]
        while isinstance(first := parts[0], nodes.Add):
            parts[:1] = [first.left, first.right]
        if sum(not isinstance(part, nodes.Const) for part in parts) > 1:
            self._call("added", parts, frame)
        else:  # literal text is charged by the loop or macro around it
            super().visit_Add(node, frame)

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        if node.test is not None:  # a loop's filter, which also runs for items that it drops
            node.test = nodes.And(_charge(0), node.test)
        node.body.insert(0, nodes.ExprStmt(_charge(_literal(node.body))))
        super().visit_For(node, frame)

    def macro_body(self, node: Any, frame: Frame) -> Any:
        node.body.insert(0, nodes.ExprStmt(_charge(_literal(node.body))))
        return super().macro_body(node, frame)

    def visit_Call(self, node: nodes.Call, frame: Frame, forward_caller: bool = False) -> None:
        if isinstance(node.node, nodes.EnvironmentAttribute):  # made by :func:`_charge`
            self._call(node.node.name, node.args, frame)
        else:
            super().visit_Call(node, frame, forward_caller=forward_caller)

    def _call(self, name: str, args: list[nodes.Expr], frame: Frame) -> None:
        """Writes a call of a method of the environment; all but charge take one tuple."""
        is_charge = name == "charge"
        self.write(f"environment.{name}(" if is_charge else f"environment.{name}((")
        for argument in args:
            self.visit(argument, frame)
            self.write("" if is_charge else ", ")
        self.write(")" if is_charge else "))")

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, (nodes.Const, nodes.TemplateData)):
            raise nodes.Impossible  # not folded into a constant: filters are charged at each pass
        return super()._output_child_to_const(node, frame, finalize)


def _charge(amount: int) -> nodes.Call:
    """The expression ``environment.charge(amount)``."""
    charge = nodes.EnvironmentAttribute("charge")
    return nodes.Call(charge, [nodes.Const(amount)], [], None, None)


def _literal(body: Sequence[nodes.Node]) -> int:
    """Number of characters of literal text in `body`, without those of loops and macros in it."""
    size, stack = 0, list(body)
    while stack:
        match stack.pop():
            case nodes.TemplateData(data=str(text)) | nodes.Const(value=str(text)):
                size += len(text)
            case nodes.For() | nodes.Macro() | nodes.CallBlock():
                pass
            case node:
                stack += node.iter_child_nodes()
    return size
