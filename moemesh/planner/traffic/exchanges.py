"""Bytes between each pair of ranks in one dispatch: the ledger's lines, kept by pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moemesh.config.layout import Layout
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.planner.traffic.dispatch_traffic import DispatchTraffic, row_bytes
from moemesh.planner.traffic.ledger_lines import LedgerLines
from moemesh.planner.traffic.routing import Choices, count_choices
from moemesh.trace.ledger import Ledger

_Key = tuple[str, str, str, str]
_Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One collective of a dispatch, on all groups of its axis. ``sent[i][j]``: bytes that rank i
    gives rank j; what it keeps for itself stands on the diagonal and crosses no wire."""

    axis: str
    op: str
    phase: str
    caller: str
    sent: _Matrix

    def wire_sent(self, rank: int) -> float:
        """Bytes that `rank` sends to others."""
        return sum(self.sent[rank]) - self.sent[rank][rank]

    def wire_received(self, rank: int) -> float:
        """Bytes that `rank` receives from others."""
        return sum(row[rank] for row in self.sent) - self.sent[rank][rank]


@dataclass(frozen=True, kw_only=True)
class DispatchExchanges:
    """All exchanges of one dispatch, its combine and its backward, the ledger of each rank, and
    bytes of a row on its way out and of one on its way back. ``overflows``: low_latency had too few
    slots for a pair of ranks, and all took the way of all_to_all."""

    exchanges: tuple[Exchange, ...]
    ledgers: tuple[Ledger, ...]
    row_out: float
    row_back: float
    overflows: bool

    def of_rows(self) -> tuple[Exchange, ...]:
        """Those of a forward that carry rows, in the order of time: results take the hops of their
        rows backwards."""
        forward = [one for one in self.exchanges if one.phase == "forward"]
        out = [one for one in forward if one.caller == "moe.dispatch"]
        back = [one for one in forward if one.caller == "moe.combine"]
        return (*out, *reversed(back))


class _PairLines(LedgerLines):
    """Ledger lines of one rank that also keep, for each exchange, what each peer is sent."""

    def __init__(self, layout: Layout, rank: int) -> None:
        super().__init__(layout, rank)
        self.pairs: dict[_Key, list[float]] = {}

    def all_gather(
        self, axis: str, blocks: Sequence[float], phase: str, caller: str, times: int = 1
    ) -> None:
        super().all_gather(axis, blocks, phase, caller, times)
        own = blocks[self.index(axis)]
        self._keep(axis, "all_gather", phase, caller, [own] * len(blocks))

    def reduce_scatter(
        self, axis: str, blocks: Sequence[float], phase: str, caller: str, times: int = 1
    ) -> None:
        super().reduce_scatter(axis, blocks, phase, caller, times)
        self._keep(axis, "reduce_scatter", phase, caller, blocks)

    def all_to_all(
        self,
        axis: str,
        inputs: Sequence[float],
        outputs: Sequence[float],
        phase: str,
        caller: str,
        times: int = 1,
    ) -> None:
        super().all_to_all(axis, inputs, outputs, phase, caller, times)
        self._keep(axis, "all_to_all", phase, caller, inputs)

    def _keep(self, axis: str, op: str, phase: str, caller: str, sent: Sequence[float]) -> None:
        if self.size(axis) == 1:
            return
        row = self.pairs.setdefault((axis, op, phase, caller), [0.0] * self.layout.world_size)
        for peer, size in zip(self.members(axis), sent, strict=True):
            row[peer] += size


def dispatch_exchanges(
    model: ModelConfig, plan: Plan, choices: Sequence[Choices], *, element: int = 2
) -> DispatchExchanges:
    """The exchanges of one MoE layer whose tokens on rank i have ``choices[i]``.

    `element`: bytes of a number of the model; weights of rows have at least 4. The plan has one
    stage. A rank of low_latency has room for the most tokens of any rank.
    """
    layout = plan.layout
    rows = row_bytes(model, plan, element, max(element, 4))
    sent = [
        count_choices(own, model.num_experts, layout, slots=model.experts_per_token)
        for own in choices
    ]
    most = max(map(len, choices))
    lines: list[_PairLines] = []
    for rank in range(layout.world_size):
        own = _PairLines(layout, rank)
        DispatchTraffic(own, model, plan, rows, most, lambda peer: sent[peer], 1).enter()
        lines.append(own)
    keys = list(dict.fromkeys(key for own in lines for key in own.pairs))
    nothing = [0.0] * layout.world_size
    exchanges = tuple(
        Exchange(
            axis=axis,
            op=op,
            phase=phase,
            caller=caller,
            sent=tuple(tuple(own.pairs.get((axis, op, phase, caller), nothing)) for own in lines),
        )
        for axis, op, phase, caller in keys
    )
    ledgers = tuple(own.ledger() for own in lines)
    return DispatchExchanges(
        exchanges=exchanges,
        ledgers=ledgers,
        row_out=rows.coded,
        row_back=rows.plain,
        overflows={"moe.headers", "moe.counts"} <= {one.caller for one in exchanges},
    )
