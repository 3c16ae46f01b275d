"""Every parameter tensor of a model: its name, logical shape, shards and gradient sum.

The order is that of the model's own list of parameters; tests compare names and shapes. For models
of transformers it is that of their record (:mod:`moemesh.config.architecture`).

The residual stream is always token-sharded, so the local gradient of every parameter is *partial*
on every axis on which the parameter is replicated: the true gradient is the SUM over those axes.
From that one rule everything follows (no averaging, no factor):

| parameter | sharded over | gradient summed over |
|---|---|---|
| QKV, its bias, sinks, norms over all heads | tp | dp_cp |
| latents up to heads (MLA), row-parallel W_o | tp | dp_cp |
| dense and shared MLP, vocabulary rows | tp | dp_cp |
| other norms, router, shared gate, other biases | - | stage (dp, cp, tp) |
| down to latents (MLA), whole W_o after the all_to_all exit | - | stage (dp, cp, tp) |
| routed experts | ep, etp | edp |
| factors of adapters | as their weight, in the dims they have | see `config.lora` |
| weights of transformers other than experts | - | stage (dp, cp, tp) |

The second half of the module is about parameters that train (:mod:`moemesh.config.tuning`). The
units of the model, in the order of its forward, are the embedding, the layers, the head with its
norms, and extra prediction layers. The backward ends at the first unit in which anything trains
(:func:`first_unit`): units before it keep no activations, compute no gradient and send none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from math import prod

from moemesh.config.layout import EXPERT_AXES, Layout, shard_range
from moemesh.config.lora import factors_of, packed_bytes, parts_of
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.config.tuning import Tuning
from moemesh.sharding.buckets import unit_of


@dataclass(frozen=True, kw_only=True)
class ParameterTensor:
    """One parameter of logical `shape`. `shards`: axis -> sharded dim. `summed_over`: axis of the
    sum of its gradient. `trains`: whether any of it trains. `places`: logical ids of a stack's
    experts; None: in order. `per_rank`: number of experts on each rank of ep, for a stack of some
    experts of a layer. `is_packed`: its values are stored in NF4. `blocks`: equal blocks of the dim
    that etp shards; a rank holds its part of each. `recorded_unit`, `is_fp32`, `is_idle` and
    `blocks` are those of a :class:`~moemesh.config.architecture.ParameterRecord`."""

    name: str
    shape: tuple[int, ...]
    shards: dict[str, int] = field(default_factory=dict[str, int])
    summed_over: str = "stage"
    trains: bool = True
    places: tuple[int, ...] | None = None
    per_rank: tuple[int, ...] = ()
    recorded_unit: str = ""
    is_fp32: bool = False
    is_idle: bool = False
    blocks: int = 1
    is_packed: bool = False

    @property
    def unit(self) -> str:
        """The recorded unit, else the unit of the name."""
        return self.recorded_unit or unit_of(self.name)

    @property
    def is_expert(self) -> bool:
        return self.summed_over in EXPERT_AXES

    def trained_rows(self, tuning: Tuning) -> tuple[int, ...]:
        """The experts of a stack that train. For other parameters: (0,) if it trains, else ()."""
        if self.is_idle:
            return ()
        return tuning.rows(self.name, self.shape[0] if self.is_expert else 0)

    def weight_bytes(self, element_bytes: int) -> int:
        """Bytes of an element of this weight in a model of `element_bytes`: fp32 for our routers
        and for recorded weights with `is_fp32`, 1 for packed ones."""
        if self.is_packed:
            return 1
        is_fp32 = self.is_fp32 if self.recorded_unit else ".router." in self.name
        return max(element_bytes, 4) if is_fp32 else element_bytes

    def slices_at(self, layout: Layout, at: Mapping[str, int]) -> tuple[range, ...]:
        """The range of each dim that the rank with these coordinates holds. Ranges of experts are
        positions in the stack, not ids. For a sharded dim of several blocks only the length is
        right."""
        parts = [range(size) for size in self.shape]
        for axis, dim in self.shards.items():
            parts[dim] = shard_range(self.shape[dim], getattr(layout, axis), at[axis])
            if axis == "ep" and self.per_rank:
                first = sum(self.per_rank[: at[axis]])
                parts[dim] = range(first, first + self.per_rank[at[axis]])
        return tuple(parts)

    def local_elements(self, layout: Layout, at: Mapping[str, int]) -> int:
        """Elements held by the rank with these coordinates; bytes if the weight is packed."""
        sizes = [len(part) for part in self.slices_at(layout, at)]
        if self.is_packed:
            sizes[-1] = packed_bytes(sizes[-1])
        return prod(sizes)


def tensors(model: ModelConfig, plan: Plan) -> Iterator[ParameterTensor]:
    """Every parameter of the whole model, in the order of the model's list."""
    if model.architecture is not None:
        for record in model.architecture.parameters:
            # Stacks of experts are sharded over ep, and over etp where their width can be.
            shards = {"ep": 0} if record.is_expert else {}
            if record.cut is not None:
                shards["etp"] = record.cut
            yield ParameterTensor(
                name=record.name,
                shape=record.shape,
                shards=shards,
                summed_over="edp" if record.is_expert else "stage",
                recorded_unit=record.unit,
                is_fp32=record.is_fp32,
                is_idle=record.is_idle,
                blocks=record.blocks,
                is_packed=model.lora.is_packed and bool(record.parts),
            )
        return
    hidden = model.hidden_size
    parameters = [_over_tp("embedding.weight", model.vocab_size, hidden)]
    for index in range(model.num_layers):
        parameters += _layer(model, plan, index)
    for index in model.mtp_layers:
        prefix = f"layers.{index}"
        parameters.append(_whole(f"{prefix}.projection", hidden, 2 * hidden))
        parameters += _layer(model, plan, index)
        parameters.append(_whole(f"{prefix}.embedding_norm.weight", hidden))
        parameters.append(_whole(f"{prefix}.stream_norm.weight", hidden))
    parameters.append(_whole("norm.weight", hidden))
    parameters += [_whole(f"ahead_norms.{index}.weight", hidden) for index in model.mtp_layers]
    if not model.tied_embeddings:
        parameters.append(_over_tp("head.weight", model.vocab_size, hidden))
    for tensor in parameters:
        if model.lora.is_packed and parts_of(tensor.name.rpartition(".")[2], tensor.shape):
            tensor = replace(tensor, is_packed=True)
        yield tensor


