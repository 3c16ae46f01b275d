"""Something that is under way and can be waited for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class Pending(Generic[T]):
    """:meth:`wait` gives the value; it must be called exactly once."""

    wait: Callable[[], T]

    @staticmethod
    def ready(value: T) -> Pending[T]:
        """A value that needs no waiting."""
        return Pending(lambda: value)

    def then(self, function: Callable[[T], U]) -> Pending[U]:
        """`function` of the value, computed when it is waited for."""
        return Pending(lambda: function(self.wait()))
