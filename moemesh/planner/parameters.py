"""Exact parameter counts, by part and by how a layout may cut them; FLOPs of one token, of a step.

| part | count (h hidden, a heads, d head size, f width, E experts) |
|---|---|
| attention, GQA | h a d + 2 h h_kv + a d h; biases a d + 2 h_kv and h; QK-norm 2 d |
| attention, MLA | h r_q + r_q a (d_n + d_r) + h (r_kv + d_r) + r_kv a (d_n + d_v) + a d_v h |
| MLP | 2 h f (GELU), 3 h f (SwiGLU) |
| MoE layer | E times one expert + the shared MLP + h E |
| norms | 2 h a layer, h at the end |
| embedding, head | V h each, once when tied |

MLA adds the scales of its two low-rank norms, r_q + r_kv. The GPT closed form
12 L h^2 (1 + 13/(12 h) + (V + s)/(12 L h)) is arXiv:2104.04473, equation 2.

One multiply-add is 2 FLOPs. Per token, forward:

    F = 2 (attention + active MLP + router parameters that multiply) + 2 h V
        + sum over layers of 2 s_eff a (d_qk + d_v)

s_eff is s in the *full* convention and s/2 in the *causal* one, as it is published (a query sees
(s + 1)/2 keys on average, itself included; nobody counts the half); a window caps what a token
sees. Training is 3 F (the backward costs two forwards). Hardware FLOPs add what is computed again.
Sources: the models' papers and released configurations; arXiv:2104.04473 appendix, arXiv:2204.02311
appendix B, arXiv:2412.19437 (both rates).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from moemesh.planner.shapes.shape import NORM_WEIGHTS, LayerKind, ModelShape

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
    """Parameters of one attention block that multiply a token (no norms, no biases): those that
    tensor parallelism cuts, and those that every rank has."""
    hidden, output = shape.hidden_size, shape.output_width * shape.hidden_size
    if shape.attention == "gqa":
        queries = (2 if shape.attention_gate else 1) * shape.query_width
        return hidden * (queries + 2 * shape.kv_width) + output, 0
    query, latent = shape.q_lora_rank, shape.kv_lora_rank
    expanded = latent * shape.num_heads * (shape.qk_nope_head_dim + shape.v_head_dim)
    down = hidden * (query + latent + shape.qk_rotary_head_dim)
    return (query or hidden) * shape.query_width + expanded + output, down


def layer_matmul(shape: ModelShape, moe: bool) -> int:
    """Parameters of one layer that multiply a token, the router among them."""
    hidden, width = shape.hidden_size, shape.intermediate_size
    routed = 0
    if moe:
        width = shape.experts_per_token * shape.expert_intermediate_size
        width += shape.shared_intermediate_size
        routed = shape.num_experts + shape.shared_gate
    mlp = hidden * ((3 if shape.gated else 2) * width + routed)
    return sum(attention_products(shape)) + mlp


def core_flops(shape: ModelShape, seq_len: int, window: int, convention: Convention) -> float:
    """Forward FLOPs of one token in one attention core (QK^T and PV)."""
    width = shape.num_heads * (shape.query_head_dim + shape.value_head_dim)
    return 2.0 * attended_tokens(seq_len, window, convention) * width


def layer_forward(
    shape: ModelShape, kind: LayerKind, seq_len: int, convention: Convention
) -> float:
    """Forward FLOPs of one token in one layer."""
    return 2.0 * layer_matmul(shape, kind.moe) + core_flops(shape, seq_len, kind.window, convention)


def head_forward(shape: ModelShape) -> float:
    """Forward FLOPs of one token in the head."""
    return 2.0 * shape.hidden_size * shape.vocab_size


@dataclass(frozen=True, kw_only=True)
class Flops:
    """FLOPs per token. `training` is 3 forwards; `attention` is the part of `forward` in the
    attention cores, `expert_gate_up` that in the first products of routed experts; `mtp` the
    forward of all extra prediction layers, in no other figure."""

    convention: Convention
    forward: float
    training: float
    attention: float
    head: float
    mtp: float
    expert_gate_up: float


def count_flops(shape: ModelShape, seq_len: int, convention: Convention) -> Flops:
    """Model FLOPs of one token of a sequence of `seq_len`."""
    cores = layers = 0.0
    for kind, number in shape.kind_counts.items():
        cores += number * core_flops(shape, seq_len, kind.window, convention)
        layers += number * layer_forward(shape, kind, seq_len, convention)
    forward = layers + head_forward(shape)
    mtp = 0.0
    if shape.num_mtp_layers:
        # Projection, layer and head.
        layer = layer_forward(shape, shape.mtp_kind, seq_len, convention)
        mtp = 4.0 * shape.hidden_size**2 + layer + head_forward(shape)
    width = shape.experts_per_token * shape.expert_intermediate_size
    gates = 2 if shape.gated else 1
    return Flops(
        convention=convention,
        forward=forward,
        training=3 * forward,
        attention=cores,
        head=head_forward(shape),
        mtp=shape.num_mtp_layers * mtp,
        expert_gate_up=shape.num_moe_layers * 2.0 * gates * shape.hidden_size * width,
    )


def training_flops(shape: ModelShape, seq_len: int) -> float:
    """Model FLOPs of training one token, extra prediction layers included: causal attention, and
    nothing that is computed again. Rates and MFU, predicted and measured, count these."""
    flops = count_flops(shape, seq_len, "causal")
    return flops.training + 3 * flops.mtp


def hardware_flops(
    flops: Flops, recompute: frozenset[str] = frozenset(), *, flash: bool = True
) -> float:
    """FLOPs of one token that the device carries out in training: what is computed again counts.

    Full recomputation adds a forward (4 F in all), recomputing the attention core one core, gate
    and up of the routed experts two of their three products.
    FlashAttention computes QK^T once more in its backward: half a core.
    """
    found = flops.training
    if "full" in recompute:
        found += flops.forward - flops.head
    else:
        found += flops.attention * ("attention" in recompute)
        found += flops.expert_gate_up * ("experts" in recompute)
    return found + (0.5 * flops.attention if flash else 0.0)


class WeightCounts(NamedTuple):
    """Numbers of parameters by the axes that divide them.

    `sharded` is divided by tp, `replicated` by nothing, `expert` by ep x etp.
    """

    sharded: int = 0
    replicated: int = 0
    expert: int = 0

    def plus(self, other: WeightCounts) -> WeightCounts:
        return WeightCounts(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def times(self, factor: int) -> WeightCounts:
        return WeightCounts(*(factor * mine for mine in self))

    @property
    def total(self) -> int:
        return sum(self)


def attention_weights(shape: ModelShape, *, whole_output: bool = False) -> WeightCounts:
    """Parameters of one attention block without the norm in front of it.

    `whole_output`: the output projection is kept whole on every tp rank (attention exit
    "all_to_all").
    """
    sharded, replicated = attention_products(shape)
    if whole_output:
        output = shape.hidden_size * shape.output_width
        sharded, replicated = sharded - output, replicated + output
    if shape.attention == "mla":
        query, latent = shape.q_lora_rank, shape.kv_lora_rank
        replicated += query + latent
        if shape.qkv_bias:
            # As in the released code: on the two projections down to the low ranks.
            replicated += query + latent + shape.qk_rotary_head_dim
    elif shape.qkv_bias:
        sharded += shape.query_width * (2 if shape.attention_gate else 1) + 2 * shape.kv_width
    replicated += shape.hidden_size * shape.output_bias
    if shape.qk_norm == "head":
        replicated += 2 * shape.head_dim
    elif shape.qk_norm == "full":
        sharded += shape.query_width + shape.kv_width
    sharded += shape.num_heads * shape.attention_sinks
    return WeightCounts(sharded=sharded, replicated=replicated)


def mlp_weights(shape: ModelShape, width: int) -> WeightCounts:
    """Parameters of one dense MLP of `width`."""
    inputs, bias = 2 if shape.gated else 1, shape.mlp_bias
    return WeightCounts(
        sharded=(inputs + 1) * shape.hidden_size * width + bias * inputs * width,
        replicated=bias * shape.hidden_size,
    )


def expert_weights(shape: ModelShape) -> WeightCounts:
    """Parameters of one expert."""
    hidden, width = shape.hidden_size, shape.expert_intermediate_size
    inputs = 2 if shape.gated else 1
    biases = shape.expert_bias * (inputs * width + hidden)
    return WeightCounts(expert=(inputs + 1) * hidden * width + biases)


def router_weights(shape: ModelShape) -> WeightCounts:
    """Parameters that decide and weigh: the router and, where there is one, the shared gate."""
    found = (shape.hidden_size + shape.router_logit_bias) * shape.num_experts
    return WeightCounts(replicated=found + shape.hidden_size * shape.shared_gate)


def _shared_weights(shape: ModelShape) -> WeightCounts:
    """Parameters of all shared experts of a layer."""
    width = shape.shared_intermediate_size
    return mlp_weights(shape, width) if width else WeightCounts()


def norm_weights(shape: ModelShape) -> WeightCounts:
    """Parameters of one norm over the hidden channels."""
    return WeightCounts(replicated=NORM_WEIGHTS[shape.norm] * shape.hidden_size)


@lru_cache(maxsize=4096)
def layer_weights(shape: ModelShape, moe: bool, whole_output: bool = False) -> WeightCounts:
    """Parameters of one whole layer with its norms."""
    found = attention_weights(shape, whole_output=whole_output)
    found = found.plus(norm_weights(shape).times(shape.norms_per_layer))
    if not moe:
        return found.plus(mlp_weights(shape, shape.intermediate_size))
    found = found.plus(expert_weights(shape).times(shape.num_experts))
    return found.plus(_shared_weights(shape)).plus(router_weights(shape))


def embedding_weights(shape: ModelShape) -> WeightCounts:
    """The embedding in front of the first layer, with learned positions and its norm."""
    positions = WeightCounts(
        sharded=shape.vocab_size * shape.hidden_size,
        replicated=shape.learned_positions * shape.hidden_size,
    )
    return positions.plus(norm_weights(shape).times(shape.embedding_norm))


def head_weights(shape: ModelShape) -> WeightCounts:
    """Parameters behind the last layer: the final norm, and the head unless it is tied."""
    untied = not shape.tied_embeddings
    table = shape.vocab_size * (shape.hidden_size * untied + shape.head_bias)
    return norm_weights(shape).times(shape.final_norm).plus(WeightCounts(sharded=table))


def mtp_weights(shape: ModelShape) -> WeightCounts:
    """One extra prediction layer (arXiv:2412.19437, section 2.2): two norms, the projection 2h -> h
    , a layer and a final norm; embedding and head are those of the model."""
    found = layer_weights(shape, shape.mtp_kind.moe)
    found = found.plus(norm_weights(shape).times(3))
    return found.plus(WeightCounts(replicated=2 * shape.hidden_size**2))


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Numbers of parameters of a whole model. `total` has no extra prediction layers (`mtp`).

    `active` are those that one token is multiplied with, embedding and head included;
    `active_without_embeddings` leaves those two out. `experts` are all routed experts,
    `selection_bias` is a buffer and in no sum.
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
    layers, moe = shape.num_layers, shape.num_moe_layers
    expert, norm = expert_weights(shape).total, norm_weights(shape).total
    table = shape.vocab_size * shape.hidden_size
    parts = {
        "embedding": embedding_weights(shape).total,
        "head": head_weights(shape).total - norm * shape.final_norm,
        "attention": layers * attention_weights(shape).total,
        "dense_mlp": (layers - moe) * mlp_weights(shape, shape.intermediate_size).total,
        "experts": moe * shape.num_experts * expert,
        "shared_experts": moe * _shared_weights(shape).total,
        "router": moe * router_weights(shape).total,
        "norms": (layers * shape.norms_per_layer + shape.final_norm) * norm,
    }
    total = sum(parts.values())
    active = total - moe * (shape.num_experts - shape.experts_per_token) * expert
    return Parameters(
        total=total,
        active=active,
        active_without_embeddings=active - table * (1 if shape.tied_embeddings else 2),
        mtp=shape.num_mtp_layers * mtp_weights(shape).total if shape.num_mtp_layers else 0,
        selection_bias=moe * shape.num_experts if shape.router_selection_bias else 0,
        **parts,
    )


def kind_weights(
    shape: ModelShape, kinds: dict[LayerKind, int], *, whole_output: bool = False
) -> WeightCounts:
    """Parameters of so many layers of each kind."""
    found = WeightCounts()
    for kind, number in kinds.items():
        found = found.plus(layer_weights(shape, kind.moe, whole_output).times(number))
    return found