def _whole(name: str, *shape: int) -> ParameterTensor:
    return ParameterTensor(name=name, shape=shape)


def _over_tp(name: str, *shape: int, dim: int = 0) -> ParameterTensor:
    return ParameterTensor(name=name, shape=shape, shards={"tp": dim}, summed_over="dp_cp")


def _layer(model: ModelConfig, plan: Plan, index: int) -> Iterator[ParameterTensor]:
    hidden, prefix = model.hidden_size, f"layers.{index}"
    yield _whole(f"{prefix}.attention_norm.weight", hidden)
    attention = [
        replace(tensor, name=f"{prefix}.attention.{tensor.name}")
        for tensor in attention_tensors(model, plan)
    ]
    norms = [tensor for tensor in attention if tensor.name.endswith("norm.weight")]
    weights = attention[: len(attention) - len(norms)]
    yield from (*weights, *_factors(model, weights), *norms)
    yield _whole(f"{prefix}.feed_forward_norm.weight", hidden)
    prefix += ".feed_forward"
    if not model.is_moe_layer(index):
        yield from _mlp(model, prefix, model.intermediate_size)
        return
    experts, width = model.num_experts, model.expert_intermediate_size
    if model.shared_gate:
        yield _whole(f"{prefix}.shared_gate", 1, hidden)
    yield _whole(f"{prefix}.router.weight", experts, hidden)
    if model.router_logit_bias:
        yield _whole(f"{prefix}.router.bias", experts)
    stacks = [
        ParameterTensor(
            name=f"{prefix}.experts.{leaf}",
            shape=(experts, *shape),
            shards={"ep": 0, "etp": dim},
            summed_over="edp",
        )
        for leaf, shape, dim in (
            ("gate_up", (2, width, hidden), 2),
            ("down", (hidden, width), 2),
            ("gate_up_bias", (2, width), 2),
            ("down_bias", (hidden,), 1),
        )
    ]
    yield from stacks if model.expert_bias else stacks[:2]
    yield from _factors(model, stacks[:2])
    if model.shared_width:
        yield from _mlp(model, f"{prefix}.shared", model.shared_width)


