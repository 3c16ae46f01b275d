"""Costs of a token in each layer of a model of transformers, counted on the meta device.

The modelling code runs at each of two lengths S, which separates costs of a token from costs of a
pair of query and key:

    FLOPs(S) = a S + b S^2,     bytes kept for the backward(S) = c S + d S^2

Attention on the meta device computes whole S x S scores, neither causal nor windowed: b is the cost
of one query and one key. Where the code calls torch's fused attention, bytes of the fused kernel
are counted, and d has only scores that the code computes by itself. Experts compute T x K rows in
one product, for any routing. Bytes of plain SwiGLU experts are not counted: our own experts replace
them.

Legend: S positions, T tokens, K slots per token, R = T K rows, H hidden, B sequences, N heads, D
head size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.fx.experimental._config as _config
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedConfig, PreTrainedModel, masking_utils

from moemesh.model.hub.experts import is_experts, is_swiglu, set_exchange

#: Two lengths S, multiples of the chunks of linear attention.
LENGTHS = (128, 256)


def count_costs(model: PreTrainedModel, wide: PreTrainedModel, layers: str) -> dict[str, Any]:
    """Forward costs of a token of `model`, which is on the meta device in bfloat16; `wide` is the
    same model in float32, `layers` the name of the list of decoder layers.

    Lists by decoder layer: ``flops`` (a), ``flops_per_key`` (b), ``kept_bytes`` (c),
    ``kept_per_key`` (d), ``expert_bytes`` (kept by experts that the family's own code computes),
    the last three also of `wide` (``wide_...``). ``ends``: FLOPs of a token outside of layers.
    """
    short = LENGTHS[0]
    (flops, end), (long_flops, long_end) = (_flops(model, layers, length) for length in LENGTHS)
    quadratic = [_per_key(a, b) for a, b in zip(flops, long_flops, strict=True)]
    costs: dict[str, Any] = {
        "flops": [total / short - b * short for total, b in zip(flops, quadratic, strict=True)],
        "flops_per_key": quadratic,
        "ends": [end / short - _per_key(end, long_end) * short],
    }
    for prefix, variant in (("", model), ("wide_", wide)):
        (kept, experts), (long_kept, _) = (_kept(variant, layers, length) for length in LENGTHS)
        per_key = [_per_key(a, b) for a, b in zip(kept, long_kept, strict=True)]
        costs |= {
            f"{prefix}kept_bytes": [
                total / short - d * short for total, d in zip(kept, per_key, strict=True)
            ],
            f"{prefix}kept_per_key": per_key,
            f"{prefix}expert_bytes": [total / short for total in experts],
        }
    return costs


def _per_key(at_short: float, at_long: float) -> float:
    """The coefficient of S^2 in a count, from its values at LENGTHS; 0 if it grows as S."""
    short, long = LENGTHS
    slope = (at_long / long - at_short / short) / (long - short)
    return slope if slope * long > 1e-6 * at_long / long else 0.0


def _flops(model: PreTrainedModel, layers: str, length: int) -> tuple[list[float], float]:
    """FLOPs of each layer for one sequence, and FLOPs outside of the layers."""
    flops, current = Counter[int](), [-1]

    def enter(index: int) -> None:
        # The layer that ends here has computed all FLOPs since the last call.
        flops[current[0]] += counter.get_total_flops() - sum(flops.values())
        current[0] = index

    counter = FlopCounterMode(display=False)
    with counter:
        computed = _run(model, layers, length, enter, _even_experts)
    enter(-1)
    return [float(flops[index]) for index in computed], float(flops[-1])


def _kept(model: PreTrainedModel, layers: str, length: int) -> tuple[list[float], list[float]]:
    """Bytes that each layer keeps of one sequence for the backward: without its experts, and of its
    experts unless these are plain SwiGLU MLPs."""
    kept, of_experts = Counter[int](), Counter[int]()
    parameters = {id(parameter) for parameter in model.parameters()}
    #: Tensors that were counted; since they stay alive, no id is used twice.
    seen: dict[int, Tensor] = {}
    current, counts = [-1], [kept]

    def pack(tensor: Tensor) -> Tensor:
        base = tensor
        while base._base is not None:
            base = base._base
        if id(base) not in parameters and id(base) not in seen:
            seen[id(base)] = base
            counts[0][current[0]] += base.numel() * base.element_size()
        return tensor

    def enter(index: int) -> None:
        current[0] = index

    def experts(module: nn.Module, *inputs: Tensor) -> Tensor:
        counts[0] = Counter[int]() if is_swiglu(module) else of_experts
        y_TH = _even_experts(module, *inputs)
        counts[0] = kept
        return y_TH

    fused = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = _FusedAttention.of
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
            computed = _run(model, layers, length, enter, experts)
    finally:
        F.scaled_dot_product_attention = fused
    return [float(kept[i]) for i in computed], [float(of_experts[i]) for i in computed]


def _run(
    model: PreTrainedModel,
    layers: str,
    length: int,
    enter: Callable[[int], None],
    experts: Callable[..., Tensor],
) -> list[int]:
    """Run a forward of one sequence in which `experts` computes all experts. `enter` is called with
    the index of each layer before it, and with -1 after it.

    A layer with the costs of an earlier one is skipped. Returns for each layer the index of the
    computed one with its costs, or its own.
    """
    for module in model.modules():
        if is_experts(module):
            set_exchange(module, partial(experts, module))
    modules = list(model.get_submodule(layers).children())
    computed = list(range(len(modules)))
    known: dict[Any, list[tuple[int, Any]]] = {}
    with unpacked_masks(), ExitStack() as changes:
        for index, layer in enumerate(modules):
            kind = _kind(layer, index, model.config.get_text_config())
            layer.forward = partial(_once, layer.forward, kind, index, known, computed)  # type: ignore[method-assign]
            changes.callback(delattr, layer, "forward")
            before = layer.register_forward_pre_hook(lambda *_, index=index: enter(index))
            changes.enter_context(before)
            changes.enter_context(layer.register_forward_hook(lambda *_: enter(-1)))
        ids = torch.zeros(1, length, dtype=torch.int64, device="meta")
        model(input_ids=ids, use_cache=False)
    return computed


def _kind(layer: nn.Module, index: int, config: PreTrainedConfig) -> tuple[Any, ...]:
    """A key of layers with equal costs: modules with their sizes and settings, and the layer's
    entries in the lists of `config`."""
    settings: list[Any] = []
    for path, module in layer.named_modules():
        plain = [
            (name, value)
            for name, value in vars(module).items()
            if isinstance(value, (int, float, str, type(None))) and name != "layer_idx"
        ]
        sizes = [(name, p.shape, p.dtype) for name, p in module.named_parameters()]
        settings.append((path, type(module), plain, sizes))
    for name, value in vars(config).items():
        if isinstance(value, (list, tuple)):
            of_layer = value[index] if len(value) == config.num_hidden_layers else None
            settings.append((name, of_layer, index in value))
    return tuple(map(repr, settings))


def _once(
    forward: Callable[..., Any],
    kind: tuple[Any, ...],
    index: int,
    known: dict[Any, list[tuple[int, Any]]],
    computed: list[int],
    *inputs: Any,
    **named: Any,
) -> Any:
    """``forward(*inputs, **named)`` of the layer `index`; or, after two layers of this `kind` with
    inputs of these sizes, empty tensors of its results' sizes. Two: the first layer also saves
    tensors that all layers share. Layers with a dict or list among their inputs, which an earlier
    one may have filled, are always computed."""
    given = [*inputs, *named.values()]
    if any(isinstance(value, (dict, list)) for value in given):
        return forward(*inputs, **named)
    sizes = [
        (leaf.shape, leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else repr(leaf)
        for leaf in _pytree.tree_leaves(given)
    ]
    key = kind, tuple(named), *sizes
    if len(known.setdefault(key, [])) < 2:
        known[key].append((index, forward(*inputs, **named)))
        return known[key][-1][1]
    computed[index], result = known[key][-1]
    return _pytree.tree_map_only(
        Tensor, lambda x: torch.empty_like(x).requires_grad_(x.requires_grad), result
    )


class _FusedAttention(torch.autograd.Function):
    """Saves the tensors that a fused kernel does: queries, keys and values [B, N, S, D], the output
    (in memory [B, S, N, D]), and a log-sum-exp for each query. It computes nothing."""

    @staticmethod
    def of(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        return cast("Tensor", _FusedAttention.apply(query, key, value))

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        num_sequences, num_heads, length, _ = query.shape
        output = query.new_empty(num_sequences, length, num_heads, value.shape[-1])
        output = output.transpose(1, 2)
        wide = torch.promote_types(query.dtype, torch.float32)
        sums = query.new_empty(query.shape[:-1], dtype=wide)
        ctx.save_for_backward(query, key, value, output, sums)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        raise NotImplementedError("only saved tensors are counted, no backward runs")


class _Conditions(TorchFunctionMode):
    """Conditions on tensors without values are False inside of modules without parameters, such as
    RoPE of two ranges of positions: no branch of these decides which parameters are used."""

    depth = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.depth and func is Tensor.__bool__ and args[0].is_meta:
            return False
        return func(*args, **(kwargs or {}))

    def enter(self, module: nn.Module, *_: Any) -> None:
        self.depth += next(module.parameters(), None) is None

    def leave(self, module: nn.Module, *_: Any) -> None:
        self.depth -= next(module.parameters(), None) is None


@contextmanager
def unpacked_masks() -> Iterator[None]:
    """Context for tensors on the meta device, which lack values: without transformers' search for
    packed documents, with conditions that are False (:class:`_Conditions`), and with ``nonzero``
    that returns every place."""
    before = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    conditions = _Conditions()
    try:
        with (
            register_module_forward_pre_hook(conditions.enter),
            register_module_forward_hook(conditions.leave, always_call=True),
            _config.patch(meta_nonzero_assume_all_nonzero=True),
            conditions,
        ):
            yield
    finally:
        masking_utils.find_packed_sequence_indices = before


def _even_experts(
    module: nn.Module, x_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """All rows [T*K, H] through the first expert: products of the sizes of any routing."""
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
