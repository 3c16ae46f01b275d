"""Divisors of a number, for rules of divisibility and their advice."""

from __future__ import annotations


def divisors(number: int) -> list[int]:
    """All divisors of a positive integer, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def nearest_divisors(number: int, wanted: int) -> str:
    """The divisors of `number` next to `wanted`, below and above: "2 or 4"."""
    return nearest(divisors(number), wanted)


def nearest(legal: list[int], wanted: int) -> str:
    """The same of ascending legal numbers."""
    below = [d for d in legal if d <= wanted][-1:]
    above = [d for d in legal if d > wanted][:1]
    return " or ".join(str(d) for d in below + above)