def attention_tensors(model: ModelConfig, plan: Plan) -> Iterator[ParameterTensor]:
    """The parameters of an attention block without adapters, named inside it, its norms last."""
    hidden, heads, keys = model.hidden_size, model.num_heads, model.num_kv_heads
    size, values = model.query_head_dim, model.value_head_dim
    rank, latent = model.q_lora_rank, model.kv_lora_rank
    is_latent = model.attention == "mla"
    if is_latent:
        down = latent + model.qk_rotary_head_dim  # the rotary part of the key skips the latent
        if rank:
            yield _whole("query_down", rank, hidden)
            if model.qkv_bias:
                yield _whole("query_down_bias", rank)
            yield _over_tp("query_up", heads, size, rank)
        else:
            yield _over_tp("query", heads, size, hidden)
        yield _whole("key_value_down", down, hidden)
        if model.qkv_bias:
            yield _whole("key_value_down_bias", down)
        yield _over_tp("key_value_up", heads, model.qk_nope_head_dim + values, latent)
    else:
        rows = heads // keys + 2  # of each key head: its query heads, key and value
        yield _over_tp("qkv", keys, rows, size, hidden)
        if model.qkv_bias:
            yield _over_tp("qkv_bias", keys * rows * size)
    if plan.attention_exit == "all_to_all":
        yield _whole("output", hidden, heads * values)
    else:
        yield _over_tp("output", hidden, heads * values, dim=1)
    if model.output_bias:
        yield _whole("output_bias", hidden)
    if model.attention_sinks:
        yield _over_tp("sinks", heads)
    if is_latent:
        if rank:
            yield _whole("query_latent_norm.weight", rank)
        yield _whole("key_value_latent_norm.weight", latent)
    elif model.qk_norm:
        for leaf, number in (("query_norm.weight", heads), ("key_norm.weight", keys)):
            over_head = model.qk_norm_over == "head"
            yield _whole(leaf, size) if over_head else _over_tp(leaf, number * size)


def _mlp(model: ModelConfig, prefix: str, width: int) -> Iterator[ParameterTensor]:
    weights = [
        _over_tp(f"{prefix}.gate_up", 2, width, model.hidden_size, dim=1),
        _over_tp(f"{prefix}.down", model.hidden_size, width, dim=1),
    ]
    yield from (*weights, *_factors(model, weights))


def _factors(model: ModelConfig, weights: list[ParameterTensor]) -> Iterator[ParameterTensor]:
    """The adapter parameters of a block's weights, which follow the weights in the model's list."""
    for weight in weights:
        block, _, leaf = weight.name.rpartition(".")
        sharding = (weight.shape, weight.shards, weight.summed_over)
        parts, is_stack = parts_of(leaf, weight.shape), weight.is_expert
        factors = factors_of(model.lora, parts, *sharding, is_stack=is_stack)
        for name, shape, shards, axis in factors:
            name = f"{block}.{name}"
            yield ParameterTensor(name=name, shape=shape, shards=shards, summed_over=axis)


def logical_names(model: ModelConfig, plan: Plan) -> Iterator[str]:
    """Names that patterns of ``train.freeze`` and ``train.train_only`` match: parameters, those of
    each expert apart, selection biases of routers and buffers."""
    for tensor in tensors(model, plan):
        module, _, leaf = tensor.name.rpartition(".")
        if tensor.is_expert:
            yield from (f"{module}.{expert}.{leaf}" for expert in range(tensor.shape[0]))
            continue
        yield tensor.name
        if tensor.name.endswith(".router.weight") and model.router_selection_bias:
            yield f"{module}.selection_bias"
    if model.architecture is not None:
        yield from model.architecture.buffers


def units(model: ModelConfig) -> list[str]:
    """Units (:func:`unit_of`) in forward order; a prediction layer includes the head."""
    layers = [f"layers.{index}" for index in range(model.num_layers)]
    return ["embedding", *layers, "head", *(f"layers.{index}" for index in model.mtp_layers)]


def places(chosen: Sequence[int], num_experts: int, ep: int) -> list[tuple[list[int], list[int]]]:
    """(experts in `chosen`, other experts) of each rank of ep, in ascending order."""
    return [
        ([id for id in ids if id in chosen], [id for id in ids if id not in chosen])
        for ids in (shard_range(num_experts, ep, index) for index in range(ep))
    ]


