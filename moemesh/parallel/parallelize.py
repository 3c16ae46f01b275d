"""Build the model of one rank: the only file that combines model, plan and mesh.

The steps, in order:

1. the schedule, and the parts of the model that this rank's stages run (pipeline parallelism)
2. token shards, keys of other positions, block boundaries (sequence, context and tensor
   parallelism)
3. vocabulary shards
4. dispatchers (expert parallelism), and activation recomputation
5. parameter placements, local shards and their initial values, which of them train
6. gradient reducer (data parallelism), and the executor of the schedule
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from moemesh.comm.mesh import Mesh
from moemesh.config.errors import UserError
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.config.tuning import FULL, Tuning
from moemesh.model.attention import AttentionBlock
from moemesh.model.initialization import adapter_slice, initialize
from moemesh.model.layers import MLP
from moemesh.model.transformer import ModelPart, Transformer
from moemesh.parallel.context import CONTEXTS
from moemesh.parallel.data.buckets import GatheredBucket, GatheredWeights
from moemesh.parallel.data.reducer import GradientReducer
from moemesh.parallel.expert.build import set_experts
from moemesh.parallel.expert.homes import Homes
from moemesh.parallel.norm import Addends
from moemesh.parallel.pipeline.pipeline import Pipeline, holders, parts_of, stage_parts, stages_of
from moemesh.parallel.placement import Placement, placements
from moemesh.parallel.recompute import set_recompute
from moemesh.parallel.tensor import (
    ATTENTION_BOUNDARIES,
    ReduceScatterBoundary,
    ShardedTokens,
    ShardedVocabulary,
)
from moemesh.schedule.action import Schedule
from moemesh.schedule.plan_schedule import build_step
from moemesh.schedule.terapipe import slice_lengths
from moemesh.sharding.parameters import (
    first_stage,
    first_unit,
    places,
    units_without_backward,
)

# Chosen experts: in a layer where only some experts train, the others are stacks of their own.
#
# Legend: E experts of a layer.
#
# Every rank of ep puts its chosen experts first, in ``experts.gate_up`` and so on, the others after
# them in ``experts.rest``. The number of chosen experts may differ between ranks, and be 0.
# The router, losses, loads and checkpoints name experts by logical id, as with migrated experts
# (:mod:`moemesh.parallel.expert.homes`): ids become places right before the dispatcher.


def split_experts(model: Transformer, plan: Plan, tuning: Tuning, mesh: Mesh) -> None:
    """Split the local stacks of every layer in which only some experts train, after their
    initialization."""
    for layer, moe in model.moe_layers().items():
        chosen = tuning.chosen(model.config.expert_stacks(layer), model.config.num_experts)
        if chosen is None:
            continue
        shares = places(chosen, model.config.num_experts, plan.ep)
        order = [expert for trained, rest in shares for expert in (*trained, *rest)]
        # The inverse: logical id -> place.
        moe.place_E = torch.argsort(torch.tensor(order, device=mesh.device))
        trained, rest = shares[mesh["ep"].index]
        first = min((*trained, *rest))  # the lowest id on this rank: `split` counts from there
        moe.experts.split([e - first for e in trained], [e - first for e in rest])


@dataclass(frozen=True, kw_only=True)
class RankModel:
    """The model of one rank, built for its plan.

    `model` has the stages of this rank, `placements` the parameters of all ranks. `pipeline` runs
    its schedule. `notes`: lines on decisions, for the log. `has_replicas`: whether experts of any
    rank have replicas. `homes`: the places of migrated experts. `tuning`: the trained parameters.
    """

    model: Transformer
    mesh: Mesh
    placements: dict[str, Placement]
    reducer: GradientReducer
    pipeline: Pipeline
    notes: list[str]
    has_replicas: bool = False
    homes: Homes = field(default_factory=dict)
    tuning: Tuning = FULL
    #: Items of `homes` -> addends to the gradient norm with these homes; one entry at most.
    _addends: dict[tuple[tuple[int, tuple[int, ...]], ...], Addends] = field(
        default_factory=dict, init=False, repr=False
    )

    @property
    def trained(self) -> dict[str, Placement]:
        """Placements of the parameters that train."""
        return {name: held for name, held in self.placements.items() if held.trains}

    def norm_addends(self) -> Addends:
        """Gradients whose squares this rank adds to the norm; others after experts have moved."""
        homes = tuple(self.homes.items())
        if homes not in self._addends:
            self._addends.clear()
            self._addends[homes] = Addends.of(self.trained, self.reducer.owned, self.mesh)
        return self._addends[homes]

    def close(self) -> None:
        """Free what a dispatcher holds outside of torch; all ranks call it, at the end."""
        # All layers share one dispatcher, except with replicas, whose dispatchers hold nothing.
        for moe in list(self.model.moe_layers().values())[:1]:
            moe.dispatcher.close()


def parallelize(
    config: ModelConfig,
    plan: Plan,
    mesh: Mesh,
    *,
    seed: int,
    dtype: torch.dtype,
    tokens_per_rank: int,
    schedule: Schedule | None = None,
    tuning: Tuning = FULL,
) -> RankModel:
    """Build this rank's part of the model; on a mesh of one rank that is the plain model.

    `tokens_per_rank` (see :meth:`Plan.tokens_per_rank`) determines sizes that do not depend on the
    routing: the bound on expert memory, low-latency buffers, the choice of a dispatcher. `schedule`
    None: that of the plan. `tuning`: the parameters that train; others have no gradient and no
    state, and the backward ends where no earlier parameter trains. Raises ValueError, with the
    numbers, if plan and model do not fit.
    """
    schedule = schedule or build_step(plan, config)
    if plan.data == "zero3" and schedule.split_backwards:
        raise UserError(
            f"the schedule {schedule.name} defers weight gradients to a time when the weights that "
            "they read have been freed: it needs plan.data = zero2, zero1 or replicate"
        )
    parts = stage_parts(config, plan, schedule)
    first_trained = first_unit(tuning, config, plan)
    stage = first_stage(first_trained, [part.layers for part in parts])
    schedule = replace(schedule, first_trained_stage=stage)
    held = parts_of(schedule, parts, mesh["pp"].index)
    model = make_model(config, list(held.values()), dtype)
    model.without_backward = units_without_backward(first_trained, config)
    set_seams(model, plan, mesh)
    notes = set_experts(model, plan, mesh, dtype=dtype, tokens_per_rank=tokens_per_rank)
    set_recompute(model, plan, mesh.ledger)
    # The stacks of experts are still whole: `split_experts` cuts them after their initialization.
    fill(model, placements(config, plan), mesh, seed=seed, dtype=dtype)
    split_experts(model, plan, tuning, mesh)
    placement_of = placements(config, plan, holders(config, plan, schedule, parts), tuning)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(placement_of[name].trains)
    reducer = GradientReducer(
        [
            (name, parameter, placement_of[name])
            for name, parameter in model.named_parameters()
            if parameter.numel()
        ],
        mesh,
        data=plan.data,
        owners=plan.owners,
        exact=plan.combine == "exact",
        stages=stages_of(model, held),
    )
    if plan.data == "zero3":
        reducer.units = model.weights = GatheredWeights(
            [
                bucket
                for bucket in (*reducer.buckets, *reducer.frozen)
                if isinstance(bucket, GatheredBucket)
            ],
            held.values(),
            ahead=config.mtp_layers,
            tied=config.tied_embeddings,
            reshard=plan.reshard,
            without_backward=model.without_backward,
        )
    return RankModel(
        model=model,
        mesh=mesh,
        placements=placement_of,
        reducer=reducer,
        pipeline=Pipeline(
            schedule,
            held,
            model,
            reducer,
            mesh,
            partial(slice_lengths, config, plan),
            overlap_blocks=plan.overlap_blocks,
        ),
        notes=notes,
        has_replicas=plan.spreads_replicas,
        tuning=tuning,
    )


def make_model(config: ModelConfig, parts: Sequence[ModelPart], dtype: torch.dtype) -> Transformer:
    """The parts of the model on the meta device: ours, or that of transformers' code."""
    if config.architecture is None:
        return Transformer(config, parts)
    # Late: transformers takes seconds to import.
    from moemesh.model.hub.model import HubModel

    return HubModel(config, parts, dtype)


