"""Operator graphs: nodes with strategies, edges that cost a change of layout.

A node is an operator with the strategies in which it can be carried out: the layouts it wants of
its inputs and leaves its output in, its time (internal collectives included), the bytes of state it
keeps and the bytes it saves for the backward pass. An edge holds, for every pair of strategies of
its two ends, the time of changing the layout between them. Choosing one strategy a node so that

    sum of node seconds + sum of edge seconds

is least is the intra-operator problem of Alpa (L. Zheng et al., OSDI 2022, arXiv:2201.12023,
section 4). Graphs may branch, join and contain cycles. `elimination` solves them, `pareto` under a
memory cap, `operator_program` checks both.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moemesh.config.errors import UserError

FloatArray = NDArray[np.float64]
#: Any hashable value; `resharding` uses one placement per mesh axis.
Layout = Hashable
#: (tensor, layout it is in, layout it is wanted in) -> seconds, forward and backward.
ReshardSeconds = Callable[[str, Layout, Layout], float]


class OperatorError(UserError):
    """An operator graph that cannot be built or has no answer."""


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One way to carry an operator out.

    `inputs` has one layout an input, in the order of the operator's inputs. `seconds` may be
    infinite (forbidden) but not NaN; bytes are those of one device.
    """

    name: str = ""
    inputs: tuple[Layout, ...] = ()
    output: Layout = None
    seconds: float
    state_bytes: float = 0.0
    saved_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Operator:
    """A node: a name for messages and its strategies, at least one."""

    name: str
    strategies: tuple[Strategy, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Edge:
    """Two operators (by position) and seconds[i, j] when they take strategies i and j."""

    source: int
    target: int
    seconds: FloatArray


@dataclass(frozen=True, kw_only=True)
class Link:
    """Output of operator `source` is input number `input_index` of operator `target`."""

    source: int
    target: int
    input_index: int
    tensor: str


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """One strategy a node (by position in the node's list), and what they cost together.

    `saved_bytes` are those of one microbatch.
    """

    choices: tuple[int, ...]
    seconds: float
    state_bytes: float
    saved_bytes: float

    def memory_bytes(self, in_flight: float = 1.0) -> float:
        """State and the saved bytes of the microbatches in flight."""
        return self.state_bytes + in_flight * self.saved_bytes


@dataclass(frozen=True, kw_only=True, eq=False)
class OperatorGraph:
    """Operators and edges. Raises OperatorError on shapes that disagree and on NaN."""

    operators: tuple[Operator, ...]
    edges: tuple[Edge, ...] = ()

    def __post_init__(self) -> None:
        for operator in self.operators:
            if not operator.strategies:
                raise OperatorError(f"operator {operator.name!r} has no strategy: give at least 1")
            for strategy in operator.strategies:
                _check_strategy(operator.name, strategy)
        for edge in self.edges:
            self._check_edge(edge)

    @property
    def num_operators(self) -> int:
        return len(self.operators)

    @cached_property
    def num_strategies(self) -> tuple[int, ...]:
        """Number of strategies of each operator."""
        return tuple(len(operator.strategies) for operator in self.operators)

    @cached_property
    def node_seconds(self) -> tuple[FloatArray, ...]:
        """Seconds of each operator's strategies."""
        return self._column("seconds")

    @cached_property
    def node_state_bytes(self) -> tuple[FloatArray, ...]:
        """State bytes of each operator's strategies."""
        return self._column("state_bytes")

    @cached_property
    def node_saved_bytes(self) -> tuple[FloatArray, ...]:
        """Saved bytes (one microbatch) of each operator's strategies."""
        return self._column("saved_bytes")

    def priced(self, state_price: float, saved_price: float) -> tuple[FloatArray, ...]:
        """Node costs with a price in seconds per byte of state and of saved activations."""
        return tuple(
            seconds + state_price * state + saved_price * saved
            for seconds, state, saved in zip(
                self.node_seconds, self.node_state_bytes, self.node_saved_bytes, strict=True
            )
        )

    def assignment(self, choices: Sequence[int]) -> Assignment:
        """What `choices` cost, added up term by term."""
        if len(choices) != self.num_operators:
            raise OperatorError(f"{len(choices)} choices for {self.num_operators} operators")
        for operator, choice in zip(self.operators, choices, strict=True):
            if not 0 <= choice < len(operator.strategies):
                raise OperatorError(
                    f"operator {operator.name!r} has strategies 0 to "
                    f"{len(operator.strategies) - 1}, not {choice}"
                )
        chosen = [
            operator.strategies[choice]
            for operator, choice in zip(self.operators, choices, strict=True)
        ]
        edge_seconds = sum(
            float(edge.seconds[choices[edge.source], choices[edge.target]]) for edge in self.edges
        )
        return Assignment(
            choices=tuple(int(choice) for choice in choices),
            seconds=sum(strategy.seconds for strategy in chosen) + edge_seconds,
            state_bytes=sum(strategy.state_bytes for strategy in chosen),
            saved_bytes=sum(strategy.saved_bytes for strategy in chosen),
        )

    def names(self, choices: Sequence[int]) -> dict[str, str]:
        """Operator name -> name of the chosen strategy."""
        return {
            operator.name: operator.strategies[choice].name
            for operator, choice in zip(self.operators, choices, strict=True)
        }

    def _column(self, field: str) -> tuple[FloatArray, ...]:
        return tuple(
            np.array([getattr(strategy, field) for strategy in operator.strategies], dtype=float)
            for operator in self.operators
        )

    def _check_edge(self, edge: Edge) -> None:
        last = self.num_operators - 1
        for end in (edge.source, edge.target):
            if not 0 <= end <= last:
                raise OperatorError(f"an edge names operator {end}; there are 0 to {last}")
        if edge.source == edge.target:
            raise OperatorError(
                f"an edge joins operator {edge.source} to itself: add its diagonal to the "
                "operator's seconds"
            )
        expected = (
            len(self.operators[edge.source].strategies),
            len(self.operators[edge.target].strategies),
        )
        if edge.seconds.shape != expected:
            raise OperatorError(
                f"edge {edge.source} -> {edge.target} has costs of shape {edge.seconds.shape}; "
                f"the strategies of its ends make it {expected}"
            )
        if np.isnan(edge.seconds).any() or np.isneginf(edge.seconds).any():
            raise OperatorError(f"edge {edge.source} -> {edge.target} has a cost of NaN or -inf")


def connect(
    operators: Sequence[Operator], links: Sequence[Link], reshard_seconds: ReshardSeconds
) -> OperatorGraph:
    """The graph in which every link costs what `reshard_seconds` says."""
    edges: list[Edge] = []
    for link in links:
        sources = [strategy.output for strategy in operators[link.source].strategies]
        targets: list[Layout] = []
        for strategy in operators[link.target].strategies:
            if link.input_index >= len(strategy.inputs):
                raise OperatorError(
                    f"strategy {strategy.name!r} of {operators[link.target].name!r} has "
                    f"{len(strategy.inputs)} inputs; a link asks for number {link.input_index}"
                )
            targets.append(strategy.inputs[link.input_index])
        # Many strategies share a layout: every pair of layouts is priced once.
        price = {
            (source, target): reshard_seconds(link.tensor, source, target)
            for source in set(sources)
            for target in set(targets)
        }
        seconds = np.array([[price[source, target] for target in targets] for source in sources])
        edges.append(Edge(source=link.source, target=link.target, seconds=seconds))
    return OperatorGraph(operators=tuple(operators), edges=tuple(edges))


def graph_from_costs(
    node_seconds: Sequence[ArrayLike],
    edge_seconds: Mapping[tuple[int, int], ArrayLike],
    *,
    state_bytes: Sequence[ArrayLike] | None = None,
    saved_bytes: Sequence[ArrayLike] | None = None,
) -> OperatorGraph:
    """A graph from plain numbers: node_seconds[i][s] and edge_seconds[i, j][s, t]."""
    seconds = [_vector(values, "node_seconds", index) for index, values in enumerate(node_seconds)]
    states = _columns(state_bytes, "state_bytes", seconds)
    saved = _columns(saved_bytes, "saved_bytes", seconds)
    operators = tuple(
        Operator(
            name=f"operator {index}",
            strategies=tuple(
                Strategy(
                    name=str(choice),
                    seconds=float(row[choice]),
                    state_bytes=float(states[index][choice]),
                    saved_bytes=float(saved[index][choice]),
                )
                for choice in range(len(row))
            ),
        )
        for index, row in enumerate(seconds)
    )
    edges = tuple(
        Edge(source=source, target=target, seconds=np.asarray(costs, dtype=float))
        for (source, target), costs in edge_seconds.items()
    )
    return OperatorGraph(operators=operators, edges=edges)


@dataclass(frozen=True, kw_only=True, eq=False)
class Block:
    """A graph with two ports, so that blocks can be put in a row.

    In a row, the exit of one block *is* the entry of the next: both need the same number of
    strategies, in the same order. The entry's own cost counts only in the first block of a row.
    """

    graph: OperatorGraph
    entry: int
    exit: int

    def __post_init__(self) -> None:
        last = self.graph.num_operators - 1
        for port in (self.entry, self.exit):
            if not 0 <= port <= last:
                raise OperatorError(f"a port names operator {port}; there are 0 to {last}")
        if self.entry == self.exit:
            raise OperatorError(f"entry and exit of a block are both operator {self.entry}")


def join(blocks: Sequence[Block]) -> OperatorGraph:
    """One graph of blocks in a row.

    Operators come block by block in their own order; the entry of each block after the first is
    left out (it is the exit of the block before).
    """
    operators: list[Operator] = []
    edges: list[Edge] = []
    port = -1
    for index, block in enumerate(blocks):
        graph = block.graph
        places: list[int] = []
        for position, operator in enumerate(graph.operators):
            if index and position == block.entry:
                check_ports(operators[port], operator, index)
                places.append(port)
            else:
                places.append(len(operators))
                operators.append(operator)
        edges += [
            Edge(source=places[edge.source], target=places[edge.target], seconds=edge.seconds)
            for edge in graph.edges
        ]
        port = places[block.exit]
    return OperatorGraph(operators=tuple(operators), edges=tuple(edges))


def check_ports(before: Operator, entry: Operator, index: int) -> None:
    """Raise OperatorError unless `before` can stand for the `entry` of block `index`."""
    if len(before.strategies) != len(entry.strategies):
        raise OperatorError(
            f"block {index} is entered with {len(entry.strategies)} layouts, but the block before "
            f"leaves {len(before.strategies)}: give both the same"
        )
    for ours, theirs in zip(before.strategies, entry.strategies, strict=True):
        if ours.output != theirs.output:
            raise OperatorError(
                f"block {index} is entered in layout {theirs.output!r}, but the block before "
                f"leaves {ours.output!r} in that place: give both the same order"
            )


def _check_strategy(operator: str, strategy: Strategy) -> None:
    where = f"strategy {strategy.name!r} of operator {operator!r}"
    if np.isnan(strategy.seconds) or strategy.seconds == -np.inf:
        raise OperatorError(f"{where} takes {strategy.seconds} seconds")
    for field in ("state_bytes", "saved_bytes"):
        value: float = getattr(strategy, field)
        if not 0 <= value < np.inf:
            raise OperatorError(f"{where} has {field} = {value}; bytes are finite and at least 0")


def _vector(values: ArrayLike, name: str, index: int) -> FloatArray:
    array = np.asarray(values, dtype=float)
    if array.ndim != 1:
        raise OperatorError(f"{name}[{index}] has {array.ndim} dims; it is a list of numbers")
    return array


def _columns(
    given: Sequence[ArrayLike] | None, name: str, seconds: Sequence[FloatArray]
) -> list[FloatArray]:
    if given is None:
        return [np.zeros(len(row)) for row in seconds]
    columns = [_vector(values, name, index) for index, values in enumerate(given)]
    if [len(row) for row in columns] != [len(row) for row in seconds]:
        raise OperatorError(
            f"{name} has lengths {[len(row) for row in columns]}, node_seconds has "
            f"{[len(row) for row in seconds]}: one number a strategy"
        )
    return columns
