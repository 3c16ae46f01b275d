"""Ledger entries of context parallelism: keys and values of positions that other ranks hold.

c ranks, rank i with S_i positions; of a layer, per sequence and on a tensor rank: N query heads, M
key/value heads, d_k and d_v numbers a head, w bytes an element, W of a sum (at least 4).

| plan.context | forward | backward |
|---|---|---|
| ring | c-1 messages S_j M (d_k + d_v) w, sent and received | the same; c-1 with W for w |
| all_gather | S_i M (d_k + d_v) w gathered | gathered again, gradients scattered |
| all_to_all | heads for positions, positions for heads | the same, the other way |

Keys of latent attention are those behind their projection up: one for each query head.
"""

from __future__ import annotations

from moemesh.config.context import context_sizes, head_share
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.planner.traffic.ledger_lines import LedgerLines

#: Callers that a forward enters, in all layers alike.
CONTEXT_CALLERS = ("context.keys", "context.heads", "context.positions")


class ContextTraffic:
    """Enters the lines of one attention of `sequences` sequences, `times` over."""

    def __init__(
        self, lines: LedgerLines, model: ModelConfig, plan: Plan, seq_len: int, element: int
    ) -> None:
        self.lines, self.plan, self.element = lines, plan, element
        self.sizes = context_sizes(seq_len, plan.cp)
        self.query_size, self.value_size = model.query_head_dim, model.value_head_dim
        self.num_heads = model.num_heads // plan.tp
        latent = model.attention == "mla"
        self.num_kv_heads = self.num_heads if latent else model.num_kv_heads // plan.tp
        #: Numbers of a key and its value.
        self.pair = self.query_size + self.value_size

    def enter(self, sequences: int, times: int) -> None:
        if self.plan.cp == 1:
            return
        match self.plan.context:
            case "ring":
                self._ring(sequences, times)
            case "all_gather":
                self._all_gather(sequences, times)
            case "all_to_all":
                self._all_to_all(sequences, times)

    def _ring(self, sequences: int, times: int) -> None:
        ranks, index = self.plan.cp, self.lines.here["cp"]
        numbers = [size * sequences * self.num_kv_heads * self.pair for size in self.sizes]
        for hop in range(ranks - 1):
            sent, received = numbers[index - hop], numbers[index - hop - 1]
            for size, sends in ((sent, True), (received, False)):
                for phase in ("forward", "backward"):
                    wire = size * self.element
                    self.lines.message("cp", wire, phase, "context.keys", times, sends=sends)
            # Gradients set out one rank behind the owner of their block.
            wide = max(self.element, 4)
            sent, received = numbers[index - hop - 1], numbers[(index - hop - 2) % ranks]
            for size, sends in ((sent, True), (received, False)):
                caller = "context.gradients"
                self.lines.message("cp", size * wide, "backward", caller, times, sends=sends)

    def _all_gather(self, sequences: int, times: int) -> None:
        row = sequences * self.num_kv_heads * self.pair * self.element
        blocks = [float(size * row) for size in self.sizes]
        for phase in ("forward", "backward"):
            self.lines.all_gather("cp", blocks, phase, "context.keys", times)
        self.lines.reduce_scatter("cp", blocks, "backward", "context.keys", times)

    def _all_to_all(self, sequences: int, times: int) -> None:
        ranks, index = self.plan.cp, self.lines.here["cp"]
        shares = [
            head_share(self.num_heads, self.num_kv_heads, ranks, rank) for rank in range(ranks)
        ]
        width = sequences * self.element

        def heads(rank: int) -> int:
            """Bytes a position of what `rank` attends with."""
            share = shares[rank]
            return width * (len(share.queries) * self.query_size + len(share.keys) * self.pair)

        own = self.sizes[index]
        there = [float(own * heads(rank)) for rank in range(ranks)]
        here = [float(size * heads(index)) for size in self.sizes]
        self._exchange(there, here, "context.heads", times)
        out = width * len(shares[index].queries) * self.value_size
        away = [float(size * out) for size in self.sizes]
        back = [float(own * out)] * ranks
        self._exchange(away, back, "context.positions", times)

    def _exchange(self, inputs: list[float], outputs: list[float], caller: str, times: int) -> None:
        self.lines.all_to_all("cp", inputs, outputs, "forward", caller, times)
        self.lines.all_to_all("cp", outputs, inputs, "backward", caller, times)
