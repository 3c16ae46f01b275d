"""Every parameter tensor of our own model: its name, logical shape, shards and gradient sum.

The order is that of the model's own list of parameters. It mirrors `moemesh.parallel.placement`
without torch; tests hold the two together.

| parameter | sharded over | gradient summed over |
|---|---|---|
| QKV, row-parallel W_o, dense and shared MLP, vocabulary rows | tp | dp_cp |
| norms, router, whole W_o behind the all_to_all exit | - | stage (dp, cp, tp) |
| routed experts | ep, etp | edp |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from moemesh.config.buckets import Bucket, Member, buckets
from moemesh.config.context import context_sizes
from moemesh.config.layout import Layout, shard_range, shard_sizes
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.config.stages import cut_layers
from moemesh.schedule.action import Schedule
from moemesh.schedule.build import build_step
from moemesh.schedule.slicing import slice_lengths


@dataclass(frozen=True, kw_only=True)
class ParameterTensor:
    """One parameter. `shards`: axis -> sharded dim; `layer` -1 stands for the ends of the model."""

    name: str
    shape: tuple[int, ...]
    shards: dict[str, int] = field(default_factory=dict[str, int])
    summed_over: str = "stage"

    @property
    def is_expert(self) -> bool:
        return self.summed_over == "edp"

    def weight_bytes(self, element_bytes: int) -> int:
        """Bytes of a number of this weight in a model of `element_bytes`: routers stay in fp32."""
        return max(element_bytes, 4) if ".router." in self.name else element_bytes

    def local_elements(self, layout: Layout, rank: int) -> int:
        """Numbers of this tensor that `rank` holds."""
        at, sizes = layout.coordinates(rank), list(self.shape)
        for axis, dim in self.shards.items():
            degree = int(getattr(layout, axis))
            sizes[dim] = shard_sizes(sizes[dim], degree)[at[axis]]
        return prod(sizes)


def tensors(model: ModelConfig, plan: Plan) -> Iterator[ParameterTensor]:
    """Every parameter of the whole model, in the order of the model's list."""
    hidden, table = model.hidden_size, (model.vocab_size, model.hidden_size)
    rows = {"shards": {"tp": 0}, "summed_over": "dp_cp"}
    yield ParameterTensor(name="embedding.weight", shape=table, **rows)  # type: ignore[arg-type]
    for index in range(model.num_layers):
        yield from _layer(model, plan, index)
    yield ParameterTensor(name="norm.weight", shape=(hidden,))
    if not model.tied_embeddings:
        yield ParameterTensor(name="head.weight", shape=table, **rows)  # type: ignore[arg-type]


