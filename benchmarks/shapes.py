"""The MoE layers that `benchmarks.layer` and `benchmarks.device` measure."""

from __future__ import annotations

# Light to import: the command reads it to know its options.
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moemesh.config.model import ModelConfig


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Tokens of all ranks together, and the sizes of one MoE layer without shared experts."""

    tokens: int
    hidden: int
    width: int
    num_experts: int
    top_k: int
    kind: str = ""

    def __str__(self) -> str:
        experts = f"{self.num_experts} of width {self.width}, top-{self.top_k}"
        return f"{self.kind}: {experts}; {self.tokens} tokens, hidden {self.hidden}"

    @property
    def flops(self) -> int:
        """Operations of the experts' products, forward and backward: three matrices, three products
        of each, two operations for a multiply-add."""
        return 18 * self.rows * self.hidden * self.width

    @property
    def counted(self) -> LayerShape:
        """The shape that a simulated device counts: that of a large one is scaled down, which
        changes no count of kernels."""
        if self.flops < 1e12:
            return self
        return replace(
            self, tokens=self.tokens // 64, hidden=self.hidden // 16, width=self.width // 16
        )

    @property
    def rows(self) -> int:
        """(token, expert) pairs: the rows that the experts compute on."""
        return self.tokens * self.top_k

    @property
    def config(self) -> ModelConfig:
        """Softmax, then top-k, then renormalise; no auxiliary loss."""
        from moemesh.config.model import ModelConfig

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


SHAPES = {
    "A": LayerShape(
        tokens=4096, hidden=512, width=1024, num_experts=16, top_k=2, kind="few wide experts"
    ),
    "B": LayerShape(
        tokens=2048, hidden=1024, width=512, num_experts=64, top_k=8, kind="many narrow ones"
    ),
    "Q": LayerShape(
        tokens=32768, hidden=2048, width=768, num_experts=128, top_k=8, kind="Qwen3-30B-A3B"
    ),
    "tiny": LayerShape(
        tokens=64, hidden=16, width=24, num_experts=4, top_k=2, kind="to try the command"
    ),
}
