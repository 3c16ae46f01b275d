"""Bytes that a layer keeps for its backward, per token and per microbatch of a rank.

Per token and layer, w bytes an element (2 in the 16-bit formulas of the sources), t tensor ranks,
s sequence length; "SP" is divided by t only with sequence parallelism:

| kept | bytes | divided by |
|---|---|---|
| two residual inputs, two norm outputs | 4 w h | SP |
| two dropout masks (where there is dropout) | 2 h | SP |
| q and attention output | w a (d_qk + d_v) | t |
| k, v | w (h_k + h_v) | t |
| log-sum-exp (flash) | 4 a | t |
| scores: softmax, and with dropout its mask and output (no flash) | (2 w + 1) a s, or w a s | t |
| MLP, GELU: input and output of the activation | 2 w f | t |
| MLP, SwiGLU: gate, up, product; silu(gate) unless fused | 3 w f or 4 w f | t |
| norms in fp32 (not fused) | 8 h | SP |

A GPT layer comes to s b h (34 + 5 a s / h) (Korthikanti et al., arXiv:2205.05198, equation 1), a
modern one to 12 h + 4 h_kv + 8 f a token. An MoE layer replaces the MLP line by router logits 4 E,
and for each of k copies: the permuted row w h, gate and up 2 w f_e, product w f_e, the result w h;
shared experts as an MLP. *Expert parallelism divides none of these*: every rank brings its own
tokens and a balanced exchange conserves them. Expert-tensor parallelism gathers tokens (x) and cuts
f_e (1/x): the width terms cancel, the terms with h grow.
"""

from __future__ import annotations

from typing import NamedTuple

from moemesh.planner.planned_layout import PlannedLayout
from moemesh.planner.shapes.shape import LayerKind, ModelShape


class ActivationBytes(NamedTuple):
    """Bytes per token by what divides them: `tokens` by tp with sequence parallelism alone,
    `width` by tp, `routed` by tp with sequence parallelism and multiplied by the load imbalance.
    """

    tokens: float = 0.0
    width: float = 0.0
    routed: float = 0.0

    def plus(self, other: ActivationBytes) -> ActivationBytes:
        return ActivationBytes(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def on_rank(self, layout: PlannedLayout) -> float:
        """Bytes of one microbatch on one rank."""
        shard = layout.tp if layout.sequence_parallel else 1
        per_token = self.tokens / shard + self.width / layout.tp
        routed = self.routed / shard * layout.imbalance
        return layout.tokens * (per_token + routed)


def attention_kept(shape: ModelShape, layout: PlannedLayout) -> ActivationBytes:
    """Saved bytes of one attention block, its norm included."""
    w, hidden, heads = layout.element_bytes, shape.hidden_size, shape.num_heads
    recompute = layout.recompute
    normed = 0.0 if "norm" in recompute else w * hidden
    tokens = w * hidden + normed
    if not layout.fused_norm:
        tokens += 4 * hidden
    if has_dropout(shape, layout):
        tokens += hidden
    kv = shape.kv_width + shape.value_width
    width = w * (shape.query_width + kv)
    if shape.attention == "mla":
        # The low ranks before and behind their norms; the expansion is made of them.
        low = 2 * (shape.q_lora_rank + shape.kv_lora_rank) + shape.qk_rotary_head_dim
        tokens += w * low
        if "mla_up" in recompute:
            width = 0.0
    if shape.qk_norm != "none":
        width += w * (shape.query_width + shape.kv_width)
    if shape.attention_gate:
        width += 2 * w * shape.query_width
    width += w * shape.output_width
    if layout.attention_kernel == "flash":
        width += 4 * heads
    elif "attention" not in recompute:
        # The scores, masked where there is a window, and what dropout keeps of them.
        each = 2 * w + 1 if has_dropout(shape, layout) else w
        width += each * layout.seq_len * heads
    return ActivationBytes(tokens=tokens, width=width)


def mlp_kept(shape: ModelShape, width: int, layout: PlannedLayout) -> float:
    """Bytes per token that an MLP of `width` keeps, without its input."""
    w = layout.element_bytes
    inputs = 2 if shape.gated else 1
    kept = inputs * w * width
    if "activation" not in layout.recompute:
        kept += w * width
        if shape.gated and not layout.fused_activation:
            kept += w * width
    return kept


def feed_forward_kept(shape: ModelShape, moe: bool, layout: PlannedLayout) -> ActivationBytes:
    """Saved bytes of one feed-forward block, its norm included."""
    w, hidden = layout.element_bytes, shape.hidden_size
    tokens = w * hidden + (0.0 if "norm" in layout.recompute else w * hidden)
    if not layout.fused_norm:
        tokens += 4 * hidden
    if has_dropout(shape, layout):
        tokens += hidden
    if not moe:
        return ActivationBytes(
            tokens=tokens, width=mlp_kept(shape, shape.intermediate_size, layout)
        )
    shared = 0.0
    if shape.shared_intermediate_size and "shared_expert" not in layout.recompute:
        shared = mlp_kept(shape, shape.shared_intermediate_size, layout)
    if "moe" in layout.recompute:
        return ActivationBytes(tokens=tokens)
    copies = routed_copies(shape, layout)
    inner = mlp_kept(shape, shape.expert_intermediate_size, layout)
    if "experts" in layout.recompute:
        inner = 0.0
    routed = copies * (2 * w * hidden * layout.etp + inner)
    tokens += 4 * shape.num_experts
    return ActivationBytes(tokens=tokens, width=shared, routed=routed)


def routed_copies(shape: ModelShape, layout: PlannedLayout) -> float:
    """Rows per token at the experts: k, at most the capacity where choices are dropped."""
    k = float(shape.experts_per_token)
    return min(k, k * layout.capacity_factor) if layout.capacity_factor else k


def layer_kept(shape: ModelShape, kind: LayerKind, layout: PlannedLayout) -> ActivationBytes:
    """Saved bytes of one layer under the layout's recomputation."""
    if "full" in layout.recompute:
        return ActivationBytes(tokens=layout.element_bytes * shape.hidden_size)
    if "operators" in layout.recompute:
        return _every_second_operator(shape, kind, layout)
    return attention_kept(shape, layout).plus(feed_forward_kept(shape, kind.moe, layout))


def has_dropout(shape: ModelShape, layout: PlannedLayout) -> bool:
    return shape.dropout if layout.dropout is None else layout.dropout


def _every_second_operator(
    shape: ModelShape, kind: LayerKind, layout: PlannedLayout
) -> ActivationBytes:
    """The layer's input, every second matrix product and the attention output (torchtitan's
    selective operator checkpointing: of q, k, v, o, gate, up, down the 1st, 3rd, ...)."""
    w, hidden = layout.element_bytes, shape.hidden_size
    width = w * (shape.query_width + shape.value_width + shape.output_width)
    width += 4 * shape.num_heads
    if not kind.moe:
        return ActivationBytes(tokens=2 * w * hidden, width=width + w * shape.intermediate_size)
    copies = routed_copies(shape, layout)
    routed = copies * w * (shape.expert_intermediate_size + hidden)
    shared = w * shape.shared_intermediate_size
    return ActivationBytes(tokens=2 * w * hidden, width=width + shared, routed=routed)
