"""Exact parameter counts by part and by possible cut; FLOPs of one token and of a step.

| part | count (h hidden, a heads, d head size, f width, E experts) |
|---|---|
| attention, GQA | h a d + 2 h h_kv + a d h; biases a d + 2 h_kv and h; QK-norm 2 d |
| attention, MLA | h r_q + r_q a (d_n + d_r) + h (r_kv + d_r) + r_kv a (d_n + d_v) + a d_v h |
| MLP | 2 h f (GELU), 3 h f (SwiGLU) |
| MoE layer | E times one expert + the shared MLP + h E |
| norms | 2 h a layer, h at the end |
| embedding, head | V h each, once when tied |

MLA adds the scales of its two low-rank norms, r_q + r_kv. The functions also count biases of other
parts, gates, sinks, learned positions and other norms, if the shape has them. The GPT closed form
12 L h^2 (1 + 13/(12 h) + (V + s)/(12 L h)) is arXiv:2104.04473, equation 2.

One multiply-add is 2 FLOPs. Per token, forward:

    F = 2 (attention + active MLP + router parameters that multiply) + 2 h V
        + sum over layers of 2 s_eff a (d_qk + d_v)

s_eff is s in the *full* convention and s/2 in the *causal* one, as published (the exact mean is
(s + 1)/2 keys per query, itself included); a window is an upper limit of it. Training is 3 F (the
backward costs two forwards). Hardware FLOPs include recomputation.
Sources: the models' papers and released configurations; arXiv:2104.04473 appendix, arXiv:2204.02311
appendix B, arXiv:2412.19437.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Literal, NamedTuple

from moemesh.config.rules import MIRRORED_SCHEDULES
from moemesh.planner.planned_layout import PlannedLayout
from moemesh.planner.shapes.shape import LayerKind, ModelShape

Convention = Literal["full", "causal"]


def attended_tokens(seq_len: int, window: int, convention: Convention) -> float:
    """Mean number of keys that one query is multiplied with (s_eff).

    Causal attention with a window w < s: the first w queries see w/2 on average, the others w.
    """
    if convention == "full":
        return float(min(seq_len, window) if window else seq_len)
    if not window or window >= seq_len:
        return seq_len / 2
    return window * (1 - window / (2 * seq_len))


def attention_products(shape: ModelShape) -> tuple[int, int]:
    """(parameters cut by tensor parallelism, parameters of every rank) of one attention block that
    multiply a token, without norms and biases."""
    hidden, output = shape.hidden_size, shape.output_width * shape.hidden_size
    if shape.attention == "gqa":
        queries = (2 if shape.attention_gate else 1) * shape.query_width
        return hidden * (queries + 2 * shape.kv_width) + output, 0
    query, latent = shape.q_lora_rank, shape.kv_lora_rank
    expanded = latent * shape.num_heads * (shape.qk_nope_head_dim + shape.v_head_dim)
    down = hidden * (query + latent + shape.qk_rotary_head_dim)
    return (query or hidden) * shape.query_width + expanded + output, down


def layer_matmul(shape: ModelShape, moe: bool) -> int:
    """Parameters of one layer that multiply a token, including the router. For a counted layer it
    is half of its FLOPs without attention scores."""
    if shape.counted:
        return round(shape.counted[moe].flops / 2)
    return sum(attention_products(shape)) + mlp_matmul(shape, moe)


def mlp_matmul(shape: ModelShape, moe: bool) -> int:
    """The part of :func:`layer_matmul` in the MLP: dense, or experts, shared experts and router."""
    hidden, width = shape.hidden_size, shape.intermediate_size
    router_width = 0
    if moe:
        width = shape.experts_per_token * shape.expert_intermediate_size
        width += shape.shared_intermediate_size
        router_width = shape.num_experts + shape.shared_gate
    return hidden * ((3 if shape.gated else 2) * width + router_width)


def core_flops(shape: ModelShape, seq_len: int, window: int, convention: Convention) -> float:
    """Forward FLOPs of one token in one attention core (QK^T and PV)."""
    width = shape.num_heads * (shape.query_head_dim + shape.value_head_dim)
    return 2.0 * attended_tokens(seq_len, window, convention) * width


@dataclass(frozen=True, kw_only=True)
class Flops:
    """FLOPs per token. `training` is 3 forwards; below adapters a product costs 2, because its
    weights have no gradient. `attention` is the part of `forward` in attention cores; `mtp` is the
    forward of all extra prediction layers, which no other figure includes."""

    convention: Convention
    forward: float
    training: float
    attention: float
    head: float
    mtp: float


def count_flops(
    shape: ModelShape, seq_len: int, convention: Convention, *, adapters: bool = False
) -> Flops:
    """Model FLOPs of one token of a sequence of `seq_len`, if only `adapters` train or all weights.
    The adapters' own products are narrow and not counted."""
    cores = layers = 0.0
    for kind, number in shape.kind_counts.items():
        core = core_flops(shape, seq_len, kind.window, convention)
        cores += number * core
        layers += number * (2.0 * layer_matmul(shape, kind.moe) + core)
    head, mtp = 2.0 * shape.hidden_size * shape.vocab_size, 0.0
    if shape.num_mtp_layers:
        # One extra prediction layer: projection 2h -> h, layer and head.
        kind = shape.mtp_kind
        core = core_flops(shape, seq_len, kind.window, convention)
        mtp = 4.0 * shape.hidden_size**2 + (2.0 * layer_matmul(shape, kind.moe) + core) + head
    return Flops(
        convention=convention,
        forward=layers + head,
        training=3 * (layers + head) - adapters * (layers + head - cores),
        attention=cores,
        head=head,
        mtp=shape.num_mtp_layers * mtp,
    )


