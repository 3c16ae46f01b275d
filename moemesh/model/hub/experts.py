"""The seam of transformers' experts modules: what computes the experts of every layer.

Every experts module of transformers looks its forward up by name among `ALL_EXPERTS_FUNCTIONS` and
calls it with (module, x [T, H], experts [T, K], weights [T, K]), of which it expects [T, H]. Under
the name of :data:`IMPLEMENTATION` that is :func:`forward`, which passes the call on to the module's
`exchange`, or to its own eager forward where it has none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

#: The name of our experts function among those of transformers.
IMPLEMENTATION = "moemesh"
#: (x [T, H], experts [T, K], weights [T, K]) -> [T, H]
Exchange: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]


def forward(module: nn.Module, x_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """The experts' weighted outputs, summed for each token."""
    exchange: Exchange | None = module.__dict__.get("exchange")
    if exchange is None:
        return eager_forward(module, x_TH, experts_TK, weights_TK)
    return exchange(x_TH, experts_TK, weights_TK)


def eager_forward(
    module: nn.Module, x_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """The module's own forward, which its decorator has wrapped."""
    return type(module).forward.__wrapped__(module, x_TH, experts_TK, weights_TK)  # type: ignore[attr-defined]


def set_exchange(module: nn.Module, exchange: Exchange) -> None:
    """Let `exchange` compute the experts of `module`."""
    module.__dict__["exchange"] = exchange


def is_experts(module: nn.Module) -> bool:
    """Whether the module passes through the interface."""
    return hasattr(module, "_is_expert_parallel") and hasattr(module, "has_gate")


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, forward)
