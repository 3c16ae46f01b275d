"""Costs of a token in each layer of a model of transformers, counted on the meta device.

The modelling code runs once at each of two lengths, so that what grows with the length of a
sequence is separated from what does not:

    FLOPs(S) = a S + b S^2,     bytes kept for the backward(S) = c S + d S^2

Attention on the meta device computes whole S x S scores, neither causal nor windowed; b is the cost
of one query and one key. The d S^2 bytes are those scores, which a fused kernel does not keep.
Experts compute T x K rows in one product, whatever the routing. The bytes that they keep are not
counted: our own experts compute in their place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.fx.experimental._config as _config
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel, masking_utils

from moemesh.model.hub.experts import is_experts, set_exchange

#: Multiples of the chunks in which linear attention is computed.
LENGTHS = (128, 256)


def count_costs(model: PreTrainedModel, layers: nn.ModuleList) -> dict[str, list[float]]:
    """Forward costs of a token of `model`, which is on the meta device in bfloat16.

    Per decoder layer: ``flops`` (a), ``flops_per_key`` (b), ``kept_bytes`` (c); ``ends``: the
    FLOPs of a token outside of the layers.
    """
    short = LENGTHS[0]
    (flops, kept, end), (long_flops, long_kept, long_end) = (
        _count(model, layers, length) for length in LENGTHS
    )
    quadratic = [_per_key(a, b) for a, b in zip(flops, long_flops, strict=True)]
    grown = [_per_key(a, b) for a, b in zip(kept, long_kept, strict=True)]
    return {
        "flops": [total / short - b * short for total, b in zip(flops, quadratic, strict=True)],
        "flops_per_key": quadratic,
        "kept_bytes": [total / short - d * short for total, d in zip(kept, grown, strict=True)],
        "ends": [end / short - _per_key(end, long_end) * short],
    }


def _per_key(at_short: float, at_long: float) -> float:
    """The coefficient of S^2; 0 where the count grows as S."""
    short, long = LENGTHS
    slope = (at_long / long - at_short / short) / (long - short)
    return slope if slope * long > 1e-6 * at_long / long else 0.0


def _count(
    model: PreTrainedModel, layers: nn.ModuleList, length: int
) -> tuple[list[float], list[float], float]:
    """FLOPs and kept bytes of each layer for one sequence, and FLOPs outside of the layers."""
    flops, kept = Counter[int](), Counter[int]()
    parameters = {id(parameter) for parameter in model.parameters()}
    seen: dict[int, Tensor] = {}
    current, in_experts = [-1], [False]

    def pack(tensor: Tensor) -> Tensor:
        base = tensor
        while base._base is not None:
            base = base._base
        if not in_experts[0] and id(base) not in parameters and id(base) not in seen:
            seen[id(base)] = base
            kept[current[0]] += base.numel() * base.element_size()
        return tensor

    def experts(module: nn.Module, *inputs: Tensor) -> Tensor:
        in_experts[0] = True
        y_TH = _even_experts(module, *inputs)
        in_experts[0] = False
        return y_TH

    def enter(index: int, *_: Any) -> None:
        flops[current[0]] += counter.get_total_flops() - sum(flops.values())
        current[0] = index

    for module in model.modules():
        if is_experts(module):
            set_exchange(module, partial(experts, module))
    hooks = [layer.register_forward_pre_hook(partial(enter, i)) for i, layer in enumerate(layers)]
    hooks += [layer.register_forward_hook(partial(enter, -1)) for layer in layers]
    ids = torch.zeros(1, length, dtype=torch.int64, device="meta")
    counter = FlopCounterMode(display=False)
    try:
        with unpacked_masks(), torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
            with counter:
                model(input_ids=ids, use_cache=False)
            enter(-1)
    finally:
        for hook in hooks:
            hook.remove()
    own = range(len(layers))
    return [float(flops[i]) for i in own], [float(kept[i]) for i in own], float(flops[-1])


@contextmanager
def unpacked_masks() -> Iterator[None]:
    """No search for packed documents: it reads numbers, which the meta device does not have."""
    before = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        with _config.patch(meta_nonzero_assume_all_nonzero=True):
            yield
    finally:
        masking_utils.find_packed_sequence_indices = before


def _even_experts(
    module: nn.Module, x_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """All rows through the first expert: the products of any routing, without its data."""
    experts = cast("Any", module)
    num_slots = experts_TK.shape[1]
    inputs = experts.gate_up_proj if experts.has_gate else experts.up_proj
    first, second = inputs[0], experts.down_proj[0]
    x_RH = x_TH.repeat_interleave(num_slots, 0)
    inner = x_RH @ (first if experts.is_transposed else first.T)
    if experts.has_bias:
        bias = experts.gate_up_proj_bias if experts.has_gate else experts.up_proj_bias
        inner = inner + bias[0]
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    y_RH = inner @ (second if experts.is_transposed else second.T)
    y_RH = y_RH * weights_TK.reshape(-1, 1).to(y_RH.dtype)
    return y_RH.unflatten(0, (-1, num_slots)).sum(1).to(x_TH.dtype)