def fill(
    model: Transformer,
    where: Mapping[str, Placement],
    mesh: Mesh,
    *,
    seed: int,
    dtype: torch.dtype,
) -> None:
    """Allocate and initialize the local parameters. The weights of a model of transformers always
    come from a folder or a checkpoint: they are zero until then, unlike its adapters."""

    held = {name for name, _ in model.named_parameters()}

    def slices(name: str, shape: tuple[int, ...]) -> Sequence[range]:
        return where[name].slices(mesh)

    if model.config.architecture is None:
        initialize(
            model,
            seed=seed,
            dtype=dtype,
            device=mesh.device,
            slices=slices,
            is_packed=lambda name: where[name].is_packed,
        )
        return
    from moemesh.model.hub.build import allocate
    from moemesh.model.hub.model import HubModel

    assert isinstance(model, HubModel)
    allocate(
        model.net,
        dtype=dtype,
        device=mesh.device,
        slices=lambda name, shape: slices(name, shape) if name in held else None,
        is_packed=lambda name: name in held and where[name].is_packed,
    )
    for name, parameter in model.named_parameters():
        if name.endswith("_lora_A"):
            shape = where[name].shape
            value = adapter_slice(seed, name, shape, slices(name, shape))
            parameter.data.copy_(value)


def set_seams(model: Transformer, plan: Plan, mesh: Mesh) -> None:
    """Replace the seams of the model for cp and tp: the tokens of the residual stream, boundaries
    of blocks whose weights are sharded over tp, keys that other ranks hold, the vocabulary."""
    tp, cp = mesh["tp"], mesh["cp"]
    if mesh["stage"].size > 1:
        # Layers sum over the tokens of all ranks.
        model.tokens = ShardedTokens(mesh)
        for moe in model.moe_layers().values():
            moe.tokens = model.tokens
    for module in model.modules():
        if isinstance(module, AttentionBlock):
            if cp.size > 1:
                module.key_values = CONTEXTS[plan.context](cp)
            if tp.size > 1:
                module.boundary = ATTENTION_BOUNDARIES[plan.attention_exit](tp, "attention")
        elif isinstance(module, MLP) and tp.size > 1:
            module.boundary = ReduceScatterBoundary(tp, "mlp")
    if tp.size > 1:
        model.vocabulary = ShardedVocabulary(tp, model.config.vocab_size)
