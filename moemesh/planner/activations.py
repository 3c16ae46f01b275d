"""Bytes that a layer keeps for its backward, per token and per microbatch of a rank.

Per token and layer, with w bytes an element (2 in the 16-bit formulas of the sources) and t tensor
ranks; "tokens" are divided by t only with sequence parallelism. Each :class:`KeptTensor` below is a
row of the sources' tables. A GPT layer comes to s b h (34 + 5 a s / h) (Korthikanti et al.,
arXiv:2205.05198, equation 1), a modern one to 12 h + 4 h_kv + 8 f a token. An MoE layer replaces
the MLP line by router logits 4 E, and for each of k copies: the permuted row w h, gate and up 2 w
f_e, product w f_e, the result w h; shared experts as an MLP. *Expert parallelism divides none of
these*: every rank brings its own tokens and a balanced exchange conserves them. Expert-tensor
parallelism gathers tokens (x) and cuts f_e (1/x): the width terms cancel, the terms with h grow.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from moemesh.planner.planned_layout import PlannedLayout
from moemesh.planner.shapes.shape import LayerKind, ModelShape

#: What divides bytes: see :class:`ActivationBytes`.
Cut = Literal["tokens", "width", "routed"]


class ActivationBytes(NamedTuple):
    """Bytes per token by what divides them: `tokens` by tp with sequence parallelism alone,
    `width` by tp, `routed` by tp with sequence parallelism and multiplied by the load imbalance.
    """

    tokens: float = 0.0
    width: float = 0.0
    routed: float = 0.0

    def on_rank(self, layout: PlannedLayout) -> float:
        """Bytes of one microbatch on one rank."""
        shard = layout.tp if layout.sequence_parallel else 1
        per_token = self.tokens / shard + self.width / layout.tp
        routed = self.routed / shard * layout.imbalance
        return layout.tokens * (per_token + routed)


class KeptTensor(NamedTuple):
    """Bytes per token that an operation keeps: what divides them (a field of `ActivationBytes`),
    and the words of a layout's recomputation under which they are made again instead."""

    cut: Cut
    size: float
    again: tuple[str, ...] = ()


def kept_tensors(shape: ModelShape, moe: bool, layout: PlannedLayout) -> Iterator[KeptTensor]:
    """All that the attention block and the MLP of one layer keep."""
    w, hidden, heads = layout.element_bytes, shape.hidden_size, shape.num_heads
    has_dropout = shape.dropout if layout.dropout is None else layout.dropout
    for _ in ("attention", "mlp"):
        # The residual stream in front of a block, and its norm.
        yield KeptTensor("tokens", w * hidden)
        yield KeptTensor("tokens", w * hidden, ("norm",))
        if not layout.fused_norm:
            yield KeptTensor("tokens", 4 * hidden)
        if has_dropout:
            yield KeptTensor("tokens", hidden)
    is_latent = shape.attention == "mla"
    projected = w * (shape.query_width + shape.kv_width + shape.value_width)
    # The low ranks before and behind their norms; the expansion is made of them.
    low = 2 * (shape.q_lora_rank + shape.kv_lora_rank) + shape.qk_rotary_head_dim
    yield KeptTensor("tokens", w * low * is_latent)
    yield KeptTensor("width", projected, ("mla_up",) if is_latent else ())
    if shape.qk_norm != "none":
        yield KeptTensor("width", w * (shape.query_width + shape.kv_width))
    if shape.attention_gate:
        yield KeptTensor("width", 2 * w * shape.query_width)
    yield KeptTensor("width", w * shape.output_width)
    if layout.attention_kernel == "flash":
        yield KeptTensor("width", 4 * heads)
    else:
        # The scores, masked where there is a window, and what dropout keeps of them.
        each = 2 * w + 1 if has_dropout else w
        yield KeptTensor("width", each * layout.seq_len * heads, ("attention",))
    #: MLPs without their input: (what divides them, copies of a token, width, made again under).
    mlps: list[tuple[Cut, float, int, tuple[str, ...]]] = []
    if moe:
        copies = routed_copies(shape, layout)
        yield KeptTensor("tokens", 4 * shape.num_experts, ("moe",))
        yield KeptTensor("routed", copies * (2 * w * hidden * layout.etp), ("moe",))
        mlps.append(("width", 1, shape.shared_intermediate_size, ("moe", "shared_expert")))
        mlps.append(("routed", copies, shape.expert_intermediate_size, ("moe", "experts")))
    else:
        mlps.append(("width", 1, shape.intermediate_size, ()))
    unfused = shape.gated and not layout.fused_activation
    for cut, copies, width, again in mlps:
        inner = copies * (w * width)
        yield KeptTensor(cut, (2 if shape.gated else 1) * inner, again)
        yield KeptTensor(cut, (1 + unfused) * inner, (*again, "activation"))


def routed_copies(shape: ModelShape, layout: PlannedLayout) -> float:
    """Rows per token at the experts: k, at most the capacity where choices are dropped."""
    k = float(shape.experts_per_token)
    return min(k, k * layout.capacity_factor) if layout.capacity_factor else k


def layer_kept(shape: ModelShape, kind: LayerKind, layout: PlannedLayout) -> ActivationBytes:
    """Saved bytes of one layer under the layout's recomputation."""
    w, hidden = layout.element_bytes, shape.hidden_size
    if "full" in layout.recompute:
        return ActivationBytes(tokens=w * hidden)
    if "operators" in layout.recompute:
        # The layer's input, every second matrix product and the attention output (torchtitan's
        # selective operator checkpointing: of q, k, v, o, gate, up, down the 1st, 3rd, ...).
        width = w * (shape.query_width + shape.value_width + shape.output_width)
        width += 4 * shape.num_heads
        if not kind.moe:
            return ActivationBytes(tokens=2 * w * hidden, width=width + w * shape.intermediate_size)
        routed = routed_copies(shape, layout) * w * (shape.expert_intermediate_size + hidden)
        width += w * shape.shared_intermediate_size
        return ActivationBytes(tokens=2 * w * hidden, width=width, routed=routed)
    found = dict.fromkeys(ActivationBytes._fields, 0.0)
    for kept in kept_tensors(shape, kind.moe, layout):
        if layout.recompute.isdisjoint(kept.again):
            found[kept.cut] = found[kept.cut] + kept.size
    return ActivationBytes(**found)
