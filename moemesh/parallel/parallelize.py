"""The hub: the only file that sees model, plan and mesh together. It works in a fixed order.

1. token shards and block boundaries (tensor and sequence parallelism)
2. vocabulary shards
3. dispatchers (expert parallelism)
4. parameter placements, local shards and their initial values
5. gradient reducer (data parallelism)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moemesh.comm.mesh import Mesh
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.model.attention import Attention
from moemesh.model.dispatcher import Dispatcher, LocalDispatcher
from moemesh.model.initialization import initialize
from moemesh.model.layers import MLP
from moemesh.model.moe import MoE
from moemesh.model.transformer import Transformer
from moemesh.parallel.data import GradientReducer
from moemesh.parallel.expert.all_gather import AllGatherDispatcher
from moemesh.parallel.expert.all_to_all import AllToAllDispatcher
from moemesh.parallel.expert.hierarchical import HierarchicalDispatcher
from moemesh.parallel.expert.payload import codec_of
from moemesh.parallel.placement import Placement, placements
from moemesh.parallel.tensor.boundary import ATTENTION_BOUNDARIES, ReduceScatterBoundary
from moemesh.parallel.tensor.tokens import ShardedTokens
from moemesh.parallel.tensor.vocabulary import ShardedVocabulary


@dataclass(frozen=True, kw_only=True)
class ParallelModel:
    """What one rank runs: the model with its seams set, where its parameters live, their sums."""

    model: Transformer
    mesh: Mesh
    placements: dict[str, Placement]
    reducer: GradientReducer


def parallelize(
    config: ModelConfig, plan: Plan, mesh: Mesh, *, seed: int, dtype: torch.dtype
) -> ParallelModel:
    """Build this rank's part of the model; on a mesh of one rank that is the plain model."""
    model = Transformer(config)
    if mesh["tp"].size > 1:
        set_boundaries(model, plan, mesh)
        model.vocabulary = ShardedVocabulary(mesh["tp"], config.vocab_size)
    exact = plan.combine == "exact"
    for moe in model.moe_layers().values():
        moe.dispatcher = make_dispatcher(config, plan, mesh)
        # The exact sums run over all rows of an expert: nothing to overlap between chunks.
        moe.num_chunks = 1 if exact else plan.dispatch_chunks
    where = placements(model, plan)
    initialize(
        model,
        seed=seed,
        dtype=dtype,
        device=mesh.device,
        slices=lambda name, shape: where[name].slices(mesh),
    )
    reducer = GradientReducer(
        [(name, parameter, where[name]) for name, parameter in model.named_parameters()],
        mesh,
        exact=exact,
    )
    return ParallelModel(model=model, mesh=mesh, placements=where, reducer=reducer)


def set_boundaries(model: Transformer, plan: Plan, mesh: Mesh) -> None:
    """Shard the residual stream over tp, and enter and leave every sharded block."""
    axis = mesh["tp"]
    model.tokens = ShardedTokens(axis)
    for module in model.modules():
        match module:
            case Attention():
                module.boundary = ATTENTION_BOUNDARIES[plan.attention_exit](axis, "attention")
            case MLP():
                module.boundary = ReduceScatterBoundary(axis, "mlp")
            case MoE():
                module.tokens = model.tokens
            case _:
                pass


def make_dispatcher(config: ModelConfig, plan: Plan, mesh: Mesh) -> Dispatcher:
    """`plan.dispatcher` by name; the plan has been checked.

    The exact combine needs the way home of an exchange, so there `all_to_all` stands in for the
    local dispatcher too: over an axis of one rank it sends nothing.
    """
    exact, ep, etp = plan.combine == "exact", mesh["ep"], mesh["etp"]
    codec = codec_of(plan.payload) if mesh["ep_etp"].size > 1 else None
    if mesh["ep_etp"].size == 1 and not exact:
        return LocalDispatcher(config.num_experts)
    match plan.dispatcher:
        case "all_gather" if mesh["ep_etp"].size > 1:
            return AllGatherDispatcher(
                ep, etp, mesh["ep_etp"], config.num_experts, exact=exact, codec=codec
            )
        case "hierarchical" if mesh["ep_etp"].size > 1:
            rail, node = mesh["ep_rail"], mesh["ep_node"]
            return HierarchicalDispatcher(
                ep, rail, node, etp, config.num_experts, exact=exact, codec=codec
            )
        case _:
            return AllToAllDispatcher(ep, etp, config.num_experts, exact=exact, codec=codec)
