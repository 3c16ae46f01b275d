"""Options of benchmarks: the base of their settings, and lists of names on a command line."""

# Light to import: the command reads it to know its options.
from dataclasses import fields
from typing import Any, get_args, get_type_hints

from moemesh.config.errors import UserError


class BenchError(UserError):
    """Settings of a benchmark that do not fit together."""


def described(kinds: dict[str, str]) -> str:
    """A line for each name and its meaning."""
    width = max(map(len, kinds))
    return "\n".join(f"  {name:{width}}  {meaning}" for name, meaning in kinds.items())


def names_in(text: str, known: dict[str, str] | tuple[str, ...], what: str) -> tuple[str, ...]:
    """The names of `text` ("W0,W3" or "all"). Raises BenchError with the meaning of each name."""
    names = tuple(known) if text == "all" else tuple(text.split(","))
    for name in names:
        if name not in known:
            choices = (
                ":\n" + described(known)
                if isinstance(known, dict)
                else f": all, or some of {', '.join(known)}"
            )
            raise BenchError(f"no {what} {name!r} here{choices}")
    return names


def counts_in(text: str) -> tuple[int, ...]:
    """Numbers of ranks such as "1,4". Raises BenchError."""
    words = text.split(",")
    if not all(word.isdecimal() and int(word) for word in words):
        raise BenchError(f'--ranks "{text}": numbers of at least 1 with commas, such as 1,4')
    return tuple(map(int, words))


class Settings:
    """Base of all settings: fields with `Annotated[type, help, keywords]` are options."""

    def __post_init__(self) -> None:
        for name, hint in self._options().items():
            choices = get_args(get_args(hint)[0])
            if choices and (value := getattr(self, name)) not in choices:
                raise BenchError(f"no {name} {value!r}: choose from {', '.join(choices)}")
        self.check()

    def check(self) -> None:
        """Raises BenchError for values that do not fit together."""

    def words(self) -> list[str]:
        """The options of a command line with these settings."""
        given = ((name, getattr(self, name)) for name in self._options())
        options = ((f"--{name.replace('_', '-')}", str(value)) for name, value in given)
        return [word for option in options for word in option]

    def to_json(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]

    @classmethod
    def _options(cls) -> dict[str, Any]:
        hints = get_type_hints(cls, include_extras=True)
        return {name: hint for name, hint in hints.items() if hasattr(hint, "__metadata__")}


def check_divides(part_name: str, part: int, whole_name: str, whole: int) -> None:
    if part < 1 or whole % part:
        raise BenchError(f"{part_name} ({part}) must divide {whole_name} ({whole})")