def training_flops(shape: ModelShape, seq_len: int, *, adapters: bool = False) -> float:
    """Model FLOPs of training one token, with causal attention and extra prediction layers, without
    recomputation. Predicted and measured rates and MFU use them."""
    flops = count_flops(shape, seq_len, "causal", adapters=adapters)
    ahead = 3 * flops.mtp
    if adapters and shape.num_mtp_layers:
        core = core_flops(shape, seq_len, shape.mtp_kind.window, "causal")
        ahead = 2 * flops.mtp + shape.num_mtp_layers * core
    return flops.training + ahead


def repeated_flops(
    shape: ModelShape,
    kind: LayerKind,
    seq_len: int,
    convention: Convention,
    recompute: frozenset[str],
) -> tuple[float, float]:
    """FLOPs of one token that the backward of a layer repeats: in its attention, in its MLP. Norms
    and activations have none.

    "attention" repeats the core; "experts" the products of routed experts but the last, "moe" the
    whole layer of experts; "mla_up" the expansion of MLA's low ranks; "operators" every second
    product outside of experts.
    """
    core = core_flops(shape, seq_len, kind.window, convention)
    if shape.counted:
        return ("full" in recompute) * (2.0 * layer_matmul(shape, kind.moe) + core), 0.0
    products = 2.0 * sum(attention_products(shape))
    mlp = 2.0 * mlp_matmul(shape, kind.moe)
    if "full" in recompute:
        return products + core, mlp
    attention = core * ("attention" in recompute)
    matrices, hidden = 3 if shape.gated else 2, 2.0 * shape.hidden_size
    shared = hidden * matrices * shape.shared_intermediate_size * kind.moe
    if "mla_up" in recompute:
        expanded = shape.kv_lora_rank * (shape.qk_nope_head_dim + shape.v_head_dim)
        expanded = expanded * shape.num_heads + shape.q_lora_rank * shape.query_width
        attention += 2.0 * expanded
    if "operators" in recompute:
        attention += products / 2
        return attention, (shared if kind.moe else mlp) / 2
    if not kind.moe:
        return attention, 0.0
    if "moe" in recompute:
        return attention, mlp
    width = shape.experts_per_token * shape.expert_intermediate_size
    repeated = hidden * (matrices - 1) * width * ("experts" in recompute)
    return attention, repeated + shared * ("shared_expert" in recompute)


def adapter_flops(shape: ModelShape, layout: PlannedLayout) -> float:
    """Forward FLOPs of one token in the products with adapters."""
    counts, mtp = count_parameters(shape), end_weights(shape)["mtp"]
    experts = counts.experts + shape.num_mtp_layers * mtp.expert
    dense = counts.total + counts.mtp - experts
    active = experts * shape.experts_per_token / max(shape.num_experts, 1)
    return 2.0 * (layout.trained_dense * dense + layout.trained_experts * active)


