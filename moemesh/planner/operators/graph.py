"""Operator graphs: operators with strategies, edges that cost a change of layout.

A strategy says in which layouts an operator reads its inputs and leaves its output, its time
(internal collectives included), its state bytes and the bytes it saves for the backward pass. An
edge holds the time of the layout change for every pair of strategies of its two ends. Choosing one
strategy per operator so that the sum of node seconds and edge seconds is least is the
intra-operator problem of Alpa (L. Zheng et al., OSDI 2022, arXiv:2201.12023, section 4).

Operators belong to groups (a kind of layer, the embedding), and a group may stand for several equal
copies: its costs count that often, so a model of 60 layers of two kinds is a graph of two layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moemesh.config.errors import UserError
from moemesh.planner.operators.resharding import MeshLayout

FloatArray = NDArray[np.float64]


class OperatorError(UserError):
    """An operator graph that has no answer."""


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One way to carry an operator out.

    `inputs` has one layout an input, in the order of the operator's inputs. `seconds` may be
    infinite (forbidden) but not NaN; bytes are those of one device.
    """

    name: str = ""
    inputs: tuple[MeshLayout, ...] = ()
    output: MeshLayout = ()
    seconds: float
    state_bytes: float = 0.0
    saved_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Operator:
    """A node: its name, its strategies (at least one), the group that it belongs to, and the bytes
    of its output over all devices."""

    name: str
    strategies: tuple[Strategy, ...]
    group: str = ""
    output_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Edge:
    """Two operators (by position) and seconds[i, j] when they take strategies i and j.

    The source's output is input number `input_index` of the target.
    """

    source: int
    target: int
    seconds: FloatArray
    input_index: int = 0
    group: str = ""


class Cost(NamedTuple):
    """Seconds and bytes of a choice of strategies; saved bytes are those of one microbatch."""

    seconds: float = 0.0
    state_bytes: float = 0.0
    saved_bytes: float = 0.0

    def plus(self, other: Cost, count: int = 1) -> Cost:
        """This cost and `count` times another."""
        return Cost(*(mine + count * theirs for mine, theirs in zip(self, other, strict=True)))

    def memory_bytes(self, in_flight: float = 1.0) -> float:
        """State and the saved bytes of the microbatches in flight."""
        return self.state_bytes + in_flight * self.saved_bytes


@dataclass(frozen=True, kw_only=True, eq=False)
class OperatorGraph:
    """Operators, edges, and how many equal copies of each group there are (default: one)."""

    operators: tuple[Operator, ...]
    edges: tuple[Edge, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict[str, int])

    def count(self, group: str) -> int:
        """The number of equal copies of a group."""
        return self.counts.get(group, 1)

    def edge_seconds(self, edge: Edge, choices: Sequence[int]) -> float:
        """Seconds of one edge under `choices`."""
        return float(edge.seconds[choices[edge.source], choices[edge.target]])

    def group_costs(self, choices: Sequence[int]) -> dict[str, Cost]:
        """The cost of one copy of each group under one strategy per operator, by position."""
        costs: dict[str, Cost] = {}
        for operator, choice in zip(self.operators, choices, strict=True):
            found = operator.strategies[choice]
            cost = Cost(found.seconds, found.state_bytes, found.saved_bytes)
            costs[operator.group] = costs.get(operator.group, Cost()).plus(cost)
        for edge in self.edges:
            cost = Cost(self.edge_seconds(edge, choices))
            costs[edge.group] = costs.get(edge.group, Cost()).plus(cost)
        return costs

    def cost(self, choices: Sequence[int]) -> Cost:
        """The cost of all copies of all groups together."""
        total = Cost()
        for group, cost in self.group_costs(choices).items():
            total = total.plus(cost, self.count(group))
        return total
