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
    """A pending exchange: `place` represents its result in the autograd graph. Its backward may be
    cut there: until it is waited for, `place` can be replaced by a leaf."""

    place: Tensor
    is_waited: bool = False

    def take(self) -> Tensor:
        """The place, for the half of the exchange that waits."""
        self.is_waited = True
        return self.place


@dataclass(frozen=True)
class Pending(Generic[T]):
    """:meth:`wait`, called exactly once, gives the value; `exchanges`: pending ones."""

    wait: Callable[[], T]
    exchanges: tuple[Started, ...] = ()

    @staticmethod
    def ready(value: T) -> Pending[T]:
        """A value that needs no waiting."""
        return Pending(lambda: value)

    def then(self, function: Callable[[T], U]) -> Pending[U]:
        """`function` of the value, computed when it is waited for."""
        return Pending(lambda: function(self.wait()), self.exchanges)

    def join(self, other: Pending[U]) -> Pending[tuple[T, U]]:
        """Both values, this one waited for first."""
        return Pending(lambda: (self.wait(), other.wait()), self.exchanges + other.exchanges)