def hardware_flops(shape: ModelShape, layout: PlannedLayout, convention: Convention) -> float:
    """FLOPs of one token that the devices execute in training: those of extra prediction layers,
    of adapters and of recomputation included.

    Frozen weights have no gradient. FlashAttention repeats QK^T in its backward, a loss in chunks
    the product of the head, an adapter its first product, about half of its forward.
    """
    flops, recompute = count_flops(shape, layout.seq_len, convention), layout.recompute
    limit = layout.recompute_layers
    # A rank of two pipes has layers of both.
    pipes = 2 if layout.schedule in MIRRORED_SCHEDULES and layout.pp > 1 else 1
    share = 1.0 if limit is None else min(limit * layout.pp / (pipes * shape.num_layers), 1.0)
    is_flash = layout.attention_kernel in ("flash", "first_flash")
    scores = is_flash * shape.query_head_dim / (shape.query_head_dim + shape.value_head_dim)
    cores = repeated = 0.0
    for kind, number in all_kinds(shape).items():
        cores += number * core_flops(shape, layout.seq_len, kind.window, convention)
        parts = repeated_flops(shape, kind, layout.seq_len, convention, recompute)
        repeated += number * share * sum(parts)
    total = (3 + scores) * cores + repeated
    total += (2 if layout.adapters else 3) * (flops.forward + flops.mtp - cores)
    if layout.loss == "chunked":
        total += (1 + shape.num_mtp_layers) * flops.head
    if layout.adapters:
        total += (3.5 + share * ("full" in recompute)) * adapter_flops(shape, layout)
    return total


def all_kinds(shape: ModelShape) -> Counter[LayerKind]:
    """Number of layers of each kind, extra prediction layers included."""
    return Counter([*shape.kinds, *[shape.mtp_kind] * shape.num_mtp_layers])


class WeightCounts(NamedTuple):
    """Numbers of parameters by the axes that divide them.

    `sharded` is divided by tp, `replicated` by nothing, `expert` by ep x etp.
    """

    sharded: int = 0
    replicated: int = 0
    expert: int = 0

    def plus(self, other: WeightCounts, count: int = 1) -> WeightCounts:
        """These counts plus `count` times `other`."""
        pairs = zip(self, other, strict=True)
        return WeightCounts(*(x + count * y for x, y in pairs))

    def on_rank(self, layout: PlannedLayout) -> tuple[float, float]:
        """(parameters outside of experts, parameters of experts) on one rank."""
        dense = self.sharded / layout.tp + self.replicated
        return dense, self.expert / (layout.ep * layout.etp)

    @property
    def total(self) -> int:
        return sum(self)


def _mlp_weights(shape: ModelShape, width: int) -> WeightCounts:
    """Parameters of one dense MLP of `width`; zero for width 0."""
    # Gate and up, or up alone.
    inputs = 2 if shape.gated else 1
    bias = shape.mlp_bias * (width > 0)
    return WeightCounts(
        sharded=(inputs + 1) * shape.hidden_size * width + bias * inputs * width,
        replicated=bias * shape.hidden_size,
    )


