"""Configuration errors: every problem with its numbers, its origin and a fix."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, wraps
from inspect import Parameter, signature
from numbers import Integral, Real
from operator import index
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Any,
    Literal,
    ParamSpec,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from moemesh.config.limits import one_line
from moemesh.config.shown import cut
from moemesh.config.suggest import aliases, nearest_choice
from moemesh.config.toml import format_value

P = ParamSpec("P")
T = TypeVar("T")

# Type checks of arguments of public functions, each with one clear error.


def check_kind(name: str, value: object, kind: type, fix: str = "") -> None:
    """Raises TypeError unless the argument `name` is a `kind`; `fix` is a way to get one."""
    if not isinstance(value, kind):
        message = f"{name} must be a {kind.__name__}, not {type(value).__name__}"
        raise TypeError(f"{message}: {fix}" if fix else message)


def public(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator of public functions: :func:`known_keywords`, and a check of arguments against their
    annotations (:func:`_checked`)."""
    parameters = signature(function).parameters

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> T:
        hints = _hints(function)
        given = zip(parameters, args, strict=False)
        positional = [_checked(name, value, hints.get(name)) for name, value in given]
        kwargs = {name: _checked(name, value, hints.get(name)) for name, value in kwargs.items()}
        return function(*positional, *args[len(positional) :], **kwargs)

    return known_keywords(cast("Callable[P, T]", call))


