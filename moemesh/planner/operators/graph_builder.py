"""Putting operators together: who reads whose output, every link priced by its resharding."""

from __future__ import annotations

from itertools import product

import numpy as np

from moemesh.planner.operators.graph import Edge, Operator, OperatorGraph
from moemesh.planner.operators.resharding import reshard_seconds
from moemesh.planner.operators.strategies import CostModel, OperatorSpec, operator_of, port


class GraphBuilder:
    """Collects operators and who reads whose output; operators are known by their position."""

    def __init__(self, costs: CostModel) -> None:
        self.costs = costs
        self._operators: list[Operator] = []
        self._edges: list[Edge] = []
        self._constant: set[int] = set()
        self._counts: dict[str, int] = {}
        self._group = ""

    def group(self, name: str, count: int = 1) -> None:
        """Begin a group: what is added from now on belongs to it, and there are `count` copies."""
        self._group = name
        self._counts[name] = count

    def port(self, name: str, rank: int, sizes: dict[int, int], num_bytes: float) -> int:
        """A tensor in any layout, at no cost."""
        return self._place(port(name, rank, sizes, self.costs, num_bytes, self._group))

    def data(self, name: str, rank: int, sizes: dict[int, int], num_bytes: float) -> int:
        """A port for a tensor without a gradient: token ids, images."""
        position = self.port(name, rank, sizes, num_bytes)
        self._constant.add(position)
        return position

    def add(self, spec: OperatorSpec, *inputs: int) -> int:
        """An operator that reads the outputs of `inputs`, in order."""
        target = self._place(operator_of(spec, self.costs, self._group))
        for index, source in enumerate(inputs):
            self.link(source, target, index)
        return target

    def link(self, source: int, target: int, input_index: int = 0) -> None:
        """`target` reads the output of `source`; the change of layout belongs to this group."""

        reader, num_bytes = self._operators[target], self._operators[source].output_bytes
        left = [strategy.output for strategy in self._operators[source].strategies]
        wanted = [strategy.inputs[input_index] for strategy in reader.strategies]
        backward = source not in self._constant
        # Every pair of layouts is priced once: many strategies leave the same layout.
        prices = {
            (a, b): reshard_seconds(num_bytes, a, b, self.costs.axes, backward=backward)
            for a, b in product(set(left), set(wanted))
        }
        seconds = np.array([[prices[a, b] for b in wanted] for a in left])
        self._edges.append(
            Edge(
                source=source,
                target=target,
                seconds=seconds,
                input_index=input_index,
                group=self._group,
            )
        )

    def graph(self) -> OperatorGraph:
        """All that was added."""
        return OperatorGraph(
            operators=tuple(self._operators), edges=tuple(self._edges), counts=self._counts
        )

    def _place(self, operator: Operator) -> int:
        self._operators.append(operator)
        return len(self._operators) - 1
