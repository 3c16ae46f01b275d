"""Putting operators together: who reads whose output, every link priced by its resharding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from moemesh.planner.operators.graph import Block, Link, Operator, OperatorGraph, connect
from moemesh.planner.operators.resharding import LayoutError, MeshLayout, reshard_seconds
from moemesh.planner.operators.strategies import CostModel, OperatorSpec, operator_of, port


class GraphBuilder:
    """Collects operators and who reads whose output."""

    def __init__(self, costs: CostModel) -> None:
        self.costs = costs
        self._operators: list[Operator] = []
        self._links: list[Link] = []
        self._position: dict[str, int] = {}
        self._bytes: dict[str, float] = {}
        self._constant: set[str] = set()

    def port(
        self, name: str, rank: int, sizes: dict[int, int], num_bytes: float, *inputs: str
    ) -> str:
        """A tensor in any layout, at no cost; returns its name."""
        return self._place(port(name, rank, sizes, self.costs), num_bytes, inputs)

    def data(self, name: str, rank: int, sizes: dict[int, int], num_bytes: float) -> str:
        """A port for what has no gradient: token ids, images."""
        self._constant.add(name)
        return self.port(name, rank, sizes, num_bytes)

    def add(self, spec: OperatorSpec, *inputs: str) -> str:
        """An operator that reads the outputs of `inputs`, in order; returns its name."""
        if len(inputs) != len(spec.inputs):
            raise LayoutError(
                f"operator {spec.name!r} has {len(spec.inputs)} inputs, {len(inputs)} are given"
            )
        return self._place(operator_of(spec, self.costs), spec.output_bytes, inputs)

    def graph(self) -> OperatorGraph:
        """The graph, every link priced by `resharding`."""
        return connect(self._operators, self._links, self._reshard)

    def block(self, entry: str, exit: str) -> Block:
        """The graph between two ports."""
        return Block(graph=self.graph(), entry=self._position[entry], exit=self._position[exit])

    def _place(self, operator: Operator, num_bytes: float, inputs: Sequence[str]) -> str:
        if operator.name in self._position:
            raise LayoutError(f"two operators are called {operator.name!r}")
        target = len(self._operators)
        self._position[operator.name] = target
        self._bytes[operator.name] = num_bytes
        self._operators.append(operator)
        for index, name in enumerate(inputs):
            source = self._position[name]
            self._links.append(Link(source=source, target=target, input_index=index, tensor=name))
        return operator.name

    def _reshard(self, tensor: str, source: object, target: object) -> float:
        return reshard_seconds(
            self._bytes[tensor],
            cast("MeshLayout", source),
            cast("MeshLayout", target),
            self.costs.axes,
            backward=tensor not in self._constant,
        )
