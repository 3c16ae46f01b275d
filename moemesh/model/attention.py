"""Causal self-attention with rotary positions: grouped-query, and multi-head latent attention.

Legend: B sequences, S positions, T = B*S tokens, H hidden, D head size, R rotated channels of it, V
size of a value head; P query latent, L key/value latent, O outputs of a product; of this rank's
shard: N query heads, M key/value heads, G = N/M query heads per key/value head, A total width of
heads; C keys of this slice and earlier ones.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from moemesh.config.model import ModelConfig
from moemesh.model.batch import Context
from moemesh.model.layers import AdaptedModule, RMSNorm
from moemesh.model.rope import rotate
from moemesh.model.seams import (
    Boundary,
    KeyValues,
    Memory,
)
from moemesh.ops.linear import linear


class AttentionBlock(AdaptedModule):
    """The parts that both kinds of attention have. `layer` is the global index of the layer."""

    sinks: nn.Parameter | None

    def __init__(self, config: ModelConfig, layer: int = 0) -> None:
        super().__init__()
        self.layer, self.config = layer, config
        #: Most keys that a query sees, its own included; 0: all up to its position.
        self.window = config.window(layer)
        #: Factor of the scores.
        self.scale = config.attention_scale
        self.boundary = Boundary()
        self.key_values = KeyValues()
        self.memory = Memory()

    def attend(
        self, query_BSND: Tensor, key_BSMD: Tensor, value_BSMD: Tensor, context: Context
    ) -> Tensor:
        """Attention [T, A] of rotated queries over the keys of this slice and earlier ones. The
        heads of a token are contiguous in memory, so that the reshape does not copy, unless
        :func:`~moemesh.model.attention_core.attention` has padded the values."""
        visible = context.visible.within(self.window) if self.window else context.visible
        key_BMCD, value_BMCD = context.slices.extend(
            self.layer, key_BSMD.transpose(1, 2), value_BSMD.transpose(1, 2)
        )
        query_BNSD = query_BSND.transpose(1, 2)
        y_BNSD = self.key_values.attend(
            (query_BNSD, key_BMCD, value_BMCD), visible, sinks_N=self.sinks, scale=self.scale
        )
        return y_BNSD.transpose(1, 2).reshape(context.num_tokens, y_BNSD.shape[1] * y_BNSD.shape[3])


class Projected(NamedTuple):
    """``qkv_TA``: queries, keys and values, packed as in ``Attention.qkv``; ``squares_T2``: sums of
    squares over all query heads and over all key heads of a token, for a norm over heads (None
    without one)."""

    qkv_TA: Tensor
    squares_T2: Tensor | None


class Attention(AttentionBlock):
    """Grouped-query attention (Ainslie et al., 2023).

    ``qkv`` [M, G+2, D, H] keeps a key/value head together with its query heads: a tensor-parallel
    shard is a slice of dim 0, as it is of ``qkv_bias`` [M*(G+2)*D]. ``output`` is [H, N*D].
    """

    def __init__(self, config: ModelConfig, layer: int = 0) -> None:
        super().__init__(config, layer)
        heads, size = config.num_kv_heads, config.head_dim
        self.num_groups = config.num_heads // heads
        self.qkv = nn.Parameter(torch.empty(heads, self.num_groups + 2, size, config.hidden_size))
        self.qkv_bias = parameter_if(config.qkv_bias, heads * (self.num_groups + 2) * size)
        self.output = nn.Parameter(torch.empty(config.hidden_size, config.num_heads * size))
        self.output_bias = parameter_if(config.output_bias, config.hidden_size)
        self.sinks = parameter_if(config.attention_sinks, config.num_heads)
        self.add_adapters(config.lora, "qkv", "output")
        self.over_projection = config.qk_norm and config.qk_norm_over == "projection"
        self.query_norm, self.key_norm = (
            query_key_norm(config, number) for number in (config.num_heads, heads)
        )

    def forward(self, x_TH: Tensor, context: Context) -> Tensor:
        x_TH = self.boundary.enter(x_TH, context.num_tokens)
        qkv_TA = linear(x_TH, self.weight("qkv"))
        if self.qkv_bias is not None:
            qkv_TA = qkv_TA + self.qkv_bias
        squares_T2 = None
        if self.over_projection:
            # Outside of the core, which may be recomputed: the sum over ranks is an exchange.
            squares_T2 = self.boundary.total(self.squares(qkv_TA))
        y_TA = self.memory.run(self.core, Projected(qkv_TA, squares_T2), context)
        y_TH = self.boundary.leave(y_TA, self.weight("output"))
        return y_TH if self.output_bias is None else y_TH + self.output_bias

    def squares(self, qkv_TA: Tensor) -> Tensor:
        """Sums of squares over this rank's query heads and key heads, fp32 or fp64 [T, 2]."""
        qkv = qkv_TA.view(len(qkv_TA), *self.qkv.shape[:3])
        query, key, _ = qkv.split([self.num_groups, 1, 1], dim=2)
        wide = torch.promote_types(qkv.dtype, torch.float32)
        return torch.stack([part.to(wide).square().sum((1, 2, 3)) for part in (query, key)], dim=1)

    def core(self, projected: Projected, context: Context) -> Tensor:
        """The part between the two projections: norms, clamping, rotary positions, attention."""
        config, qkv_TA = self.config, projected.qkv_TA
        # view() infers no -1 in an empty microbatch: the number of heads follows from the width.
        size = self.num_groups + 2, config.head_dim
        heads = qkv_TA.shape[1] // (size[0] * size[1])
        qkv = qkv_TA.view(context.num_sequences, context.seq_len, heads, *size)
        query, key, value = qkv.split_with_sizes([self.num_groups, 1, 1], dim=3)
        query_BSND, key_BSMD = query.flatten(2, 3), key.flatten(2, 3)
        value_BSMD = value.flatten(2, 3)
        if projected.squares_T2 is None:
            query_BSND, key_BSMD = self.query_norm(query_BSND), self.key_norm(key_BSMD)
        else:
            squares_BS12 = projected.squares_T2.view(*qkv.shape[:2], 1, 2)
            query_BSND = self.query_norm(query_BSND, squares_BS12[..., :1])
            key_BSMD = self.key_norm(key_BSMD, squares_BS12[..., 1:])
        if limit := config.clip_qkv:
            query_BSND, key_BSMD, value_BSMD = (
                part.clamp(-limit, limit) for part in (query_BSND, key_BSMD, value_BSMD)
            )
        query_BSND, key_BSMD = rotate(query_BSND, key_BSMD, context.rotary(qkv.dtype))
        return self.attend(query_BSND, key_BSMD, value_BSMD, context)


