"""FLOPs of one token and of one step, in both conventions of attention.

One multiply-add is 2 FLOPs. Per token, forward:

    F = 2 (attention + active MLP + router parameters that multiply) + 2 h V
        + sum over layers of 2 s_eff a (d_qk + d_v)

s_eff is s in the *full* convention and s/2 in the *causal* one, as it is published (a query sees
(s + 1)/2 keys on average, itself included; nobody counts the half); a window caps what a token
sees. Training is 3 F (the backward costs two forwards). Hardware FLOPs add what is computed again.
Sources: arXiv:2104.04473 appendix, arXiv:2204.02311 appendix B, arXiv:2412.19437 (both rates).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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


def attention_matmul(shape: ModelShape) -> int:
    """Parameters of one attention block that multiply a token (no norms, no biases)."""
    hidden = shape.hidden_size
    output = shape.output_width * hidden
    if shape.attention == "gqa":
        gate = 2 if shape.attention_gate else 1
        return hidden * (gate * shape.query_width + 2 * shape.kv_width) + output
    query = (
        shape.q_lora_rank * (hidden + shape.query_width)
        if shape.q_lora_rank
        else hidden * shape.query_width
    )
    latent = shape.kv_lora_rank
    down = hidden * (latent + shape.qk_rotary_head_dim)
    return (
        query
        + down
        + latent * shape.num_heads * (shape.qk_nope_head_dim + shape.v_head_dim)
        + output
    )


def mlp_matmul(shape: ModelShape, moe: bool) -> int:
    """Parameters of one feed-forward block that multiply a token, the router among them."""
    matrices = (3 if shape.gated else 2) * shape.hidden_size
    if not moe:
        return matrices * shape.intermediate_size
    width = (
        shape.experts_per_token * shape.expert_intermediate_size + shape.shared_intermediate_size
    )
    gate = shape.hidden_size if shape.shared_gate else 0
    return matrices * width + shape.hidden_size * shape.num_experts + gate


def core_flops(shape: ModelShape, seq_len: int, window: int, convention: Convention) -> float:
    """Forward FLOPs of one token in one attention core (QK^T and PV)."""
    width = shape.num_heads * (shape.query_head_dim + shape.value_head_dim)
    return 2.0 * attended_tokens(seq_len, window, convention) * width


def layer_forward(
    shape: ModelShape, kind: LayerKind, seq_len: int, convention: Convention
) -> float:
    """Forward FLOPs of one token in one layer."""
    matmul = attention_matmul(shape) + mlp_matmul(shape, kind.moe)
    return 2.0 * matmul + core_flops(shape, seq_len, kind.window, convention)


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
    cores = sum(
        number * core_flops(shape, seq_len, kind.window, convention)
        for kind, number in shape.kind_counts.items()
    )
    layers = sum(
        number * layer_forward(shape, kind, seq_len, convention)
        for kind, number in shape.kind_counts.items()
    )
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