def layer_parts(
    shape: ModelShape, moe: bool, whole_output: bool = False
) -> dict[str, WeightCounts]:
    """Parameters of one layer by part, named as in :class:`Parameters`.

    `whole_output`: the output projection is kept whole on every tp rank (attention exit
    "all_to_all").
    """
    if shape.counted:
        layer = shape.counted[moe]
        # Everything but the routed experts is counted together.
        names = ("norms", "dense_mlp", "shared_experts", "router")
        parts: dict[str, WeightCounts] = dict.fromkeys(names, WeightCounts())
        parts["attention"] = WeightCounts(replicated=round(layer.weights))
        return {**parts, "experts": WeightCounts(expert=round(layer.expert_weights))}
    sharded, replicated = attention_products(shape)
    if whole_output:
        output = shape.hidden_size * shape.output_width
        sharded, replicated = sharded - output, replicated + output
    if shape.attention == "mla":
        query, latent = shape.q_lora_rank, shape.kv_lora_rank
        replicated += query + latent
        if shape.qkv_bias:
            # As in the released code: biases of the two down projections to the low ranks.
            replicated += query + latent + shape.qk_rotary_head_dim
    elif shape.qkv_bias:
        sharded += shape.query_width * (2 if shape.attention_gate else 1) + 2 * shape.kv_width
    replicated += shape.hidden_size * shape.output_bias
    if shape.qk_norm == "head":
        replicated += 2 * shape.head_dim
    elif shape.qk_norm == "full":
        sharded += shape.query_width + shape.kv_width
    sharded += shape.num_heads * shape.attention_sinks
    parts = {
        "attention": WeightCounts(sharded=sharded, replicated=replicated),
        "norms": WeightCounts(replicated=shape.norms_per_layer * shape.norm_weights),
    }
    if not moe:
        return {**parts, "dense_mlp": _mlp_weights(shape, shape.intermediate_size)}
    hidden, width = shape.hidden_size, shape.expert_intermediate_size
    inputs = 2 if shape.gated else 1
    expert = (inputs + 1) * hidden * width + shape.expert_bias * (inputs * width + hidden)
    # The shared gate, if any, is counted with the router.
    router = (hidden + shape.router_logit_bias) * shape.num_experts + hidden * shape.shared_gate
    return {
        **parts,
        "experts": WeightCounts(expert=shape.num_experts * expert),
        "shared_experts": _mlp_weights(shape, shape.shared_intermediate_size),
        "router": WeightCounts(replicated=router),
    }


@lru_cache(maxsize=4096)
def layer_weights(shape: ModelShape, moe: bool, whole_output: bool = False) -> WeightCounts:
    """Parameters of one whole layer with its norms."""
    return reduce(WeightCounts.plus, layer_parts(shape, moe, whole_output).values())


def end_weights(shape: ModelShape) -> dict[str, WeightCounts]:
    """Parameters outside of the layers: "embedding" with learned positions and its norm; "norms",
    the final norm; "head", of a tied one only the bias; "mtp", one extra prediction layer
    (arXiv:2412.19437, section 2.2): two norms, the projection 2h -> h, a layer and a final norm. It
    shares embedding and head with the model."""
    norm, hidden = shape.norm_weights, shape.hidden_size
    untied = not shape.tied_embeddings
    around_layer = WeightCounts(replicated=3 * norm + 2 * hidden**2)
    norms = norm * shape.final_norm
    if shape.counted:
        # All that is counted outside of layers, without the tables.
        norms = round(shape.counted[2].weights) - (1 + untied) * shape.vocab_size * hidden
    return {
        "embedding": WeightCounts(
            sharded=shape.vocab_size * hidden,
            replicated=shape.learned_positions * hidden + norm * shape.embedding_norm,
        ),
        "norms": WeightCounts(replicated=norms),
        "head": WeightCounts(sharded=shape.vocab_size * (hidden * untied + shape.head_bias)),
        "mtp": layer_weights(shape, shape.mtp_kind.moe).plus(around_layer),
    }


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Numbers of parameters of a whole model. `total` has no extra prediction layers (`mtp`).

    `active` is `total` without the routed experts that a token does not choose;
    `active_without_embeddings` leaves the tables of embedding and head out. `experts` are all
    routed experts; `selection_bias` is a buffer, which no sum includes.
    """

    total: int
    active: int
    active_without_embeddings: int
    embedding: int
    head: int
    attention: int
    dense_mlp: int
    experts: int
    shared_experts: int
    router: int
    norms: int
    mtp: int
    selection_bias: int


def count_parameters(shape: ModelShape) -> Parameters:
    """The exact parameters of `shape`, by part."""
    moe, table = shape.num_moe_layers, shape.vocab_size * shape.hidden_size
    ends = {name: weights.total for name, weights in end_weights(shape).items()}
    mtp, parts = ends.pop("mtp"), Counter(ends)
    for is_moe, number in ((False, shape.num_layers - moe), (True, moe)):
        for name, weights in layer_parts(shape, is_moe).items():
            parts[name] += number * weights.total
    total = sum(parts.values())
    inactive = shape.num_experts - shape.experts_per_token
    active = total - parts["experts"] // max(shape.num_experts, 1) * inactive
    return Parameters(
        total=total,
        active=active,
        active_without_embeddings=active - table * (1 if shape.tied_embeddings else 2),
        mtp=shape.num_mtp_layers * mtp,
        selection_bias=moe * shape.num_experts if shape.router_selection_bias else 0,
        **parts,
    )
