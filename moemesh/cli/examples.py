"""Examples in the help of verbs: kept as they are written, so that they can be copied."""

import inspect
import re
from collections.abc import Callable
from textwrap import wrap
from typing import Any

import typer

from moemesh.cli.arguments import Group, Verb

#: The columns of a line of an example, two of indentation by click and four of its own left out.
_COLUMNS = 72
_INDENT = "    "


class Verbs(typer.Typer):
    """Commands whose docstrings may hold examples: paragraphs that are indented by four."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(
            cls=Group,
            rich_markup_mode=None,
            pretty_exceptions_enable=False,
            no_args_is_help=True,
            **keywords,
        )

    def command(self, *names: Any, **keywords: Any) -> Callable[[Any], Any]:
        register = super().command(*names, cls=Verb, **keywords)

        def add(verb: Any) -> Any:
            verb.__doc__ = with_examples(verb.__doc__ or "")
            return register(verb)

        return add


def with_examples(text: str) -> str:
    """The docstring `text` with every example marked to be kept, a line a command; a long command
    goes on behind a backslash."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(_kept(one) if _is_example(one) else one for one in paragraphs)


def _is_example(paragraph: str) -> bool:
    return all(line.startswith(_INDENT) for line in paragraph.splitlines())


def _kept(paragraph: str) -> str:
    """click keeps the lines of a paragraph that begins with a backspace."""
    commands = inspect.cleandoc(paragraph).replace("\\\n", "").splitlines()
    lines = [line for command in commands for line in _folded(" ".join(command.split()))]
    return "\n".join(["\b", *(_INDENT + line for line in lines)])


def _folded(command: str) -> list[str]:
    """The lines of a command; an option and its value stay on one."""
    parts = wrap(
        re.sub(r"(--\S+) (?!-)", "\\1\0", command),
        _COLUMNS - 2,
        subsequent_indent=_INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
    parts = [part.replace("\0", " ") for part in parts]
    return [f"{part} \\" for part in parts[:-1]] + parts[-1:]