class Expanded(NamedTuple):
    """Queries, and keys with values, of this rank's heads, packed as in ``LatentAttention``'s
    weights; and the rotary part of the keys, which all heads share."""

    query_TA: Tensor
    key_value_TA: Tensor
    key_TR: Tensor


class LatentAttention(AttentionBlock):
    """Multi-head latent attention (DeepSeek-AI, 2024, arXiv:2405.04434, section 2.1).

    ``query_down`` [P, H] and ``key_value_down`` [L+R, H] project this rank's rows of the residual
    stream to latents and rotary keys; ``query_up`` [N, D, P] and ``key_value_up`` [N, D-R+V, L]
    expand them for each head (a tensor-parallel shard is a slice of dim 0). Without compressed
    queries, one weight ``query`` [N, D, H] replaces ``query_down`` and ``query_up``. ``output`` is
    [H, N*V].
    """

    def __init__(self, config: ModelConfig, layer: int = 0) -> None:
        super().__init__(config, layer)
        hidden, heads, size = config.hidden_size, config.num_heads, config.query_head_dim
        query_latent, latent = config.q_lora_rank, config.kv_lora_rank
        down = latent + config.qk_rotary_head_dim
        if query_latent:
            self.query_down = nn.Parameter(torch.empty(query_latent, hidden))
            self.query_down_bias = parameter_if(config.qkv_bias, query_latent)
            self.query_up = nn.Parameter(torch.empty(heads, size, query_latent))
        else:
            self.query = nn.Parameter(torch.empty(heads, size, hidden))
        self.key_value_down = nn.Parameter(torch.empty(down, hidden))
        self.key_value_down_bias = parameter_if(config.qkv_bias, down)
        up = config.qk_nope_head_dim + config.v_head_dim
        self.key_value_up = nn.Parameter(torch.empty(heads, up, latent))
        self.output = nn.Parameter(torch.empty(hidden, heads * config.v_head_dim))
        self.output_bias = parameter_if(config.output_bias, hidden)
        self.sinks = parameter_if(config.attention_sinks, heads)
        queries = ("query_down", "query_up") if query_latent else ("query",)
        self.add_adapters(config.lora, *queries, "key_value_down", "key_value_up", "output")
        if query_latent:
            self.query_latent_norm = RMSNorm(query_latent, config.latent_norm_eps)
        self.key_value_latent_norm = RMSNorm(latent, config.latent_norm_eps)

    def forward(self, x_TH: Tensor, context: Context) -> Tensor:
        config, enter = self.config, self.boundary.enter
        latent, rotary = config.kv_lora_rank, config.qk_rotary_head_dim
        down_TL = plus(linear(x_TH, self.weight("key_value_down")), self.key_value_down_bias)
        latent_TL, key_TR = down_TL.split([latent, rotary], dim=1)
        latent_TL = self.key_value_latent_norm(latent_TL)
        # Ranks gather latents, which are narrower than the residual stream, and each token is
        # projected to them on one rank only. Uncompressed queries need the stream itself.
        if config.q_lora_rank:
            query_TP = plus(linear(x_TH, self.weight("query_down")), self.query_down_bias)
            sizes = [config.q_lora_rank, latent, rotary]
            entered = torch.cat([self.query_latent_norm(query_TP), latent_TL, key_TR], dim=1)
            query_TP, latent_TL, key_TR = enter(entered, context.num_tokens).split(sizes, dim=1)
            query_TA = linear(query_TP, self.weight("query_up"))
        else:
            query_TA = linear(enter(x_TH, context.num_tokens), self.weight("query"))
            entered = enter(torch.cat([latent_TL, key_TR], dim=1), context.num_tokens)
            latent_TL, key_TR = entered.split([latent, rotary], dim=1)
        expanded = Expanded(query_TA, linear(latent_TL, self.weight("key_value_up")), key_TR)
        y_TA = self.memory.run(self.core, expanded, context)
        return plus(self.boundary.leave(y_TA, self.weight("output")), self.output_bias)

    def core(self, expanded: Expanded, context: Context) -> Tensor:
        """The part after the projections up to heads: rotary positions, attention."""
        config, heads = self.config, self.key_value_up.shape[0]
        plain, rotary = config.qk_nope_head_dim, config.qk_rotary_head_dim

        def by_head(x_TA: Tensor, number: int, sizes: list[int]) -> tuple[Tensor, ...]:
            """`x_TA` by head, [B, S, number, size] for each of `sizes`, the parts of a head."""
            shape = (context.num_sequences, context.seq_len, number, sum(sizes))
            return x_TA.view(shape).split(sizes, dim=3)

        query_BSND, query_BSNR = by_head(expanded.query_TA, heads, [plain, rotary])
        key_BSND, value_BSND = by_head(expanded.key_value_TA, heads, [plain, config.v_head_dim])
        (key_BS1R,) = by_head(expanded.key_TR, 1, [rotary])
        query_BSNR, key_BS1R = rotate(query_BSNR, key_BS1R, context.rotary(query_BSNR.dtype))
        query_BSND = torch.cat([query_BSND, query_BSNR], dim=3)
        key_BSND = torch.cat([key_BSND, key_BS1R.expand(-1, -1, heads, -1)], dim=3)
        return self.attend(query_BSND, key_BSND, value_BSND, context)