def known_keywords(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator: the TypeError for an unknown keyword suggests the nearest one. Keywords may be
    those of a TypedDict: ``**options: Unpack[Options]``. A function that all ranks call has this
    decorator instead of :func:`public`: it checks its arguments itself, so that all ranks fail
    alike."""
    parameters = signature(function).parameters

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if any(name not in parameters for name in kwargs):
            names = [name for name in parameters if name != "self"]
            if parameters[names[-1]].kind is Parameter.VAR_KEYWORD:
                (options,) = get_args(get_type_hints(function)[names.pop()])
                names += get_type_hints(options)
            for unknown in (name for name in kwargs if name not in names):
                near = get_close_matches(unknown, names, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(names)}"
                called = function.__qualname__.removesuffix(".__init__")
                raise TypeError(f"{called}() has no argument {unknown!r}: {hint}")
        return function(*args, **kwargs)

    return call


@cache
def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of the arguments; empty if one needs an import under TYPE_CHECKING."""
    try:
        return get_type_hints(function)
    except NameError:
        return {}


#: Words for plain types of arguments, and the types whose values they take.
_PLAIN: dict[Any, tuple[str, type]] = {
    bool: ("True or False", bool),
    int: ("a whole number", Integral),
    float: ("a number", Real),
    str: ("a text", str),
    Path: ("a path", Path),
    NoneType: ("None", NoneType),
    Sequence: ("a list", Sequence),
    tuple: ("a list", Sequence),
    Mapping: ("a dict", Mapping),
}


def _checked(name: str, value: Any, hint: Any) -> Any:
    """`value` of the argument `name`; a whole number of numpy or torch becomes an int if the
    annotation `hint` has int. Raises ConfigError for a word that is not in a Literal, TypeError for
    another type. Two kinds of `hint` are not checked, since the function has a check with a fix:
    one class outside of :data:`_PLAIN`, and a hint with a part that is not a class."""
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    words = [
        word for member in members if get_origin(member) is Literal for word in get_args(member)
    ]
    kinds = [
        get_origin(member) or member for member in members if get_origin(member) is not Literal
    ]
    is_one_class = len(kinds) == 1 and kinds[0] not in _PLAIN
    if is_one_class or not all(isinstance(kind, type) for kind in kinds):
        return value
    if int in kinds:
        value = whole(value)
    if words and type(value).__module__ == "torch":
        value = str(value).removeprefix("torch.")  # a dtype, by its name
    if words and (isinstance(value, str) or not kinds):
        if value not in words and str not in kinds:
            fix = nearest_choice(str(value), words)
            fix += "".join(f", or {_PLAIN[kind][0]}" for kind in kinds if kind is not NoneType)
            problem = Problem.of("not-a-choice", name, value, f"{name} cannot be {value!r}", fix)
            raise ConfigError([problem], "in the arguments")
        return value
    plain = [_PLAIN.get(kind, (f"a {kind.__name__}", kind)) for kind in kinds]
    is_wrong_bool = isinstance(value, bool) and bool not in kinds  # isinstance(True, int) holds
    if is_wrong_bool or not any(isinstance(value, kind) for _, kind in plain):
        raise TypeError(f"{name} must be {' or '.join(text for text, _ in plain)}, not {value!r}")
    return value


def whole(value: Any) -> Any:
    """A whole number of numpy or torch as an int; any other value as it is."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return value
    with suppress(TypeError):  # a tensor of other numbers has the method, too
        return index(value)
    return value


def check_limit(name: str, value: object) -> None:
    """Raises UserError unless the argument `name`, a bound of a norm, is a number of at least 0."""
    # "not >= 0" instead of "< 0", which is False for NaN.
    if isinstance(value, bool) or not isinstance(value, Real) or not float(value) >= 0:
        raise UserError(f"{name} must be a number of at least 0, not {value!r}")


#: Most characters of a value in a message: a pasted file must not hide the sentence about it.
LONGEST_VALUE = 80


#: The kinds of mistakes, by what the user can do about them.
CODES: dict[str, str] = {
    "conflict": "two settings exclude each other, or one needs another; the message names both",
    "duplicate": "one name, key or expert occurs twice where only one is allowed",
    "empty": "a list, file or pattern has nothing in it",
    "missing": "a key, option or argument that is needed has no value",
    "no-file": "a file or folder is not there, or cannot be read",
    "no-match": "a pattern matches nothing; names like it are listed",
    "no-plan": "the search found no legal layout; the message counts why they failed",
    "not-a-choice": "a word is not among the legal ones; the nearest is named",
    "not-a-plan": "the text after --plan is of a kind that this verb does not read",
    "not-available": "this version does not support it; the message names an alternative",
    "not-divisible": "a number does not divide another; the legal divisors are listed",
    "out-of-range": "a number is outside its bounds; the bounds are named",
    "partition": "these stages, devices or microbatches cannot be combined by `partition`",
    "schedule": "a pipeline schedule cannot be built from these numbers, or is not legal",
    "shape": "a list has the wrong length, or sizes do not fit together",
    "stages": "the layers cannot be cut into these stages",
    "syntax": "a file or a value cannot be parsed; line and column are named",
    "too-large": "a number is above what another key allows",
    "too-small": "a number is below what another key needs",
    "unknown-key": "no key has this name; the nearest, or the name here, is given",
    "unknown-layer": "a layer of a folder of transformers is of a kind that is not known",
    "unknown-model": "a model type is not known; the known ones are listed",
    "unknown-option": "no verb, option or argument has this name; the nearest one is named",
    "wrong-type": "a value has another type: nothing is converted silently",
}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong: where, what the numbers are, and the nearest legal choice.

    `code`: the kind (:data:`CODES`); `key`: dotted ("plan.ep"); `value`: the given value, None if
    there is none to show; `origin`: its file and line, variable or option; `related`: the other
    keys that the rule reads, since a rule over a broken value is left out (:func:`independent`).
    """

    code: str
    key: str
    value: object = None
    origin: str = ""
    message: str
    fix: str = ""
    related: tuple[str, ...] = ()

    @classmethod
    def of(cls, code: str, key: str, value: object, message: str, fix: str = "") -> Problem:
        """A problem from its most common parts."""
        return cls(code=code, key=key, value=value, message=message, fix=fix)

    def __str__(self) -> str:
        head = one_line(self.key)
        if self.value is not None:
            shown = f"{self.key} = {format_value(self.value)}".lstrip(" =")
            head = cut(shown, len(self.key) + LONGEST_VALUE)
        lines = [head + (f"   ({one_line(self.origin)})" if self.origin else "")]
        lines.append(f"    {self.message} [{self.code}]")
        if self.fix:
            lines.append(f"    fix: {self.fix}")
        return "\n".join(lines)


class UserError(ValueError):
    """A request of the user that cannot be carried out: one message, exit code 2, no traceback."""


def is_user_error(error: BaseException) -> bool:
    """Whether `error` is a message for the user rather than a bug of moemesh. True for every
    UserError and for every subclass of ValueError that moemesh defines; a bare ValueError from a
    library has no message that the user could act on."""
    is_ours = type(error).__module__.partition(".")[0] == "moemesh"
    return isinstance(error, UserError) or (isinstance(error, ValueError) and is_ours)


class ConfigError(UserError):
    """Every problem of a configuration at once; ``str()`` is ready for a terminal."""

    def __init__(self, problems: Iterable[Problem], where: str = "in the configuration") -> None:

        def place(problem: Problem) -> tuple[list[tuple[int, str]], str, str]:
            """Sort by file and line (numbers as numbers), then by key."""
            parts = re.split(r"(\d{1,18})", problem.origin)
            natural = [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
            return natural, problem.key, problem.message

        self.problems, self.where = tuple(sorted(problems, key=place)), where
        super().__init__(self.problems)

    def __str__(self) -> str:
        count = len(self.problems)
        title = "1 problem" if count == 1 else f"{count} problems"
        body = "\n".join(f"{index}. {item}" for index, item in enumerate(self.problems, 1))
        return f"{title} {self.where}\n{body}"


def unknown_keys(kind: str, table: Mapping[str, object], names: Sequence[str]) -> list[Problem]:
    """A problem for each key of `table` that is not among `names`, the keys of a `kind` ("plan").
    Its fix is our name for a key of another framework, else the nearest name."""
    problems: list[Problem] = []
    for key, value in table.items():
        if key not in names:
            fix = nearest_choice(key, names)
            if (foreign := aliases().get(key, "")).startswith(f"{kind}."):
                fix = f"here it is called {foreign.removeprefix(f'{kind}.')}"
            message = f"a {kind} has no key `{key}`"
            problems.append(Problem.of("unknown-key", f"{kind}.{key}", value, message, fix))
    return problems


class SeveralErrors(UserError):
    """The findings of several independent checks, as one numbered list."""

    def __init__(self, errors: Iterable[Exception]) -> None:
        self.errors = tuple(errors)
        super().__init__(self.errors)

    def __str__(self) -> str:
        problems: list[object] = []
        for error in self.errors:
            problems += error.problems if isinstance(error, ConfigError) else [error]
        return "\n".join(
            [f"{len(problems)} problems", *(f"{n}. {x}" for n, x in enumerate(problems, 1))]
        )


def refuse_together(errors: Collection[Exception]) -> None:
    """Raises the error in `errors` if it is the only one, a SeveralErrors if there are more."""
    if len(errors) > 1:
        raise SeveralErrors(errors)
    for error in errors:
        raise error


def found_by(check: Callable[[], object]) -> list[Exception]:
    """The problems found by a check that raises errors for the user; empty where it passes."""
    try:
        check()
    except SeveralErrors as error:
        return list(error.errors)
    except ValueError as error:
        if not is_user_error(error):
            raise
        return [error]
    return []


def independent(problems: Iterable[Problem], broken: Collection[str]) -> list[Problem]:
    """The problems that involve no key in `broken`, since the value of a broken key is
    meaningless."""
    return [
        problem
        for problem in problems
        if problem.key not in broken and not any(key in broken for key in problem.related)
    ]