def _layer(model: ModelConfig, plan: Plan, index: int) -> Iterator[ParameterTensor]:
    hidden, head = model.hidden_size, model.head_dim
    prefix = f"layers.{index}"
    yield ParameterTensor(name=f"{prefix}.attention_norm.weight", shape=(hidden,))
    heads = (model.num_kv_heads, model.num_heads // model.num_kv_heads + 2, head, hidden)
    yield ParameterTensor(
        name=f"{prefix}.attention.qkv", shape=heads, shards={"tp": 0}, summed_over="dp_cp"
    )
    output = (hidden, model.num_heads * head)
    name = f"{prefix}.attention.output"
    if plan.attention_exit == "all_to_all":
        yield ParameterTensor(name=name, shape=output)
    else:
        yield ParameterTensor(name=name, shape=output, shards={"tp": 1}, summed_over="dp_cp")
    if model.qk_norm:
        for which in ("query", "key"):
            yield ParameterTensor(name=f"{prefix}.attention.{which}_norm.weight", shape=(head,))
    yield ParameterTensor(name=f"{prefix}.feed_forward_norm.weight", shape=(hidden,))
    prefix += ".feed_forward"
    if not model.is_moe_layer(index):
        yield from _mlp(prefix, hidden, model.intermediate_size)
        return
    experts, width = model.num_experts, model.expert_intermediate_size
    yield ParameterTensor(name=f"{prefix}.router.weight", shape=(experts, hidden))
    if model.router_logit_bias:
        yield ParameterTensor(name=f"{prefix}.router.bias", shape=(experts,))
    shards = {"ep": 0, "etp": 2}
    yield ParameterTensor(
        name=f"{prefix}.experts.gate_up",
        shape=(experts, 2, width, hidden),
        shards=shards,
        summed_over="edp",
    )
    yield ParameterTensor(
        name=f"{prefix}.experts.down",
        shape=(experts, hidden, width),
        shards=shards,
        summed_over="edp",
    )
    if model.shared_width:
        yield from _mlp(f"{prefix}.shared", hidden, model.shared_width)


def _mlp(prefix: str, hidden: int, width: int) -> Iterator[ParameterTensor]:
    for leaf, shape in (("gate_up", (2, width, hidden)), ("down", (hidden, width))):
        yield ParameterTensor(
            name=f"{prefix}.{leaf}", shape=shape, shards={"tp": 1}, summed_over="dp_cp"
        )


class StagePlacement:
    """Which parameters each pipeline rank holds, under the schedule that the plan names: of one
    step, also where steps follow each other without a pause.

    Raises ValueError, with the numbers, when there is no such schedule or cut.
    """

    def __init__(self, model: ModelConfig, plan: Plan, seq_len: int = 0) -> None:
        self.model, self.plan, self.seq_len = model, plan, seq_len
        self.schedule: Schedule = build_step(plan, model, seq_len)
        self.layers = cut_layers(model, self.schedule.num_stages, plan.layers_per_stage)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each slice of a sequence; the whole of it where a schedule does not cut it."""
        if self.schedule.num_slices == 1:
            return (self.seq_len,)
        # Frozen pydantic models are hashable, which their types do not say.
        return slice_lengths(self.model, self.plan, self.seq_len)  # pyright: ignore[reportArgumentType]

    def sequences(self, global_batch: int, dp: int, microbatch: int) -> int:
        """Sequences of one microbatch of one data-parallel rank."""
        own = len(shard_range(global_batch, self.plan.dp, dp))
        return len(shard_range(own, self.plan.microbatches, microbatch))

    def positions(self, cp: int, slice: int = 0) -> int:
        """Positions of a sequence that a context-parallel rank holds, in one slice of it."""
        if self.plan.cp == 1:
            return self.lengths[slice]
        return context_sizes(self.seq_len, self.plan.cp)[cp]

    def stages(self, pp_rank: int) -> list[int]:
        """The stages that a pipeline rank runs, of whatever pipe, each once."""
        return sorted({stage for _, stage in self.schedule.stages_of(pp_rank)})

    def holds(self, tensor: ParameterTensor, pp_rank: int) -> bool:
        """Whether a pipeline rank holds `tensor` (a slice of it)."""
        return bool(self.users(tensor, pp_rank))

    def users(self, tensor: ParameterTensor, pp_rank: int) -> tuple[int, ...]:
        """The stages of a pipeline rank that use `tensor`."""
        last = self.schedule.num_stages - 1
        owner, _, rest = tensor.name.partition(".")
        if owner == "layers":
            index = int(rest.partition(".")[0])
            users = {stage for stage, layers in enumerate(self.layers) if index in layers}
        elif owner == "embedding":
            users = {0, last} if self.model.tied_embeddings else {0}
        else:
            users = {last}
        return tuple(stage for stage in self.stages(pp_rank) if stage in users)

    def every_tensor(self) -> list[ParameterTensor]:
        """The parameters of the whole model."""
        return list(tensors(self.model, self.plan))

    def held(self, pp_rank: int) -> list[ParameterTensor]:
        """The parameters of one pipeline rank, in the model's order."""
        return [found for found in tensors(self.model, self.plan) if self.holds(found, pp_rank)]


def data_buckets(
    placement: StagePlacement, layout: Layout, rank: int, element_bytes: int
) -> tuple[Bucket, ...]:
    """The buckets of one rank of a model whose weights have `element_bytes` a number."""
    pp_rank = layout.coordinates(rank)["pp"]
    members: list[Member] = []
    for tensor in placement.held(pp_rank):
        holders = sum(placement.holds(tensor, other) for other in range(layout.pp))
        members.append(
            Member(
                name=tensor.name,
                numbers=tensor.local_elements(layout, rank),
                weight_bytes=tensor.weight_bytes(element_bytes),
                axis=tensor.summed_over,
                mirrored=holders > 1,
                stages=placement.users(tensor, pp_rank),
            )
        )
    return buckets(members, placement.plan.data)
