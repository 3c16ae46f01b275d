"""Something that is under way and can be waited for."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

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


@dataclass
class UnderWay:
    """An exchange that has started: `place` stands in the autograd graph for what it brings.

    Its backward may be cut there: until it is waited for, `place` can be replaced by a leaf.
    """

    place: Tensor
    waited: bool = False

    def take(self) -> Tensor:
        """The place, for the half of the exchange that waits."""
        self.waited = True
        return self.place


# Only the thread that computes a forward starts exchanges: one slot is enough.
_watcher: list[UnderWay] | None = None


@contextmanager
def exchanges_started() -> Generator[list[UnderWay]]:
    """The exchanges that start inside of the context, in order; not nested."""
    global _watcher
    assert _watcher is None, "exchanges are already being watched"
    _watcher = found = []
    try:
        yield found
    finally:
        _watcher = None


def under_way(place: Tensor) -> UnderWay:
    """Tell who watches that an exchange has started."""
    exchange = UnderWay(place)
    if _watcher is not None:
        _watcher.append(exchange)
    return exchange
