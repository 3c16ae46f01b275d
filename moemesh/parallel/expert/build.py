"""The dispatcher of every MoE layer of a plan: chosen, built and tested at start.

Legend: R rows at the experts, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pkgutil import resolve_name

import torch
from torch import Tensor
from torch.utils.checkpoint import _StopRecomputationError

from moemesh.comm.mesh import Mesh
from moemesh.config.dispatcher_table import DISPATCHERS
from moemesh.config.layout import shard_range, shard_sizes
from moemesh.config.model import ModelConfig
from moemesh.config.plan import Plan
from moemesh.model.dispatcher import DispatchedRows, Dispatcher, LocalDispatcher
from moemesh.model.experts import Experts
from moemesh.model.moe import ExpertExchange, RoutedTokens
from moemesh.model.seams import Flow
from moemesh.model.transformer import Transformer
from moemesh.ops.expert_mlp import defer
from moemesh.ops.pending import Pending
from moemesh.parallel.expert.all_to_all import AllToAllDispatcher
from moemesh.parallel.expert.choose import CallSite, choose
from moemesh.parallel.expert.exact import Exact
from moemesh.parallel.expert.replicas import ReplicaDispatcher
from moemesh.parallel.expert.self_test import self_test
from moemesh.parallel.expert.site import DispatcherSite, codec_of
from moemesh.sharding.dispatchers import packed_bytes, rows_at_once, slots_per_pair


def exchange_in_chunks(
    dispatcher: Dispatcher,
    flow: Flow,
    experts: Experts,
    tokens: RoutedTokens,
    *,
    meanwhile: Callable[[], Tensor] | None = None,
    is_complete: bool = False,
    num_chunks: int,
    defers: bool,
) -> tuple[Tensor, Tensor | None]:
    """An :class:`~moemesh.model.moe.ExpertExchange` in `num_chunks` chunks of tokens. It pauses
    after the first dispatch has started, and after all combines have. `defers`: weight gradients
    are computed after the gradients of tokens have been sent."""
    sizes = shard_sizes(len(tokens[0]), num_chunks)
    xs, weights, choices = (part.split(sizes) for part in tokens)
    # All plans are made before rows are sent: their exchanges would queue after the rows.
    plans = flow.once(dispatcher.plan_chunks, choices, is_complete=is_complete)
    rows, leaving = list[Pending[DispatchedRows]](), list[Pending[Tensor]]()
    try:
        rows += [flow.start(dispatcher.dispatch, xs[0], weights[0], plans[0])]
        waiting = [
            (flow.cut(x), flow.cut(weight), plan)
            for x, weight, plan in zip(xs[1:], weights[1:], plans[1:], strict=True)
        ]
        result = None if meanwhile is None else meanwhile()
        flow.pause()
        deferred = None
        for chunk, plan in enumerate(plans):
            # Each chunk is computed after the dispatch of the next one has started.
            rows += [dispatcher.dispatch(*following) for following in waiting[chunk : chunk + 1]]
            if deferred is None and defers:
                # Created between the start and the end of dispatches, so that these gradients are
                # computed while those of tokens travel back.
                deferred = defer(experts.weights)
            y_RH = experts(rows[chunk].wait(), deferred)
            leaving.append(flow.start(flow.unread, dispatcher.combine, y_RH, plan, sizes[chunk]))
        flow.pause()
        return torch.cat([pending.wait() for pending in leaving]), result
    except _StopRecomputationError:
        # torch.utils.checkpoint ends a recomputation, on all ranks at the same point, as soon as
        # it has the tensors that the backward reads. Exchanges may still be in flight.
        for pending in (*rows, *leaving):
            pending.abandon()
        raise


def overlapped(num_chunks: int = 1, *, defers: bool = True) -> ExpertExchange:
    """A value for :attr:`MoE.exchange`."""
    return partial(exchange_in_chunks, num_chunks=num_chunks, defers=defers)


#: Row width of the self-test at start, unless the dispatcher is `tested_as_trained`.
TEST_HIDDEN = 16
#: Largest buffer of fixed slots, in bytes, that `auto` considers.
SLOT_BYTES = 1 << 28


def set_experts(
    model: Transformer, plan: Plan, mesh: Mesh, *, dtype: torch.dtype, tokens_per_rank: int
) -> list[str]:
    """Set dispatcher, chunks and memory bound of every MoE layer; returns lines on decisions."""
    config, notes = model.config, []
    if not config.num_moe_layers:
        return notes
    if plan.spreads_replicas and plan.dispatcher == "auto":
        plan = plan.model_copy(update={"dispatcher": "all_to_all"})
        notes.append("dispatcher auto: all_to_all (spare slots)")
    # A dispatcher does not keep its plans: all layers share one.
    dispatcher, decisions = tested_dispatcher(
        config, plan, mesh, dtype=dtype, tokens_per_rank=tokens_per_rank
    )
    notes += decisions
    # Exact sums run over all rows of an expert, so chunks would have nothing to overlap.
    num_chunks = 1 if plan.combine == "exact" else plan.dispatch_chunks
    defers = num_chunks > 1 or mesh["ep_etp"].size > 1
    for moe in model.moe_layers().values():
        moe.dispatcher = dispatcher
        if mesh.world_size > 1 or num_chunks > 1:
            moe.exchange = overlapped(num_chunks, defers=defers and moe.experts.can_defer)
        moe.experts.max_rows = rows_at_once(tokens_per_rank, config.experts_per_token, plan.etp)
        etp = mesh["etp"]
        moe.experts.column = shard_range(config.hidden_size, etp.size, etp.index).start
        if plan.spreads_replicas:
            replicas = ReplicaDispatcher(mesh, moe.experts, config.num_experts, plan)
            moe.dispatcher = replicas
            replicas.warm_up()
    return notes


def tested_dispatcher(
    config: ModelConfig, plan: Plan, mesh: Mesh, *, dtype: torch.dtype, tokens_per_rank: int
) -> tuple[Dispatcher, list[str]]:
    """The dispatcher of `plan`, self-tested, and under `auto` a line with the decision; every rank
    of the mesh calls this at the same point."""
    name, notes = plan.dispatcher, list[str]()
    if name == "auto":
        name, note = choose_dispatcher(config, plan, mesh, dtype, tokens_per_rank)
        notes.append(note)
    dispatcher = make_dispatcher(name, config, plan, mesh, tokens_per_rank)
    # all_to_all is the reference of the test.
    if mesh["ep_etp"].size > 1 and name != "all_to_all":
        as_trained = DISPATCHERS[name].tested_as_trained
        self_test(
            dispatcher,
            mesh,
            config.num_experts,
            config.experts_per_token,
            name=name,
            hidden=config.hidden_size if as_trained else TEST_HIDDEN,
            dtype=dtype if as_trained else torch.float32,
            codec=codec_of(plan.payload),
        )
    return dispatcher, notes


def make_dispatcher(
    name: str, config: ModelConfig, plan: Plan, mesh: Mesh, tokens_per_rank: int
) -> Dispatcher:
    """The dispatcher called `name` over the mesh's expert axes. The exact combine wraps a
    dispatcher that counts the owners of rows. On one rank it wraps all_to_all in place of the local
    dispatcher, and nothing is sent."""
    ep, etp, row = mesh["ep"], mesh["etp"], DISPATCHERS[name]
    exact = plan.combine == "exact"
    if mesh["ep_etp"].size == 1:
        if not exact:
            return LocalDispatcher(config.num_experts)
        return Exact(AllToAllDispatcher(ep, etp, config.num_experts), ep, etp)
    dispatcher = resolve_name(row.make)(DispatcherSite(config, plan, mesh, tokens_per_rank))
    assert row.sums_exactly or not exact, f"{name} sums results per rank before they return"
    return Exact(dispatcher, ep, etp) if exact else dispatcher


def choose_dispatcher(
    config: ModelConfig, plan: Plan, mesh: Mesh, dtype: torch.dtype, tokens_per_rank: int
) -> tuple[str, str]:
    """The dispatcher that `auto` selects, the same on every rank, and a line with the reason."""
    if plan.ep == 1:
        return "all_to_all", "dispatcher auto: experts are not spread over ranks"
    result_bytes = config.hidden_size * dtype.itemsize
    capacity = slots_per_pair(
        tokens_per_rank, config.experts_per_token, config.num_experts, plan.ep
    )
    site = CallSite(
        tokens=tokens_per_rank,
        experts_per_token=config.experts_per_token,
        num_experts=config.num_experts,
        row_bytes=packed_bytes(config.hidden_size) if plan.payload == "fp8" else result_bytes,
        result_bytes=result_bytes,
        ranks=plan.ep,
        ranks_per_node=mesh["ep_node"].size,
        capacity=capacity if capacity * plan.ep * result_bytes <= SLOT_BYTES else 0,
        names=[
            name
            for name, row in DISPATCHERS.items()
            if (row.encodes or plan.payload == "same")
            and (row.sums_exactly or plan.combine == "fast")
        ],
    )
    name, seconds = choose(site, mesh)
    table = ", ".join(f"{key} {1e3 * value:.2f} ms" for key, value in sorted(seconds.items()))
    return name, f"dispatcher auto: {name} (predicted a layer: {table})"
