"""Causal grouped-query attention with rotary positions.

Legend: B sequences, S positions, T = B*S tokens, H hidden, D head size, N query heads held here,
M key/value heads held here, G = N/M query heads per key/value head, A = attention
width held here.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moemesh.config.model import ModelConfig
from moemesh.model.batch import Context
from moemesh.model.layers import RMSNorm
from moemesh.model.seams import (
    Boundary,
    KeepAll,
    KeyValues,
    LocalBoundary,
    LocalKeyValues,
    Memory,
)
from moemesh.ops.linear import linear


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al., 2023).

    ``qkv`` [M, G+2, D, H] keeps a key/value head together with its query heads: a tensor-parallel
    shard is a slice of dim 0. ``output`` is [H, N*D]. `layer` is the global index of the layer.
    """

    def __init__(self, config: ModelConfig, layer: int = 0) -> None:
        super().__init__()
        self.layer = layer
        self.num_groups = config.num_heads // config.num_kv_heads
        self.head_dim = config.head_dim
        self.qkv = nn.Parameter(
            torch.empty(
                config.num_kv_heads, self.num_groups + 2, config.head_dim, config.hidden_size
            )
        )
        self.output = nn.Parameter(
            torch.empty(config.hidden_size, config.num_heads * config.head_dim)
        )
        norm = RMSNorm if config.qk_norm else lambda size, epsilon: nn.Identity()
        self.query_norm = norm(config.head_dim, config.norm_eps)
        self.key_norm = norm(config.head_dim, config.norm_eps)
        self.boundary: Boundary = LocalBoundary()
        self.key_values: KeyValues = LocalKeyValues()
        self.memory: Memory = KeepAll()

    def forward(self, x_TH: Tensor, context: Context) -> Tensor:
        x_TH = self.boundary.enter(x_TH, context.num_tokens)
        y_TA = self.memory.run(self.core, linear(x_TH, self.qkv), context)
        return self.boundary.leave(y_TA, self.output)

    def core(self, qkv_TA: Tensor, context: Context) -> Tensor:
        """The part between the two projections: norms, rotary positions, attention."""
        shape = (context.num_sequences, context.seq_len, -1, self.num_groups + 2, self.head_dim)
        # -1 cannot be inferred for an empty microbatch: take the heads from the weight.
        qkv = qkv_TA.view(*shape[:2], self.qkv.shape[0], *shape[3:])
        query, key, value = qkv.split([self.num_groups, 1, 1], dim=3)
        query_BNSD = rotate(self.query_norm(query.flatten(2, 3).transpose(1, 2)), context)
        key_BMSD = rotate(self.key_norm(key.squeeze(3).transpose(1, 2)), context)
        value_BMSD = value.squeeze(3).transpose(1, 2)
        key_BMCD, value_BMCD = context.slices.extend(self.layer, key_BMSD, value_BMSD)
        y_BNSD = self.key_values.attend(query_BNSD, key_BMCD, value_BMCD, context.visible)
        return y_BNSD.transpose(1, 2).reshape(len(qkv_TA), y_BNSD.shape[1] * self.head_dim)


def rotate(x_BNSD: Tensor, context: Context) -> Tensor:
    """Rotary positions (Su et al., 2021), the half-split form: pairs are (i, i + D/2)."""
    first, second = x_BNSD.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    cosine, sine = (table.to(x_BNSD.dtype) for table in (context.cosine, context.sine))
    return x_BNSD * cosine + turned * sine
