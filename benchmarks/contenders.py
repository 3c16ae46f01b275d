"""The things that are timed against each other: one step of a dispatcher, and its bounds.

Legend: T own tokens, K experts per token, R rows at this rank's experts, S rows sent, H hidden.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from moemesh.comm import transfers
from moemesh.comm.mesh import Axis
from moemesh.config.model import ModelConfig
from moemesh.model.dispatcher import DispatchedRows, Dispatcher, LocalDispatcher
from moemesh.model.experts import Experts
from moemesh.model.moe import ExpertExchange, MoE, plain_exchange
from moemesh.model.router import Routing
from moemesh.model.seams import PLAIN_FLOW
from moemesh.ops.permute import gather_rows, identity, permute
from moemesh.parallel.expert.build import overlapped


@dataclass(frozen=True, kw_only=True)
class Work:
    """One rank's share of one step: who goes where, and what the bounds need to know.

    ``x_TH`` are own tokens and ``gradient_TH`` what comes back for them; ``counts_L`` are the rows
    of each local expert; the splits are those of a copy per expert.
    """

    experts_TK: Tensor
    weights_TK: Tensor
    x_TH: Tensor
    gradient_TH: Tensor
    counts_L: Tensor
    input_splits: list[int]
    output_splits: list[int]


#: One timed step on this rank; what it returns is thrown away.
Step = Callable[[Work], object]


def make_layer(config: ModelConfig, num_ranks: int, rank: int, dtype: torch.dtype) -> MoE:
    """A mixture of experts that holds this rank's share of them; its router is not used."""
    with torch.device("meta"):
        layer = MoE(config)
    shape = (config.hidden_size, config.expert_intermediate_size)
    layer.experts = Experts(config.num_experts // num_ranks, *shape).to(dtype)
    generator = torch.Generator().manual_seed(rank)
    for parameter in layer.experts.parameters():
        nn.init.normal_(parameter, std=config.init_std, generator=generator)
    return layer


def dispatch_step(dispatcher: Dispatcher) -> Step:
    """plan, dispatch, copy the rows into expert order, combine; no gradient."""

    @torch.no_grad()
    def step(work: Work) -> Tensor:
        plan = dispatcher.plan(work.experts_TK)
        rows = dispatcher.dispatch(work.x_TH, work.weights_TK, plan).wait()
        return dispatcher.combine(gather_rows(rows.source_NH, rows.map), plan).wait()

    return step


def layer_step(
    layer: MoE, dispatcher: Dispatcher, *, num_chunks: int = 1, max_rows: int | None = None
) -> Step:
    """Forward and backward of the layer behind its router, all gradients included.

    `max_rows` bounds the rows that the experts compute on at once, as in training.
    """
    is_plain = isinstance(dispatcher, LocalDispatcher) and num_chunks == 1
    exchange: ExpertExchange = plain_exchange if is_plain else overlapped(num_chunks)

    def step(work: Work) -> None:
        layer.dispatcher, layer.exchange = dispatcher, exchange
        layer.experts.max_rows = max_rows
        layer.experts.zero_grad()
        x_TH = work.x_TH.detach().requires_grad_()
        routing = _given(work.experts_TK, work.weights_TK.detach().requires_grad_())
        apply_experts(layer, x_TH, routing).backward(work.gradient_TH)

    return step


def apply_experts(layer: MoE, x_TH: Tensor, routing: Routing) -> Tensor:
    """The layer behind its router, without shared experts."""
    tokens = x_TH, routing.weights_TK, routing.experts_TK
    return layer.exchange(layer.dispatcher, PLAIN_FLOW, layer.experts, tokens)[0]


def exchange_step(dispatcher: Dispatcher) -> Step:
    """plan, dispatch, combine and their backwards, with nothing to hide them under."""

    def step(work: Work) -> None:
        x_TH = work.x_TH.detach().requires_grad_()
        weights_TK = work.weights_TK.detach().requires_grad_()
        plan = dispatcher.plan(work.experts_TK)
        rows = dispatcher.dispatch(x_TH, weights_TK, plan).wait()
        y_TH = dispatcher.combine(permute(rows.source_NH, rows.map), plan).wait()
        nothing_R = torch.zeros_like(rows.weights_R)
        torch.autograd.backward([y_TH, rows.weights_R], [work.gradient_TH, nothing_R])

    return step


def _given(experts_TK: Tensor, weights_TK: Tensor) -> Routing:
    """A routing as the experts see it; what only balance losses look at is left empty."""
    nothing = weights_TK.new_zeros(0)
    return Routing(
        weights_TK=weights_TK,
        experts_TK=experts_TK,
        probabilities_TE=nothing,
        logits_TE=nothing,
        preferred_TK=experts_TK,
        num_dropped=nothing,
        fault=nothing,
    )


def bare_exchange_step(axis: Axis, num_exchanges: int) -> Step:
    """The rows of a copy per expert, there and back: nothing but the all-to-all."""

    def step(work: Work) -> None:
        sent, received = work.input_splits, work.output_splits
        hidden = work.x_TH.shape[1]
        rows = work.x_TH.new_empty(sum(sent), hidden)
        with axis.ledger.paused():
            for _ in range(num_exchanges // 2):
                there = transfers.all_to_all(
                    rows, axis, sent, received, phase="bound", caller="bench"
                )
                transfers.all_to_all(there, axis, received, sent, phase="bound", caller="bench")

    return step


def experts_step(layer: MoE) -> Step:
    """Forward and backward of the local experts on as many rows as arrive; nothing is sent."""

    def step(work: Work) -> None:
        num_rows = int(work.counts_L.sum())
        x_RH = work.x_TH.new_ones(num_rows, work.x_TH.shape[1]).requires_grad_()
        weights_R = torch.ones(num_rows, requires_grad=True)
        layer.experts.zero_grad()
        layer.experts.max_rows = None
        rows = DispatchedRows(x_RH, identity(num_rows, x_RH.device), weights_R, work.counts_L)
        y_RH = layer.experts(rows)
        y_RH.backward(torch.ones_like(y_RH))

    return step


def peak_bytes(run: Callable[[], object]) -> int:
    """The most tensor memory held at one time during `run`, over what was held before it."""
    gc.collect()
    with (
        quiet_profiler(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        run()
    assert profiler.profiler is not None
    results = profiler.profiler.kineto_results
    assert results is not None
    events = [event for event in results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@contextmanager
def quiet_profiler() -> Generator[None]:
    """Discard the lines that the profiler's library writes to stderr at its start and its end."""
    saved, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nothing)
