"""The MoE layers that are measured, and the closed formulas of the work in one of them."""

from __future__ import annotations

from dataclasses import dataclass

from moemesh.config.model import ModelConfig


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Tokens of all ranks together, and the sizes of one MoE layer without shared experts."""

    tokens: int
    hidden: int
    width: int
    num_experts: int
    top_k: int

    @property
    def rows(self) -> int:
        """(token, expert) pairs: the rows that the experts compute on."""
        return self.tokens * self.top_k

    @property
    def config(self) -> ModelConfig:
        """Softmax, then top-k, then renormalise; no auxiliary loss."""
        return ModelConfig(
            hidden_size=self.hidden,
            num_experts=self.num_experts,
            experts_per_token=self.top_k,
            expert_intermediate_size=self.width,
            num_shared_experts=0,
            router_score="softmax",
            router_when="before",
            router_normalize=True,
            aux_loss_coefficient=0.0,
        )


#: A has few wide experts, B many narrow ones; "tiny" is there to try the command.
SHAPES = {
    "A": LayerShape(tokens=4096, hidden=512, width=1024, num_experts=16, top_k=2),
    "B": LayerShape(tokens=2048, hidden=1024, width=512, num_experts=64, top_k=8),
    "tiny": LayerShape(tokens=64, hidden=16, width=24, num_experts=4, top_k=2),
}


def expert_flops(rows: int, hidden: int, width: int) -> int:
    """FLOPs of SwiGLU experts on `rows` rows, forward and backward.

    Three products a row (gate, up, down) of ``2 * hidden * width`` each, and each of them once
    forward, once for its input's gradient and once for its weight's.
    """
    return 3 * 3 * 2 * rows * hidden * width


def exchange_bytes(rows_sent: int, rows_received: int, hidden: int, element_size: int) -> int:
    """Bytes that one rank sends in the four exchanges of an all-to-all layer, rows only.

    `rows_sent` of its tokens go to other ranks' experts and `rows_received` come from other ranks:
    dispatch sends the former, combine the latter, and their backwards the other way round.
    """
    return 2 * (rows_sent + rows_received) * hidden * element_size
