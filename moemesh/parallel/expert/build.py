"""From `plan.dispatcher` to the dispatcher of every MoE layer: chosen, built, tested at start."""

from __future__ import annotations

import torch
from torch import Tensor

from moemesh.comm.mesh import Mesh
from moemesh.comm.overlap import Codec
from moemesh.config.layout import shard_range
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Payload, Plan
from moemesh.model.dispatcher import Dispatcher, LocalDispatcher
from moemesh.model.transformer import Transformer
from moemesh.ops.fp8 import dequantize, quantize
from moemesh.parallel.expert.all_gather import AllGatherDispatcher
from moemesh.parallel.expert.all_to_all import AllToAllDispatcher
from moemesh.parallel.expert.choose import CallSite, choose
from moemesh.parallel.expert.deepep import DeepEPDispatcher, connect
from moemesh.parallel.expert.exact import Exact, OwnerCounting
from moemesh.parallel.expert.hierarchical import HierarchicalDispatcher
from moemesh.parallel.expert.low_latency import (
    CAPACITY_FACTOR,
    LowLatencyDispatcher,
    slots_per_rank,
)
from moemesh.parallel.expert.overlapped import overlapped
from moemesh.parallel.expert.replicas import ReplicaDispatcher
from moemesh.parallel.expert.self_test import self_test
from moemesh.sharding.dispatchers import packed_bytes, rows_at_once, spare_rows

# Row formats on the wire: the dtype of the run, or 8-bit floats with block scales.


class Fp8Codec:
    """e4m3 values and one fp32 scale per 128 channels. Gradients pass straight through."""

    def encode(self, x_RH: Tensor) -> Tensor:
        return quantize(x_RH)

    def decode(self, packed: Tensor, hidden: int, dtype: torch.dtype) -> Tensor:
        return dequantize(packed, hidden, dtype)


def codec_of(payload: Payload) -> Codec | None:
    return Fp8Codec() if payload == "fp8" else None


#: Row width of the start-up self-test, for dispatchers without rules about it.
TEST_HIDDEN = 16
#: Low-latency slots are candidates for `auto` only where they cost less memory than this.
LOW_LATENCY_BYTES = 1 << 28


def set_experts(
    model: Transformer, plan: Plan, mesh: Mesh, *, dtype: torch.dtype, tokens_per_rank: int
) -> list[str]:
    """Give every MoE layer its dispatcher, chunks and memory bound; returns what `auto` decided."""
    config, notes = model.config, []
    if not config.num_moe_layers:
        return notes
    has_replicas = spreads_replicas(plan)
    if has_replicas and plan.dispatcher == "auto":
        plan = plan.model_copy(update={"dispatcher": "all_to_all"})
        notes.append("dispatcher auto: all_to_all (spare slots)")
    # Plans are objects of their own: all layers share one dispatcher.
    dispatcher, note = tested_dispatcher(
        config, plan, mesh, dtype=dtype, tokens_per_rank=tokens_per_rank
    )
    notes += note
    # The exact sums run over all rows of an expert: nothing to overlap between chunks.
    num_chunks = 1 if plan.combine == "exact" else plan.dispatch_chunks
    defers = num_chunks > 1 or mesh["ep_etp"].size > 1
    for moe in model.moe_layers().values():
        moe.dispatcher = dispatcher
        if mesh.world_size > 1 or num_chunks > 1:
            moe.runner = overlapped(num_chunks, defers=defers)
        moe.experts.max_rows = most_rows(config, plan, tokens_per_rank)
        etp = mesh["etp"]
        moe.experts.column = shard_range(config.hidden_size, etp.size, etp.index).start
        if has_replicas:
            moe.dispatcher = replicas = ReplicaDispatcher(
                mesh,
                moe.experts,
                config.num_experts,
                plan.spare_slots,
                policy=plan.spare_policy,
                codec=codec_of(plan.payload),
            )
            replicas.warm_up()
    return notes


def most_rows(config: ModelConfig, plan: Plan, tokens_per_rank: int) -> int:
    """The bound on the rows that a rank computes at once, for :class:`Experts`."""
    return rows_at_once(tokens_per_rank, config.experts_per_token, plan.etp)


