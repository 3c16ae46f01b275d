"""Costs of operations and messages of a pipeline: numbers, lists per stage, or functions.

Letters of the literature: tF forward, tI input gradient, tW weight gradient, tB = tI + tW full
backward, tFB one overlapped block of a forward and a backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral, Rational
from typing import Any, cast

from moemesh.schedule.action import Entry, Kind, Op, Schedule

#: A number for one microbatch on one rank's whole share of layers (a chunk costs 1/v of it), a
#: list with the cost of a microbatch on each stage, or a function of the operation. A slice costs
#: 1/num_slices of a number or of a list's item; what a function returns is taken as it is.
Cost = float | Sequence[float] | Callable[[Op], float]
#: A cost bound to a schedule: a list over stages, or a function of the operation.
OpCosts = list[float] | Callable[[Op], float]

#: Time of a message: a number, a list over the boundaries (item s between stage s and s + 1,
#: both ways), or a function of producer and consumer. The cost is never divided: v chunks send v
#: times the messages, each of the same size.
MessageCost = float | Sequence[float] | Callable[[Op, Op], float]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Times of operations and messages, in any unit; integers stay integers (ticks).

    `backward` (default: `input_gradient` + `weight_gradient`) is the full backward ``B``;
    `overlapped` a block of one ``F`` and one ``B``, a number or a function of the entry (default:
    the sum of its operations; other blocks always cost their sum). `message` is the time from the
    end of the producer until the consumer on another rank may start; with the transport "link" of
    the simulator `message_size` / `bandwidth` comes on top. Negative or infinite costs raise
    ValueError when they are bound to a schedule, those of functions when they are called.
    """

    forward: Cost = 1
    input_gradient: Cost = 1
    weight_gradient: Cost = 1
    backward: Cost | None = None
    overlapped: float | Callable[[Entry], float] | None = None
    message: MessageCost = 0
    message_size: MessageCost = 0
    bandwidth: float = math.inf

    def bind(self, schedule: Schedule) -> BoundCosts:
        """The costs of this schedule's entries and messages."""
        return BoundCosts(self, schedule)


class BoundCosts:
    """Costs of one schedule's entries. A clock that adds these numbers, as the simulator does,
    agrees with it to the last bit."""

    def __init__(self, costs: Costs, schedule: Schedule) -> None:
        if not costs.bandwidth > 0:
            raise ValueError(f"bandwidth {costs.bandwidth} must be above 0")
        self.costs = costs
        self.schedule = schedule
        forward = self._by_op("forward", costs.forward)
        inner = self._by_op("input_gradient", costs.input_gradient)
        weight = self._by_op("weight_gradient", costs.weight_gradient)
        if costs.backward is not None:
            backward = self._by_op("backward", costs.backward)
        elif callable(inner) or callable(weight):
            halves: tuple[tuple[Kind, OpCosts], ...] = (("I", inner), ("W", weight))

            def both(op: Op) -> float:
                # Functions of the halves are called with I and W, never with B.
                a, b = (
                    table(op._replace(kind=kind)) if callable(table) else table[op.stage]
                    for kind, table in halves
                )
                return a + b

            backward = both
        else:
            backward = [a + b for a, b in zip(inner, weight, strict=True)]
        self.by_kind: dict[Kind, OpCosts] = {
            "F": forward,
            "B": backward,
            "I": inner,
            "W": weight,
        }
        #: Times of messages: a list over boundaries, or a function of producer and consumer.
        self.delays = self._by_boundary("message", costs.message)
        self._sizes = self._by_boundary("message_size", costs.message_size)
        self._overlapped = costs.overlapped
        if self._overlapped is not None and not callable(self._overlapped):
            self._overlapped = _divided(exact(self._overlapped, "overlapped"), self._parts)

    @property
    def is_by_stage(self) -> bool:
        """Whether entries of the same kinds of operations on the same stages cost the same."""
        return not any(map(callable, (*self.by_kind.values(), self._overlapped)))

    def op(self, op: Op) -> float:
        """Time of one operation on its own."""
        table = self.by_kind[op.kind]
        return exact(table(op), str(op)) if callable(table) else table[op.stage]

    def entry(self, entry: Entry) -> float:
        """Time of an operation, or of an overlapped block."""
        if len(entry) == 1:
            return self.op(entry[0])
        if self._overlapped is not None and sorted(op.kind for op in entry) == ["B", "F"]:
            if not callable(self._overlapped):
                return self._overlapped
            return exact(self._overlapped(entry), "+".join(map(str, entry)))
        return sum(map(self.op, entry))

    def message(self, producer: Op, consumer: Op) -> float:
        """Time a message takes between two ranks."""
        return _edge(self.delays, producer, consumer)

    def transfer(self, producer: Op, consumer: Op) -> float:
        """Time a message occupies its link: size over bandwidth."""
        return _edge(self._sizes, producer, consumer) / self.costs.bandwidth

    @property
    def _parts(self) -> float:
        """Pieces that a rank's share of a microbatch is cut into: chunks times slices."""
        schedule = self.schedule
        pieces = schedule.num_stages * schedule.num_slices
        whole, rest = divmod(pieces, schedule.num_ranks)
        return pieces / schedule.num_ranks if rest else whole

    def _by_op(self, name: str, cost: Cost) -> OpCosts:
        if callable(cost):
            return cost
        stages = self.schedule.num_stages
        parts = self.schedule.num_slices if isinstance(cost, Sequence) else self._parts
        return [_divided(item, parts) for item in exact_list(cost, name, stages, "costs", "stages")]

    def _by_boundary(self, name: str, cost: MessageCost) -> list[float] | Callable[[Op, Op], float]:
        if callable(cost):
            return cost
        return exact_list(cost, name, self.schedule.num_stages - 1, "costs", "boundaries")


def exact(value: float, name: str) -> float:
    """`value` as a Python number that adds exactly: int, Fraction or float64, never float32. Raises
    ValueError when it is negative or not finite, TypeError for anything but a number."""
    number: float
    if isinstance(value, Integral):
        number = int(cast(int, value))
    elif isinstance(value, Rational):
        number = cast(float, value)
    else:
        item: Any = None if isinstance(value, str) else value  # float("1") is a number
        try:
            number = float(item)
        except TypeError:
            kind = type(value).__name__
            raise TypeError(
                f"cost {name} must be a number, a list of numbers or a function, not {kind}"
            ) from None
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"cost {name} is {value}: must be finite and at least 0")
    return number


def exact_list(
    value: float | Sequence[float], name: str, count: int, items: str, places: str
) -> list[float]:
    """`count` exact numbers: those of a list, or one number repeated. Raises ValueError for a list
    of another length; `items` and `places` are nouns for its message."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return [exact(cast(float, value), name)] * count
    if len(value) != count:
        raise ValueError(f"{name} has {len(value)} {items} for {count} {places}")
    return [exact(item, name) for item in value]


def _divided(value: float, parts: float) -> float:
    """`value` / `parts`, an integer when it comes out whole."""
    if isinstance(value, int) and isinstance(parts, int) and value % parts == 0:
        return value // parts
    return value / parts


def _edge(table: list[float] | Callable[[Op, Op], float], producer: Op, consumer: Op) -> float:
    if callable(table):
        return exact(table(producer, consumer), f"{producer} -> {consumer}")
    return table[min(producer.stage, consumer.stage)]
