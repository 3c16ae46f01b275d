"""Base of the configuration's sections: strict frozen fields, ranges, legal values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, NamedTuple, cast

from pydantic import BaseModel, ConfigDict

from moemesh.config.errors import Problem
from moemesh.config.shown import Shown
from moemesh.config.toml import format_value

#: The largest size a 32-bit index can name; beyond it every product overflows somewhere.
LARGEST_SIZE = 2**31 - 1


class Range(NamedTuple):
    """The legal values of a number, ends included unless `open`."""

    low: float
    high: float | None = None
    open_low: bool = False
    open_high: bool = False

    def holds(self, value: float) -> bool:
        if value < self.low or (self.open_low and value == self.low):
            return False
        return self.high is None or value < self.high or (value == self.high and not self.open_high)

    def describe(self, value: float) -> str:
        """The end of the range that `value` lies beyond, in words."""
        if value <= self.low:
            return f"{'above' if self.open_low else 'at least'} {self.low:g}"
        # Sizes are exact integers: `:g` would round 2147483647.
        high = self.high if isinstance(self.high, int) else f"{self.high:g}"
        return f"{'below' if self.open_high else 'at most'} {high}"


COUNT = Range(0, LARGEST_SIZE)
SIZE = Range(1, LARGEST_SIZE)
POSITIVE = Range(0.0, open_low=True)
NOT_NEGATIVE = Range(0.0)
SHARE = Range(0.0, 1.0, open_high=True)


def as_tuple(value: object) -> object:
    """TOML has lists only; a frozen section keeps a tuple."""
    return tuple(value) if isinstance(value, list) else value  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


class Section(Shown, BaseModel):
    """Base of the sections: frozen, no unknown field, no silent conversion, no nan or inf."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    #: The name of the section in a file, the first part of its keys.
    section: ClassVar[str] = ""
    ranges: ClassVar[Mapping[str, Range]] = {}

    def problem(self, code: str, name: str, message: str, fix: str, *related: str) -> Problem:
        """A problem of the key `name` of this section; `related` are other keys of it."""
        return Problem(
            code=code,
            key=f"{self.section}.{name}",
            value=getattr(self, name),
            message=message,
            fix=fix,
            related=tuple(f"{self.section}.{other}" for other in related),
        )

    def range_problems(self) -> list[Problem]:
        """One problem for every number outside its range."""
        problems: list[Problem] = []
        for name, legal in self.ranges.items():
            value = cast("float | tuple[float, ...] | None", getattr(self, name))
            for number in value if isinstance(value, tuple) else (value,):
                if number is None or legal.holds(number):
                    continue
                field = type(self).model_fields[name]
                default = None if field.is_required() else cast("float", field.default)
                near = _nearest(number, legal, default)
                problems.append(
                    Problem.of(
                        "out-of-range",
                        f"{self.section}.{name}",
                        value,
                        f"{name} must be {legal.describe(number)}, not {_short(number)}",
                        (
                            f"give {name} a value {legal.describe(number)}"
                            if near is None
                            else f"{name} = {format_value(near)}"
                        ),
                    )
                )
                break
        return problems


def _short(number: float) -> str:
    digits = 30
    if isinstance(number, int) and abs(number) >= 10**digits:
        return f"an integer of more than {digits} digits"
    return str(number)


def _nearest(number: float, legal: Range, default: object) -> object:
    """The end of the range next to `number`; the default where the end itself is not legal, None
    for a key without one."""
    if number <= legal.low:
        end, is_open = legal.low, legal.open_low
    else:
        assert legal.high is not None
        end, is_open = legal.high, legal.open_high
    if is_open or isinstance(default, tuple):
        return cast("object", default)
    return end