class ProjectionNorm(nn.Module):
    """RMSNorm of queries or keys over all heads of a token, on all ranks of tp; a rank has a slice
    of ``weight`` [heads * D]."""

    def __init__(self, heads: int, head_dim: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads * head_dim))
        self.num_channels, self.head_dim, self.epsilon = heads * head_dim, head_dim, epsilon

    def forward(self, x_BSND: Tensor, squares_BS11: Tensor) -> Tensor:
        """`squares_BS11`: sums of squares over all heads of all ranks; fp32 or fp64."""
        root_BS11 = torch.rsqrt(squares_BS11 / self.num_channels + self.epsilon)
        normed_BSND = (x_BSND * root_BS11).to(x_BSND.dtype)
        return normed_BSND * self.weight.view(-1, self.head_dim)


def query_key_norm(config: ModelConfig, heads: int) -> nn.Module:
    """The norm of queries or keys [B, S, heads, D]; the identity without ``qk_norm``."""
    if not config.qk_norm:
        return nn.Identity()
    if config.qk_norm_over == "head":
        return RMSNorm(config.head_dim, config.norm_eps)
    return ProjectionNorm(heads, config.head_dim, config.norm_eps)


def parameter_if(wanted: bool, size: int) -> nn.Parameter | None:
    """An optional vector of parameters."""
    return nn.Parameter(torch.empty(size)) if wanted else None


def plus(x_TO: Tensor, bias_O: Tensor | None) -> Tensor:
    return x_TO if bias_O is None else x_TO + bias_O
