"""Conditions of a generator on its numbers, and the nearest numbers that satisfy them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from moemesh.config.errors import UserError

Numbers = Mapping[str, int]


@dataclass(frozen=True)
class Condition:
    """A rule over the numbers `names`: its `text`, and a function that returns the violation as
    text, "" if the rule holds."""

    text: str
    names: tuple[str, ...]
    violation: Callable[[Numbers], str]

    def holds(self, numbers: Numbers) -> bool:
        return not self.violation(numbers)


class ScheduleConditionError(UserError):
    """The schedule is not defined for the numbers."""


def at_least(name: str, bound: int, of: str = "") -> Condition:
    """``name >= bound``, or ``name >= bound * of`` for another number `of`."""
    limit = str(bound) if not of else of if bound == 1 else f"{bound} * {of}"

    def violation(numbers: Numbers) -> str:
        least = bound * (numbers[of] if of else 1)
        return f"{numbers[name]} < {least}" if numbers[name] < least else ""

    return Condition(f"{name} >= {limit}", (name, of) if of else (name,), violation)


def at_most(name: str, bound: int) -> Condition:
    """``name <= bound``."""
    return Condition(
        f"{name} <= {bound}", (name,), lambda n: f"{n[name]} > {bound}" if n[name] > bound else ""
    )


def divisible(name: str, by: int | str) -> Condition:
    """``name % by == 0``; `by` is a number, or the name of another number."""

    def violation(numbers: Numbers) -> str:
        value, of = numbers[name], numbers[by] if isinstance(by, str) else by
        if of < 1 or value % of == 0:  # a divisor below 1 breaks a rule of its own
            return ""
        return str(value) if by == 2 else f"{value} % {of} == {value % of}"

    text = f"an even number of {name}" if by == 2 else f"{name} % {by} == 0"
    return Condition(text, (name, by) if isinstance(by, str) else (name,), violation)


def one_of(name: str, *values: int) -> Condition:
    """``name`` is one of `values`."""
    text = f"{name} == {' or '.join(map(str, values))}"
    return Condition(text, (name,), lambda n: "" if n[name] in values else str(n[name]))


#: Conditions of every schedule: a rank, and a microbatch in each step.
ALWAYS = (at_least("ranks", 1), at_least("microbatches", 1))


def require(schedule: str, conditions: Sequence[Condition], **numbers: int) -> None:
    """Raise ScheduleConditionError naming every condition that fails, with its numbers.

    The message ends with the nearest numbers for which all hold.

    >>> rules = (at_least("microbatches", 1), divisible("microbatches", "ranks"))
    >>> require("interleaved_1f1b", rules, ranks=4, microbatches=10)
    Traceback (most recent call last):
    ...
    moemesh.config.conditions.ScheduleConditionError: interleaved_1f1b needs \
microbatches % ranks == 0, got 10 % 4 == 2 (nearest: microbatches 8 or 12, or ranks 5 or 2)
    """
    for name, value in numbers.items():
        # bool is an int to Python, but True ranks are a slip.
        if type(value) is not int:
            raise ScheduleConditionError(f"{schedule} needs {name} to be an integer, got {value!r}")
    broken = [rule for rule in conditions if not rule.holds(numbers)]
    if not broken:
        return
    lines = [f"{schedule} needs {rule.text}, got {rule.violation(numbers)}" for rule in broken]
    # Alternatives that change one number, if there are any; else one change of several numbers.
    hint = ", or ".join(
        f"{name} {' or '.join(map(str, values))}"
        for name in dict.fromkeys(name for rule in broken for name in rule.names)
        if (values := _legal(conditions, numbers, name))
    )
    if not hint:
        # Among equally near candidates larger numbers come first: more microbatches rather than
        # fewer ranks.
        together = sorted(
            _settled(conditions, numbers, list(numbers)),
            key=lambda candidate: (
                sum(abs(candidate[name] - numbers[name]) for name in numbers),
                -sum(candidate.values()),
            ),
        )
        hint = ", ".join(
            f"{name} {nearest[name]}"
            for nearest in together[:1]
            for name in numbers
            if nearest[name] != numbers[name]
        )
    lines[-1] += f" (nearest: {hint})" if hint else ""
    raise ScheduleConditionError("\n".join(lines))


def _settled(
    conditions: Sequence[Condition], given: Numbers, names: Sequence[str]
) -> Iterator[Numbers]:
    """All ways to change the numbers `names` in turn so that every condition holds: each number is
    kept, or takes the nearest value below or above for which the rules over it and the earlier
    numbers hold."""
    if not names:
        yield given
        return
    name, later = names[0], names[1:]
    rules = [rule for rule in conditions if not set(later) & set(rule.names)]
    holds = all(rule.holds(given) for rule in rules)
    for value in [given[name]] if holds else _legal(rules, given, name):
        yield from _settled(conditions, {**given, name: value}, later)


def _legal(rules: Sequence[Condition], given: Numbers, name: str) -> list[int]:
    """The values of `name` for which all `rules` hold, nearest first: at most one below the given
    value, and one above it."""
    value = given[name]
    # No rule needs more than twice another number; a value beyond this bound would not be "near".
    reach = min(2 * sum(map(abs, given.values())) + 2, 10_000)
    legal: list[int] = []
    for direction in (-1, 1):
        for distance in range(1, reach + 1):
            candidate = value + direction * distance
            if candidate < 1:
                if direction < 0:
                    break
                continue
            numbers = {**given, name: candidate}
            if all(rule.holds(numbers) for rule in rules):
                legal.append(candidate)
                break
    return sorted(legal, key=lambda candidate: (abs(candidate - value), candidate))
