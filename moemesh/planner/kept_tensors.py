"""Tensors that a layer keeps for its backward, as a table: bytes per token, and their division.

An element has w bytes (2 in the 16-bit formulas of the sources). Each :class:`KeptTensor` is a row
of the sources' tables. A GPT layer comes to s b h (34 + 5 a s / h) bytes (Korthikanti et al.,
arXiv:2205.05198, equation 1), a modern one to 12 h + 4 h_kv + 8 f per token. An MoE layer replaces
the rows of the MLP by the router's logits, 4 E, and for each of k copies of a token: the permuted
row w h, gate and up 2 w f_e, their product w f_e, the result w h. Shared experts count as an MLP.
*Expert parallelism divides none of these*: every rank brings its own tokens, and a balanced
exchange conserves their number. Expert-tensor parallelism of degree x has x times the tokens and
f_e / x: terms with f_e keep their size, terms with h grow.

These are the tensors of trainers on GPUs with fused kernels. The kernels of a CPU keep others,
which :mod:`moemesh.planner.traffic.own_memory` lists for a run of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Literal, NamedTuple

from moemesh.planner.arithmetic import Number
from moemesh.planner.planned_layout import PlannedLayout
from moemesh.planner.shapes.shape import LayerKind, ModelShape
from moemesh.planner.stage_cut import with_values

#: Kind of division of bytes over ranks, a field of :class:`ActivationBytes`.
Cut = Literal["tokens", "width", "routed"]


class ActivationBytes(NamedTuple):
    """Bytes per token by their division over ranks: `tokens` is divided by tp only with sequence
    parallelism, `width` always by tp, `routed` like `tokens` and multiplied by the load imbalance.
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
    """Bytes per token (`size`) that an operation keeps, with their division over ranks. The tensor
    is not kept if the layout's recomputation includes one of `recomputed_by`."""

    cut: Cut
    size: float
    recomputed_by: tuple[str, ...] = ()


#: Kernels of the attention core that keep its scores for the backward.
KEEP_SCORES = ("fused", "eager")


def kept_tensors(shape: ModelShape, moe: bool, layout: PlannedLayout) -> Iterator[KeptTensor]:
    """All kept tensors of the attention block and the MLP of one layer."""
    w, hidden, heads = layout.element_bytes, shape.hidden_size, shape.num_heads
    has_dropout = shape.dropout if layout.dropout is None else layout.dropout
    for _ in ("attention", "mlp"):
        # The residual stream before a block, and its norm.
        yield KeptTensor("tokens", w * hidden)
        yield KeptTensor("tokens", w * hidden, ("norm",))
        if not layout.fused_norm:
            yield KeptTensor("tokens", 4 * hidden, ("norm",))
        if has_dropout:
            yield KeptTensor("tokens", hidden)
    is_latent = shape.attention == "mla"
    projected = w * (shape.query_width + shape.kv_width + shape.value_width)
    # The low ranks before and after their norms.
    low = 2 * (shape.q_lora_rank + shape.kv_lora_rank) + shape.qk_rotary_head_dim
    yield KeptTensor("tokens", w * low * is_latent)
    yield KeptTensor("width", projected, ("mla_up",) if is_latent else ())
    if shape.qk_norm != "none":
        yield KeptTensor("width", w * (shape.query_width + shape.kv_width))
    if shape.attention_gate:
        yield KeptTensor("width", 2 * w * shape.query_width)
    yield KeptTensor("width", w * shape.output_width)
    if layout.attention_kernel not in KEEP_SCORES:
        yield KeptTensor("width", 4 * heads)
    else:
        # The scores (masked by the window, if any), and dropout's copy and mask of them.
        per_score = 2 * w + 1 if has_dropout else w
        yield KeptTensor("width", per_score * layout.seq_len * heads, ("attention",))
    #: MLPs without their input: (division over ranks, copies of a token, width, recomputed by).
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
    for cut, copies, width, recomputed_by in mlps:
        # Gate and up, their product, and the activation's output if its kernel is not fused.
        inner = copies * (w * width)
        yield KeptTensor(cut, (2 if shape.gated else 1) * inner, recomputed_by)
        yield KeptTensor(cut, (1 + unfused) * inner, (*recomputed_by, "activation"))


def routed_copies(shape: ModelShape, layout: PlannedLayout) -> float:
    """Rows per token at the experts: k, or at most the capacity if choices are dropped."""
    k = float(shape.experts_per_token)
    return min(k, k * layout.capacity_factor) if layout.capacity_factor else k


def layer_kept(shape: ModelShape, kind: LayerKind, layout: PlannedLayout) -> ActivationBytes:
    """Bytes that one layer keeps under the layout's recomputation."""
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
        # Rows of the experts are gathered over etp, and their width is cut by it.
        routed = shape.expert_intermediate_size + hidden * layout.etp
        routed = routed_copies(shape, layout) * w * routed
        width += w * shape.shared_intermediate_size
        return ActivationBytes(tokens=2 * w * hidden, width=width, routed=routed)
    sums = dict.fromkeys(ActivationBytes._fields, 0.0)
    for kept in kept_tensors(shape, kind.moe, layout):
        if layout.recompute.isdisjoint(kept.recomputed_by):
            sums[kept.cut] = sums[kept.cut] + kept.size
    if shape.counted:
        # The counted bytes are those without recomputation.
        return ActivationBytes(tokens=shape.counted[kind.moe].kept_bytes, routed=sums["routed"])
    return ActivationBytes(**sums)


class ChunkBytes:
    """Activation bytes of layers under one layout, computed once for each kind of layer.

    A layer keeps ``stored`` bytes from its forward to its backward under the layout's
    recomputation. Without recomputation it would keep ``whole`` bytes, which exist while its
    backward runs. `allocated` maps a layer's tensors, and the layout under which they are kept, to
    bytes of one microbatch on one rank; by default it is their size.
    """

    def __init__(
        self,
        shape: ModelShape,
        layout: PlannedLayout,
        allocated: Callable[[ActivationBytes, PlannedLayout], Number] = ActivationBytes.on_rank,
    ) -> None:
        bare = with_values(layout, recompute=frozenset[str](), recompute_layers=None)
        # A layer that is recomputed as a whole keeps only its input.
        stored_size = ActivationBytes.on_rank if "full" in layout.recompute else allocated

        @cache
        def layer(kind: LayerKind) -> tuple[Number, Number]:
            """(stored, whole) of one layer on one rank."""
            stored = stored_size(layer_kept(shape, kind, layout), layout)
            if not layout.recompute:
                return stored, stored
            return stored, allocated(layer_kept(shape, kind, bare), bare)

        self.layer = layer
        #: Cache of :func:`rank_memory`: rank -> bytes of its activations at its peak.
        self.held: dict[int, Number] = {}

    def chunk(self, layers: Mapping[LayerKind, int], limit: float | None = None) -> Number:
        """Bytes kept by the layers of a chunk if the first `limit` layers are recomputed; None:
        all are."""
        total: Number = 0.0
        left = float("inf") if limit is None else limit
        for kind, number in layers.items():
            stored, whole = self.layer(kind)
            recomputed = min(number, left)
            left -= recomputed
            total = total + (recomputed * stored + (number - recomputed) * whole)
        return total
