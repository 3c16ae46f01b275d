"""Base of the configuration's sections: strict frozen fields, ranges, legal values."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Annotated, ClassVar, Literal, NamedTuple, cast, get_args, get_origin

from pydantic import BaseModel, ConfigDict, model_validator

from moemesh.config.errors import Problem
from moemesh.config.shown import Shown
from moemesh.config.toml import format_value

#: The largest number that a signed index of 32 bits can hold.
LARGEST_SIZE = 2**31 - 1


class Range(NamedTuple):
    """The legal values of a number, from `low` to `high`; each end is legal unless it is open."""

    low: float
    high: float | None = None
    open_low: bool = False
    open_high: bool = False

    def holds(self, value: float) -> bool:
        if value < self.low or (self.open_low and value == self.low):
            return False
        return self.high is None or value < self.high or (value == self.high and not self.open_high)

    def describe(self, value: float) -> str:
        """The bound that `value` breaks, as text: "at least 1"."""
        if value <= self.low:
            return f"{'above' if self.open_low else 'at least'} {self.low:g}"
        # Sizes are exact integers: `:g` would round 2147483647.
        high = self.high if isinstance(self.high, int) else f"{self.high:g}"
        return f"{'below' if self.open_high else 'at most'} {high}"


class UsedWith(NamedTuple):
    """Annotation of a field that has an effect only if the key `other` of its section is one of
    `values`, and otherwise keeps its default."""

    other: str
    values: Collection[object]


# Types of fields with a range.
Count = Annotated[int, Range(0, LARGEST_SIZE)]
Size = Annotated[int, Range(1, LARGEST_SIZE)]
Positive = Annotated[float, Range(0.0, open_low=True)]
NotNegative = Annotated[float, Range(0.0)]
Share = Annotated[float, Range(0.0, 1.0, open_high=True)]


def range_in(annotation: object) -> Range | None:
    """The range of a number in an annotation, or that of a tuple of numbers."""
    ranges = (range_in(part) for part in get_args(annotation))
    return annotation if isinstance(annotation, Range) else next(filter(None, ranges), None)


def elements_of(annotation: object) -> type[int | float | str] | None:
    """The type of the elements of a list of numbers or texts; None for another annotation."""
    if get_origin(annotation) is not tuple:
        parts = map(elements_of, get_args(annotation))
        return next(filter(None, parts), None)
    element = next(iter(get_args(annotation)), None)
    if get_origin(element) is Literal:
        return str
    if get_origin(element) is Annotated:
        element = get_args(element)[0]
    return element if element in (int, float, str) else None


def problem_of(
    section: str, values: object, code: str, name: str, message: str, fix: str, *related: str
) -> Problem:
    """Same as :meth:`Section.problem`, for other `values` with an attribute `name`."""
    return Problem(
        code=code,
        key=f"{section}.{name}",
        value=getattr(values, name),
        message=message,
        fix=fix,
        related=tuple(key if "." in key else f"{section}.{key}" for key in related),
    )


class Section(Shown, BaseModel):
    """Base of the sections: frozen, no unknown field, no nan or inf, no silent conversion but of
    lists to tuples, whole numbers to floats, and texts where a field reads them."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    #: The name of the section in a file, the first part of its keys.
    section: ClassVar[str] = ""
    #: Field -> the range of its numbers, from its annotation.
    ranges: ClassVar[Mapping[str, Range]] = {}
    #: Field -> condition of its use, from its annotation.
    uses: ClassVar[Mapping[str, UsedWith]] = {}
    #: Field with a list of numbers or texts -> the type of its elements.
    elements: ClassVar[Mapping[str, type[int | float | str]]] = {}

    @classmethod
    def __pydantic_init_subclass__(cls, **_: object) -> None:
        fields = cls.model_fields.items()
        limits = {name: range_in(tuple[item.annotation, *item.metadata]) for name, item in fields}
        cls.ranges = {name: limit for name, limit in limits.items() if limit is not None}
        kinds = {name: elements_of(item.annotation) for name, item in fields}
        cls.elements = {name: kind for name, kind in kinds.items() if kind is not None}
        pairs = ((name, data) for name, item in fields for data in item.metadata)
        cls.uses = {name: data for name, data in pairs if isinstance(data, UsedWith)}

    @model_validator(mode="before")
    @classmethod
    def _with_tuples(cls, values: object) -> object:
        """`values` with tuples in place of lists, since a frozen section needs them. A text in
        place of a list is split at commas: ``--set lora.targets=q_proj,v_proj``."""
        if not isinstance(values, dict):
            return values
        given = dict(cast("dict[str, object]", values))
        for key, value in given.items():
            if isinstance(value, list):
                given[key] = tuple(cast("list[object]", value))
            elif isinstance(value, str) and (kind := cls.elements.get(key)) is not None:
                parts = [part.strip() for part in value.split(",")]
                with suppress(ValueError):
                    given[key] = tuple(map(kind, parts))
        return given

    def problem(self, code: str, name: str, message: str, fix: str, *related: str) -> Problem:
        """A problem of the key `name` of this section; `related` are other keys of the rule, of
        this section unless they name another."""
        return problem_of(self.section, self, code, name, message, fix, *related)

    def unused_problems(self) -> Iterator[Problem]:
        """One problem for every key that is set although the value of another key disables it."""
        for name, (other, values) in self.uses.items():
            value, default = getattr(self, name), type(self).model_fields[name].default
            if value != default and (current := getattr(self, other)) not in values:
                given, condition = f"{name} = {format_value(value)}", f"{other} = "
                message = f"{given} has no use with {condition}{format_value(current)}"
                fix = (
                    f"leave {name} out" if default is None else f"{name} = {format_value(default)}"
                )
                fix += f", or {condition}{' or '.join(map(format_value, values))}"
                yield self.problem("conflict", name, message, fix, other)

    def range_problems(self) -> list[Problem]:
        """One problem for every field with a number outside its range."""
        problems: list[Problem] = []
        for name, legal in self.ranges.items():
            value = cast("float | tuple[float, ...] | None", getattr(self, name))
            numbers = value if isinstance(value, tuple) else (value,)
            outside = [n for n in numbers if n is not None and not legal.holds(n)]
            for number in outside[:1]:
                # The fix is the end of the range on this side, or else the default.
                end, is_open = legal.low, legal.open_low
                if number > legal.low:
                    end, is_open = legal.high, legal.open_high
                field = type(self).model_fields[name]
                default = None if field.is_required() else cast("float | None", field.default)
                if is_open or isinstance(default, tuple):  # the end is not legal, or one of several
                    end = default
                words, shown = legal.describe(number), str(number)
                if isinstance(number, int) and abs(number) >= 10**30:
                    shown = "an integer of more than 30 digits"
                fix = f"give {name} a value {words}"
                if end is not None:
                    fix = f"{name} = {format_value(end)}"
                message = f"{name} must be {words}, not {shown}"
                problems.append(self.problem("out-of-range", name, message, fix))
        return problems