def tuned_tensors(model: ModelConfig, plan: Plan, tuning: Tuning) -> Iterator[ParameterTensor]:
    """The parameters of the whole model, in the order of its list, with `trains` set. If only some
    experts of a layer train, its stacks hold these, and the stacks of the others, under ``rest``,
    follow those of the layer."""
    #: Name of a stack -> its experts that train, for layers in which some do and others do not.
    chosen_of: dict[str, tuple[int, ...]] = {}
    for layer in model.routed_layers:
        stacks = model.expert_stacks(layer)
        if (experts := tuning.chosen(stacks, model.num_experts)) is not None:
            chosen_of |= dict.fromkeys(stacks, experts)
    frozen: list[ParameterTensor] = []
    for tensor in tensors(model, plan):
        module, _, leaf = tensor.name.rpartition(".")
        # After the last stack of a layer come the stacks of its frozen experts.
        if frozen and not tensor.name.startswith(frozen[0].name.partition("rest.")[0]):
            yield from frozen
            frozen = []
        chosen = chosen_of.get(tensor.name)
        if chosen is None:
            yield replace(tensor, trains=bool(tensor.trained_rows(tuning)))
            continue
        # Chosen experts, and others, by rank of ep.
        own, rest = (
            replace(
                tensor,
                shape=(sum(map(len, ids)), *tensor.shape[1:]),
                places=tuple(chain.from_iterable(ids)),
                per_rank=tuple(map(len, ids)),
            )
            for ids in zip(*places(chosen, tensor.shape[0], plan.ep), strict=True)
        )
        yield replace(own, trains=bool(tensor.trained_rows(tuning)))
        frozen.append(replace(rest, name=f"{module}.rest.{leaf}", trains=False))
    yield from frozen


def unit_orders(
    layers: Iterable[int], *, first: bool, last: bool, ahead: Iterable[int]
) -> list[list[str]]:
    """The units that the forward of a part of the model reads, in order; the `ahead` (extra
    prediction) layers of the last part each have an order of their own."""
    inner = [f"layers.{index}" for index in layers]
    orders = [["embedding"] * first + inner + ["head"] * last]
    if last:
        orders += [["embedding", f"layers.{index}", "head"] for index in ahead]
    return orders


def next_units(
    orders: Iterable[Sequence[str]], without_backward: Collection[str]
) -> dict[tuple[str, str], str]:
    """(phase, unit) -> the unit that always follows it, which ZeRO-3 gathers ahead of its use. No
    backward reads the embedding, or reaches the units `without_backward`."""
    following: dict[tuple[str, str], set[str]] = {}
    for before, after in chain.from_iterable(map(pairwise, orders)):
        following.setdefault(("forward", before), set()).add(after)
        if before != "embedding" and before not in without_backward:
            following.setdefault(("backward", after), set()).add(before)
    return {key: units.pop() for key, units in following.items() if len(units) == 1}


def units_without_backward(first: str, model: ModelConfig) -> frozenset[str]:
    """The units before `first`, at whose input the backward ends."""
    order = units(model)
    return frozenset(order[: order.index(first)])


def first_unit(tuning: Tuning, model: ModelConfig, plan: Plan) -> str:
    """The first unit in which any parameter trains; the last unit if none does."""
    if tuning.is_full:
        return "embedding"
    trained = {tensor.unit for tensor in tensors(model, plan) if tensor.trained_rows(tuning)}
    return next((unit for unit in units(model) if unit in trained), units(model)[-1])


def first_stage(unit: str, layers: Sequence[range]) -> int:
    """Index of the stage with `unit`; `layers` are those of each stage. Extra prediction layers are
    in the last one."""
    last = len(layers) - 1
    if unit == "embedding":
        return 0
    if unit == "head":
        return last
    index = int(unit.partition(".")[2])
    return next((stage for stage, part in enumerate(layers) if index in part), last)


def num_trained(tuning: Tuning, model: ModelConfig, plan: Plan) -> int:
    """Number of elements of the whole model that train."""
    total = 0
    for tensor in tensors(model, plan):
        rows = tensor.shape[0] if tensor.is_expert else 1
        total += prod(tensor.shape) * len(tensor.trained_rows(tuning)) // rows
    return total
