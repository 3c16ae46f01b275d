"""Exact parameter counts, by part and by how a layout may cut them.

| part | count (h hidden, a heads, d head size, f width, E experts) |
|---|---|
| attention, GQA | h a d + 2 h h_kv + a d h; biases a d + 2 h_kv and h; QK-norm 2 d |
| attention, MLA | h r_q + r_q a (d_n + d_r) + h (r_kv + d_r) + r_kv a (d_n + d_v) + a d_v h |
| MLP | 2 h f (GELU), 3 h f (SwiGLU) |
| MoE layer | E times one expert + the shared MLP + h E |
| norms | 2 h a layer, h at the end |
| embedding, head | V h each, once when tied |

MLA adds the scales of its two low-rank norms, r_q + r_kv. Source: the models' papers and released
configurations; the GPT closed form 12 L h^2 (1 + 13/(12 h) + (V + s)/(12 L h)) is arXiv:2104.04473,
equation 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from moemesh.planner.shapes.shape import NORM_WEIGHTS, LayerKind, ModelShape


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
    hidden, output = shape.hidden_size, shape.hidden_size * shape.output_width
    sharded, replicated = (0, output) if whole_output else (output, 0)
    if shape.attention == "mla":
        query, latent = shape.q_lora_rank, shape.kv_lora_rank
        sharded += (query or hidden) * shape.query_width
        sharded += latent * shape.num_heads * (shape.qk_nope_head_dim + shape.v_head_dim)
        replicated += hidden * (query + latent + shape.qk_rotary_head_dim) + query + latent
        if shape.qkv_bias:
            # As in the released code: on the two projections down to the low ranks.
            replicated += query + latent + shape.qk_rotary_head_dim
    else:
        widths = shape.query_width * (2 if shape.attention_gate else 1) + 2 * shape.kv_width
        sharded += (hidden + shape.qkv_bias) * widths
    replicated += hidden * shape.output_bias
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
    inputs, hidden, width = (
        2 if shape.gated else 1,
        shape.hidden_size,
        shape.expert_intermediate_size,
    )
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
