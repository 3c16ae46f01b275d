"""One mistake: a command line, and what its message must name."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import NamedTuple


class Mistake(NamedTuple):
    """`command` in the words of a shell; `words` that the message holds: the key or option, what
    was given, the nearest legal choice.

    `toml` is the text of ``bad.toml``; `environ` what is set beside. `foreign`: the message quotes
    a parser of Python, whose words change from version to version. `found_late`: while a file is
    read, when a part of the result is written already.
    """

    command: str
    words: tuple[str, ...]
    toml: str | None = None
    environ: Mapping[str, str] = {}
    foreign: bool = False
    found_late: bool = False

    @property
    def arguments(self) -> list[str]:
        return shlex.split(self.command)

    @property
    def title(self) -> str:
        """The command as a person would see it, with the file and the environment before it."""
        given = "".join(f"{name}={value} " for name, value in self.environ.items())
        shown = f"{given}moemesh {self.command}"
        if self.toml is None:
            return shown
        text = self.toml if len(self.toml) <= 200 else f"{self.toml[:20]}..."
        return f"{shown}   (bad.toml: {text.strip()!r})"


def check(settings: str, *words: str, foreign: bool = False) -> Mistake:
    """`config check` with these settings (``--set`` is put before each)."""
    given = " ".join(f"--set {one}" for one in shlex.split(settings, posix=False))
    return Mistake(f"config check {given}", words, foreign=foreign)


def file(text: str, *words: str, foreign: bool = False) -> Mistake:
    """`config check` of a file with this text."""
    return Mistake("config check bad.toml", words, toml=text, foreign=foreign)
