"""Options of a verb from its parameters or the fields of its request, and shell completion.

Completion (``moemesh --install-completion``) must be fast: names are imported on demand.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import partial, wraps
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from moemesh.config.errors import ConfigError

Complete = Callable[[str], list[str]]


def words(load: Callable[[], Iterable[str]]) -> Complete:
    """Completion of one of these names, or of the last in a comma-separated list."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in load() if name.startswith(last)]

    return complete


def _presets(*folders: str) -> list[str]:
    """The packaged presets of the folders ("" has the models)."""
    from moemesh.config.sources import preset_names

    return [name for folder in folders for name in preset_names(folder)]


def _choices(key: str, *more: str) -> list[str]:
    """The choices of a key of [plan], and `more`."""
    from moemesh.config.plan import Plan
    from moemesh.config.suggest import choices_of

    return [*more, *choices_of(Plan.model_fields[key].annotation)]


def _operations() -> tuple[str, ...]:
    from moemesh.bench.settings import OPERATIONS

    return ("all", *OPERATIONS)


clusters = words(partial(_presets, "clusters"))
schedules = words(partial(_choices, "schedule"))
collectives = words(_operations)
#: Completion of fields of requests, in every verb.
BY_FIELD: dict[str, Complete] = {
    "model": words(partial(_presets, "", "shapes")),
    "cluster": clusters,
    "plan": words(partial(_presets, "plans")),
    "routing": words(partial(_presets, "routings")),
    "dispatcher": words(partial(_choices, "dispatcher")),
}


def settings(incomplete: str) -> list[str]:
    """Completion of ``--set``: a key of the configuration, and after "=" its value if it is one of
    a few names."""
    from moemesh.config.schema import PRESET_KEY, SECTIONS, all_keys
    from moemesh.config.suggest import choices_of

    key, equals, value = incomplete.partition("=")
    if not equals:
        return [f"{name}=" for name in all_keys() if name.startswith(key)]
    if key == PRESET_KEY:
        return [f"{key}={name}" for name in _presets("") if name.startswith(value)]
    section, _, leaf = key.partition(".")
    fields = SECTIONS[section].model_fields if section in SECTIONS else {}
    if leaf not in fields:
        return []
    kind = fields[leaf].annotation
    choices = ("true", "false") if kind is bool else choices_of(kind)
    return [f"{key}={name}" for name in choices if name.startswith(value)]


def with_options(
    verb: Callable[..., None], completions: Mapping[str, Complete]
) -> Callable[..., None]:
    """The verb with a signature for typer. If the first parameter is a frozen dataclass, the
    request of the verb, each field becomes an option, and the verb is called with an instance.

    A field or parameter is annotated `Annotated[type, help]`, `Annotated[type, help, metavar]` or
    `Annotated[type, help, keywords]`; the metavar of an argument is "<OUT>". Keywords are those of
    `typer.Option` (`min`, ...); `names`, the names of the option (by default a bool has no `--no-`
    form); and `tokens`, True for a number of tokens ("4k"), "any sign" if the verb checks the sign.
    An option of typer may be given instead. `completions`: field -> completion of its values, in
    addition to :data:`BY_FIELD`.
    """
    signature = inspect.signature(verb)
    parameters = list(signature.parameters.values())
    request_type: Any = parameters[0].annotation if parameters else None
    names: list[str] = []
    if is_dataclass(request_type):
        hints = get_type_hints(request_type, include_extras=True)
        names = [item.name for item in fields(request_type)]
        parameters[:1] = [
            parameters[0].replace(
                name=item.name,
                default=inspect.Parameter.empty if item.default is MISSING else item.default,
                annotation=hints[item.name],
            )
            for item in fields(request_type)
            if get_origin(hints[item.name]) is Annotated
        ]
    for place, parameter in enumerate(parameters):
        hint = parameter.annotation
        if get_origin(hint) is Annotated and isinstance(get_args(hint)[1], str):
            name, (value, text, *rest) = parameter.name, get_args(hint)
            more: Any = rest[0] if rest else {}
            keywords = {"metavar": more} if isinstance(more, str) else dict(more)
            make, metavar = typer.Option, keywords.get("metavar", "")
            if metavar.startswith("<"):
                keywords["metavar"], make = metavar[1:-1], typer.Argument
            default = (f"--{name.replace('_', '-')}",) if value is bool else ()
            flags = keywords.pop("names", default)
            if parser := keywords.pop("tokens", False):
                parser = tokens_of_any_sign if parser == "any sign" else tokens
                keywords = {"parser": parser, "metavar": "N"} | keywords
            if complete := completions.get(name) or BY_FIELD.get(name):
                keywords["autocompletion"] = complete
            hint = Annotated[value, make(*flags, help=text, **keywords)]
        keyword_only = inspect.Parameter.KEYWORD_ONLY
        parameters[place] = parameter.replace(kind=keyword_only, annotation=hint)

    @wraps(verb)
    def of_request(**given: Any) -> None:
        values = {name: given.pop(name) for name in names if name in given}
        verb(request_type(**values), **given)

    call: Any = of_request if names else verb
    # typer reads signature and annotations, and would follow `__wrapped__` to those of the verb.
    call.__signature__ = signature.replace(parameters=parameters)
    call.__annotations__ = {p.name: p.annotation for p in parameters}
    vars(call).pop("__wrapped__", None)
    return call


def given(request: Any, *names: str) -> list[str]:
    """Flags of the options `names` that have a value in a request."""
    values = {name: getattr(request, name) for name in names}
    return [
        f"--{name.replace('_', '-')}"
        for name, value in values.items()
        if value is not None and value is not False
    ]


def tokens(text: str | int) -> int:
    """Parses a number of tokens, "4096" or "4k", at least 1."""
    from moemesh.config.data import read_tokens

    try:
        number = read_tokens(str(text), 1024)  # a default is already a number
    except ConfigError as error:
        (problem,) = error.problems
        raise typer.BadParameter(f"{problem.message}, {problem.fix}; not {text!r}") from None
    if number != int(number):
        raise typer.BadParameter(f"{text} is {number:,} tokens: a whole number is needed")
    return int(number)


def tokens_of_any_sign(text: str | int) -> int:
    """Same as :func:`tokens`, without its check of the sign, for verbs that report all problems."""
    return int(text) if re.fullmatch(r"[+-]?\d+", str(text).strip()) else tokens(text)
