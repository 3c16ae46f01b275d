"""Bytes of the key-value cache of a model that generates.

Per token: GQA 2 L h_kv w, MLA L (r_kv + d_r) w: the latent and the rotary key stand for all heads.
``4 b L h (s + n)`` is the multi-head 16-bit case.
"""

from __future__ import annotations

from moemesh.planner.shapes.shape import ModelShape


def kv_bytes_per_token(shape: ModelShape, element_bytes: float = 2) -> float:
    """Bytes that one more token of context costs while no window is full."""
    return shape.num_layers * _layer_bytes(shape) * element_bytes


def _layer_bytes(shape: ModelShape) -> int:
    """Numbers a layer keeps for a token."""
    if shape.attention == "mla":
        return shape.kv_lora_rank + shape.qk_rotary_head_dim
    return 2 * shape.num_kv_heads * shape.head_dim