def tested_dispatcher(
    config: ModelConfig, plan: Plan, mesh: Mesh, *, dtype: torch.dtype, tokens_per_rank: int
) -> tuple[Dispatcher, list[str]]:
    """The dispatcher of `plan`, self-tested, and a line that says what `auto` decided; every rank
    of the mesh calls this at the same point."""
    name, notes = plan.dispatcher, list[str]()
    if name == "auto":
        name, note = choose_dispatcher(config, plan, mesh, dtype, tokens_per_rank)
        notes.append(note)
    dispatcher = make_dispatcher(name, config, plan, mesh, tokens_per_rank)
    if mesh["ep_etp"].size > 1 and name != "all_to_all":
        self_test(
            dispatcher,
            mesh,
            config.num_experts,
            config.experts_per_token,
            name=name,
            hidden=config.hidden_size if name == "deepep" else TEST_HIDDEN,
            dtype=dtype if name == "deepep" else torch.float32,
        )
    return dispatcher, notes


def spreads_replicas(plan: Plan) -> bool:
    """Whether experts get replicas: there must be another rank to hold them."""
    return plan.spare_slots > 0 and plan.ep > 1


def make_dispatcher(
    name: str, config: ModelConfig, plan: Plan, mesh: Mesh, tokens_per_rank: int
) -> Dispatcher:
    """The dispatcher called `name` over the mesh's expert axes.

    The exact combine wraps a dispatcher that counts the owners of rows: there `all_to_all` stands
    in for the local one, and over an axis of one rank it sends nothing.
    """
    ep, etp, experts = mesh["ep"], mesh["etp"], config.num_experts
    exact = plan.combine == "exact"
    if mesh["ep_etp"].size == 1:
        alone = AllToAllDispatcher(ep, etp, experts)
        return Exact(alone, ep, etp) if exact else LocalDispatcher(experts)
    codec = codec_of(plan.payload)
    made: OwnerCounting
    match name:
        case "all_to_all":
            made = AllToAllDispatcher(ep, etp, experts, codec=codec)
        case "all_gather":
            host = mesh.host("ep_etp")
            spare = spare_rows(config.hidden_size, exact=exact)
            made = AllGatherDispatcher(
                ep, mesh["ep_etp"], experts, codec=codec, host=host, spare_rows=spare
            )
        case "hierarchical":
            rail, node = mesh["ep_rail"], mesh["ep_node"]
            made = HierarchicalDispatcher(ep, rail, node, etp, experts, codec=codec)
        case "low_latency":
            made = LowLatencyDispatcher(
                ep,
                etp,
                experts,
                experts_per_token=config.experts_per_token,
                max_tokens=tokens_per_rank,
                codec=codec,
            )
        case "deepep":
            assert not exact, "deepep sums results per rank before they return"
            return DeepEPDispatcher(ep, experts, connect(ep, config.hidden_size))
        case _:
            raise AssertionError(f"unchecked dispatcher {name}")
    return Exact(made, ep, etp) if exact else made


def choose_dispatcher(
    config: ModelConfig, plan: Plan, mesh: Mesh, dtype: torch.dtype, tokens_per_rank: int
) -> tuple[str, str]:
    """The name that `auto` stands for here, the same on every rank, and a line that says why."""
    if plan.ep == 1:
        return "all_to_all", "dispatcher auto: experts are not spread over ranks"
    result_bytes = config.hidden_size * dtype.itemsize
    capacity = slots_per_rank(
        tokens_per_rank, config.experts_per_token, config.num_experts, plan.ep, CAPACITY_FACTOR
    )
    site = CallSite(
        tokens=tokens_per_rank,
        experts_per_token=config.experts_per_token,
        num_experts=config.num_experts,
        row_bytes=packed_bytes(config.hidden_size) if plan.payload == "fp8" else result_bytes,
        result_bytes=result_bytes,
        ranks=plan.ep,
        ranks_per_node=mesh["ep_node"].size,
        capacity=capacity if capacity * plan.ep * result_bytes <= LOW_LATENCY_BYTES else 0,
    )
    name, seconds = choose(site, mesh)
    table = ", ".join(f"{key} {1e3 * value:.2f} ms" for key, value in sorted(seconds.items()))
    return name, f"dispatcher auto: {name} (predicted a layer: {table})"
