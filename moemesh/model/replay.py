"""A forward that is computed a second time, for its backward: what it must not do again.

Whoever computes a part of the model again (:mod:`moemesh.parallel.recompute`) puts a replay of its
own in the context. The default is that of a forward computed once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar

from torch import Tensor

from moemesh.ops.pending import Pending

T = TypeVar("T")
P = ParamSpec("P")
#: A dispatcher's combine: rows and their plan -> sums per token.
Send = Callable[[Tensor, Any], Pending[Tensor]]


class Replay(Protocol):
    """What the layers of a forward ask for."""

    def once(self, decide: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """A decision without gradient: choices of experts, exchanged counts, dispatch plans. The
        second computation gets what the first one got, without asking anybody again."""
        ...

    def unread(self, send: Send, y_RH: Tensor, plan: Any, num_tokens: int) -> Pending[Tensor]:
        """``send(y, plan)``, rows [num_tokens, H] of which no backward reads anything: the second
        computation does not send."""
        ...


class FirstTime:
    """Nothing is computed a second time: decide, and send."""

    def once(self, decide: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return decide(*args, **kwargs)

    def unread(self, send: Send, y_RH: Tensor, plan: Any, num_tokens: int) -> Pending[Tensor]:
        return send(y_RH, plan)


FIRST_TIME = FirstTime()
