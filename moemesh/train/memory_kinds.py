"""Kinds of activations: which module's tensors count as what in memory.json."""

from __future__ import annotations

from torch import nn

from moemesh.model.attention import Attention, LatentAttention
from moemesh.model.experts import Experts
from moemesh.model.layers import MLP, RMSNorm
from moemesh.model.moe import MoE
from moemesh.model.router import Router
from moemesh.model.transformer import Transformer
from moemesh.ops.saved import SavedForBackward

#: The innermost module that runs decides.
_KINDS: dict[type[nn.Module], str] = {
    Transformer: "stream",
    RMSNorm: "norms",
    Attention: "attention",
    LatentAttention: "attention",
    MLP: "mlp",
    MoE: "dispatch",
    Router: "router",
    Experts: "experts",
}


def measure_saved(model: Transformer) -> SavedForBackward:
    """A measurement of what `model` keeps for its backward, by kind
    (:data:`moemesh.trace.memory.ACTIVATION_KINDS`)."""
    kinds = {module: kind for module in model.modules() if (kind := _KINDS.get(type(module)))}
    # Norms of queries, keys and latents are parts of their attention.
    for block in [module for module, kind in kinds.items() if kind == "attention"]:
        for module in block.modules():
            kinds[module] = "attention"
    # Behind the last norm come head and loss.
    becomes = {} if model.norm is None else {model.norm: "head"}
    return SavedForBackward(model.parameters(), kinds, becomes)
