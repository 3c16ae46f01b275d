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
from moemesh.planner.requests import BATCH_HELP, CLUSTER_HELP, LENGTH_HELP, MODEL_HELP


def options_from(
    settings: type, /, **completions: Complete
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace the first parameter of a verb by one option for each field of `settings`.

    An option's field is annotated `Annotated[type, help]` or `Annotated[type, help, keywords]`,
    keywords being those of `typer.Option` (`min`, `metavar`, ...), `names` the option's own names
    `argument` True for an argument, and `tokens` True for a number of tokens ("4k"), "any sign"
    where the verb judges it. Its default is the field's. The verb gets an instance.
    `completions` complete the values of fields in a shell.
    """

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(verb)
        _, *others = signature.parameters.values()
        hints = get_type_hints(settings, include_extras=True)
        own: list[inspect.Parameter] = []
        for field in fields(settings):
            if get_origin(hints[field.name]) is not Annotated:
                continue
            kind, text, *more = get_args(hints[field.name])
            keywords: dict[str, Any] = dict(more[0]) if more else {}
            make = typer.Argument if keywords.pop("argument", False) else typer.Option
            flags = keywords.pop("names", ())
            if parser := keywords.pop("tokens", False):
                parser = tokens_of_any_sign if parser == "any sign" else tokens
                keywords = {"parser": parser, "metavar": "N"} | keywords
            if field.name in completions:
                keywords["autocompletion"] = completions[field.name]
            own.append(
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=inspect.Parameter.empty if field.default is MISSING else field.default,
                    annotation=Annotated[kind, make(*flags, help=text, **keywords)],
                )
            )
        names = [parameter.name for parameter in own]

        @wraps(verb)
        def call(**given: Any) -> None:
            verb(settings(**{name: given.pop(name) for name in names}), **given)

        others = [other.replace(kind=inspect.Parameter.KEYWORD_ONLY) for other in others]
        # typer reads both, and follows `__wrapped__` to the verb's own if it is there.
        call.__signature__ = signature.replace(parameters=[*own, *others])  # type: ignore[attr-defined]
        call.__annotations__ = {p.name: p.annotation for p in (*own, *others)}
        del call.__wrapped__  # type: ignore[attr-defined]
        return call

    return decorate


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


#: Options of every verb that is asked about a model on a cluster.
MODEL = typer.Option(
    "--model",
    metavar="M",
    autocompletion=completion.models,
    help=MODEL_HELP,
)
CLUSTER = typer.Option(
    "--cluster", metavar="C", autocompletion=completion.clusters, help=CLUSTER_HELP
)
PLAN = typer.Option(
    "--plan",
    metavar="PLAN",
    autocompletion=completion.plans,
    help='"tp=2,dp=4,ep=8", a packaged plan or a TOML file.',
)
LENGTH = typer.Option("--seq-len", metavar="S", parser=tokens_of_any_sign, help=LENGTH_HELP)
BATCH = typer.Option("--global-batch", metavar="B", help=BATCH_HELP)
