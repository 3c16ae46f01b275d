"""Options of a verb from the fields of a frozen dataclass."""

import inspect
import re
from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import wraps
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from moemesh.cli import completion
from moemesh.cli.completion import Complete


def options_from(
    settings: type, /, **completions: Complete
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace the first parameter of a verb by one option for each field of `settings`.

    An option's field is annotated `Annotated[type, help]`, `Annotated[type, help, metavar]` or
    `Annotated[type, help, keywords]`; the metavar of an argument is "<OUT>". Keywords are those of
    `typer.Option` (`min`, ...), `names` the option's own names (a bool has no `--no-` name of
    itself), and `tokens` True for a number of tokens ("4k"), "any sign" where the verb judges it.
    An option of typer may stand in place of them. Its default is the field's. The verb gets an
    instance. `completions` complete the values of fields in a shell,
    :data:`moemesh.cli.completion.BY_FIELD` the others.
    """
    hints = get_type_hints(settings, include_extras=True)
    own, names = list[inspect.Parameter](), [field.name for field in fields(settings)]
    for field in fields(settings):
        hint = hints[field.name]
        if get_origin(hint) is not Annotated:
            continue
        kind, text, *more = get_args(hint)
        if isinstance(text, str):
            hint = Annotated[kind, _option(field.name, kind, text, *more, completions=completions)]
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        way = inspect.Parameter.KEYWORD_ONLY
        own.append(inspect.Parameter(field.name, way, default=default, annotation=hint))

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(verb)
        _, *others = signature.parameters.values()

        @wraps(verb)
        def call(**given: Any) -> None:
            asked = {name: given.pop(name) for name in names if name in given}
            verb(settings(**asked), **given)

        others = [other.replace(kind=inspect.Parameter.KEYWORD_ONLY) for other in others]
        # typer reads both, and follows `__wrapped__` to the verb's own if it is there.
        call.__signature__ = signature.replace(parameters=[*own, *others])  # type: ignore[attr-defined]
        call.__annotations__ = {p.name: p.annotation for p in (*own, *others)}
        del call.__wrapped__  # type: ignore[attr-defined]
        return call

    return decorate


def _option(
    name: str, kind: Any, text: str, more: str | dict[str, Any] = "", *, completions: dict[str, Any]
) -> Any:
    keywords: dict[str, Any] = {"metavar": more or None} if isinstance(more, str) else dict(more)
    metavar = keywords.get("metavar") or ""
    make = typer.Option
    if metavar.startswith("<"):
        keywords["metavar"], make = metavar.strip("<>"), typer.Argument
    flags = keywords.pop("names", (f"--{name.replace('_', '-')}",) if kind is bool else ())
    if parser := keywords.pop("tokens", False):
        parser = tokens_of_any_sign if parser == "any sign" else tokens
        keywords = {"parser": parser, "metavar": "N"} | keywords
    if complete := completions.get(name) or completion.BY_FIELD.get(name):
        keywords["autocompletion"] = complete
    return make(*flags, help=text, **keywords)


def tokens(text: str | int) -> int:
    """The value of an option: tokens of a sequence or a batch, "4096" or "4k"; at least 1."""
    from moemesh.config.data import read_tokens
    from moemesh.config.errors import ConfigError

    try:
        found = read_tokens(str(text), 1024)  # a default is a number already
    except ConfigError as error:
        (problem,) = error.problems
        raise typer.BadParameter(f"{problem.message}, {problem.fix}; not {text!r}") from None
    if found != int(found):
        raise typer.BadParameter(f"{text} is {found:,} tokens: a whole number is needed")
    return int(found)


def tokens_of_any_sign(text: str | int) -> int:
    """The same for verbs that name all that is wrong at once."""
    return int(text) if re.fullmatch(r"[+-]?\d+", str(text).strip()) else tokens(text)
