"""Asynchronous values: started, and waited for later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

T = TypeVar("T")
U = TypeVar("U")


@dataclass
class Started:
    """A pending exchange. `place`: a tensor that represents its result in autograd's graph. Until
    the wait, it can be replaced by a leaf, which cuts the graph there. `end` waits for the rows
    outside of the graph."""

    place: Tensor
    end: Callable[[], object]
    is_waited: bool = False

    def take(self) -> Tensor:
        """:attr:`place`, for the node that waits for the exchange."""
        self.is_waited = True
        return self.place


@dataclass(frozen=True)
class Pending(Generic[T]):
    """:meth:`wait` returns the value; it or :meth:`abandon` is called exactly once. `exchanges`:
    those it waits for."""

    wait: Callable[[], T]
    exchanges: tuple[Started, ...] = ()

    @staticmethod
    def ready(value: T) -> Pending[T]:
        """A value that needs no waiting."""
        return Pending(lambda: value)

    def abandon(self) -> None:
        """Let the exchanges end without a value. If a message were dropped instead, its receiver
        would take the next one of the same tag for it, or wait for ever."""
        for started in self.exchanges:
            if not started.is_waited:
                started.take()
                started.end()

    def then(self, function: Callable[[T], U]) -> Pending[U]:
        """`function` of the value, computed by the wait."""
        return Pending(lambda: function(self.wait()), self.exchanges)

    def join(self, other: Pending[U]) -> Pending[tuple[T, U]]:
        """Both values, this one waited for first."""
        return Pending(lambda: (self.wait(), other.wait()), self.exchanges + other.exchanges)
