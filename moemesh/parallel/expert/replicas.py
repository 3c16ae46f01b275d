"""Transient replicas: hot experts are computed on several ranks, by a plan for each microbatch.

Homes never move. After routing, all ranks of the ep*etp group share the exact counts and compute
the identical plan (:mod:`moemesh.balance`): which experts are copied to which spare slots, and how
many tokens each copy gets. Tokens then travel through an all-to-all dispatcher whose experts are
the *places* of all ranks: on each rank first the experts whose home it is, then B spare slots.

Legend: T own tokens, K slots per token, C chunks of tokens (or experts to send), E experts, L
experts of a rank, B spare slots, P = ep ranks, O = ep * etp owners of tokens, S own (token, slot)
pairs by expert (or replicas of this rank), N rows received, R the same rows by place, W weights of
an expert, F its width, H hidden.

| step | in | out | forward comm | backward comm |
|---|---|---|---|---|
| plan | experts T x K | places T x K | all_gather of counts, as all_to_all; all chunks | none |
| fetch | weights L x W | replicas x W | all_to_all over ep | all_to_all of gradients |
| dispatch, combine | | | as all_to_all | as all_to_all |

A replica is a function of its home's weights and nothing else: its gradient travels the way of the
weights back and is added to the home's, once, inside of the same backward. So the optimizer, the
norm, the sum over expert replicas (edp) and checkpoints have homes only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moemesh.balance import QuotaPlan, assign_tokens, plan_quotas, shadow_experts
from moemesh.balance.compiled import plain_loops
from moemesh.comm import collectives
from moemesh.comm.mesh import Mesh
from moemesh.comm.overlap import overlapped_all_to_all
from moemesh.config.plan import Plan
from moemesh.model.dispatcher import DispatchedRows, Dispatcher
from moemesh.model.experts import Experts
from moemesh.model.moe import MoE
from moemesh.model.transformer import Transformer
from moemesh.ops.expert_mlp import ExpertOptions
from moemesh.ops.expert_weights import ExpertWeights
from moemesh.ops.host_copy import HostCopy, upload
from moemesh.ops.pending import Pending
from moemesh.ops.permute import NoSecondDerivative, RowMap, SortedByExpert, slice_map
from moemesh.parallel.expert.all_to_all import AllToAllDispatcher, AllToAllPlan
from moemesh.parallel.expert.site import codec_of

Ints = NDArray[np.int64]

#: Largest product of experts and ranks that is planned in plain Python (0.5 ms at most).
LARGEST_UNCOMPILED = 64

#: Traffic of one replica in rows, divided by F: 3 H F weights and 3 H F gradients, over 4 H numbers
#: of a row (dispatch and combine, forward and backward).
SHADOW_ROWS = 3 * 2 / 4


@dataclass(frozen=True, kw_only=True)
class ReplicaPlan:
    """Replicas of one layer and microbatch, and the tokens of each; a recomputed forward uses the
    same plan.

    `quotas`: replicas and tokens of all ranks. `inner`: exchange of rows between places. `home`,
    `spare`: rows of this rank's home experts and of its replicas. `sent`: home experts to send, by
    receiver. `sent_splits`, `received_splits`: numbers of experts to and from each rank of ep.
    """

    quotas: QuotaPlan
    inner: AllToAllPlan
    home: RowMap
    spare: RowMap
    sent: list[int]
    sent_splits: list[int]
    received_splits: list[int]


class ReplicatedRows(NamedTuple):
    """:class:`~moemesh.model.dispatcher.ExpertRows`, with rows of replicas after those of home
    experts (``counts_L`` rows each). ``home`` and ``spare`` split the map of all rows; replicas
    have ``counts_S`` rows each, and ``weights`` are theirs, in flight, gate_up [S, 2, F, H] first.
    """

    source_NH: Tensor
    map: RowMap
    weights_R: Tensor
    counts_L: Tensor
    home: RowMap
    spare: RowMap
    counts_S: Tensor
    weights: Pending[tuple[Tensor, ...]]

    def compute(self, experts: ExpertWeights, **options: Unpack[ExpertOptions]) -> Tensor:
        home_R, spare_R = self.weights_R.split([self.home.num_rows, self.spare.num_rows])
        home_rows = DispatchedRows(self.source_NH, self.home, home_R, self.counts_L)
        y_RH = home_rows.compute(experts, **options)
        # Home experts first: meanwhile weights arrive, and in the backward their gradients leave.
        fetched = self.weights.wait()
        if not len(self.counts_S):
            return torch.cat([y_RH, _NoRows.apply(*fetched)])
        replicas = DispatchedRows(self.source_NH, self.spare, spare_R, self.counts_S)
        options["deferred"] = None
        return torch.cat([y_RH, replicas.compute(experts.of(fetched), **options)])


class _NoRows(torch.autograd.Function):
    """An empty result [0, H] of a rank without replicas, which keeps the exchange of weights in the
    graph: all ranks must take part in its backward."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, down: Tensor, *biases: Tensor) -> Tensor:
        # Saved so that a recomputation gets as far as waiting for the exchange.
        ctx.save_for_backward(gate_up, down, *biases)
        return gate_up.new_empty(0, down.shape[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.zeros_like(weight) for weight in ctx.saved_tensors)


class ReplicaDispatcher(Dispatcher):
    """The all-to-all dispatcher of one layer, with `plan.spare_slots` replicas on each rank of
    ep."""

    def __init__(self, mesh: Mesh, experts: Experts, num_experts: int, plan: Plan) -> None:
        self.ep, self.etp, self.group = mesh["ep"], mesh["etp"], mesh["ep_etp"]
        self.ranks_per_node = mesh["ep_node"].size
        self.experts, self.policy = experts, plan.spare_policy
        self.num_experts, self.spare_slots = num_experts, plan.spare_slots
        self.num_local = num_experts // self.ep.size
        self.num_places = self.num_local + self.spare_slots
        places = self.ep.size * self.num_places
        self.inner = AllToAllDispatcher(self.ep, self.etp, places, codec=codec_of(plan.payload))
        self._home = np.arange(num_experts, dtype=np.int64) // self.num_local
        #: Tokens that each rank of ep computed (int64 [P]) since the last :func:`take_rank_tokens`.
        self.rank_tokens = np.zeros(self.ep.size, np.int64)
        #: Seconds spent on planning replicas, quotas and places of tokens, without exchanges.
        self.planning_seconds = 0.0

    def plan_chunks(
        self, chunks: Sequence[Tensor], *, is_complete: bool = False
    ) -> list[ReplicaPlan]:
        sorted_chunks = [SortedByExpert(experts_TK, self.num_experts) for experts_TK in chunks]
        counts_CE = torch.stack([chunk.counts_E for chunk in sorted_chunks])
        counts_OCE = collectives.all_gather(counts_CE[None], self.group, caller="moe.counts")
        counted = HostCopy(counts_OCE).tensor()
        start = time.perf_counter()
        # On the host: the replicas of each chunk, and the place that computes each pair.
        quotas, places = list[QuotaPlan](), list[Tensor]()
        per_chunk = zip(chunks, sorted_chunks, counted.unbind(1), strict=True)
        for experts_TK, sorted_chunk, counts_OE in per_chunk:
            counts = counts_OE.numpy().reshape(self.ep.size, self.etp.size, self.num_experts)
            with self._loops():
                decided = in_fetched_order(self._quotas(counts.sum(axis=1)))
                place_S = own_places(
                    decided,
                    counts,
                    self.ep.index,
                    self.etp.index,
                    ranks_per_node=self.ranks_per_node,
                )
            self.rank_tokens += decided.rank_tokens
            quotas.append(decided)
            # QuotaPlan numbers all home places, then all spare slots. Dispatch needs numbers in
            # which the places of each rank follow one another.
            place = np.arange(len(decided.place_rank))
            spare = place - self.num_experts
            within = np.where(
                spare < 0, place % self.num_local, self.num_local + spare % max(self.spare_slots, 1)
            )
            place_S = (decided.place_rank * self.num_places + within)[place_S]
            places_TK = torch.full_like(experts_TK, -1)
            places_S = upload(torch.from_numpy(place_S), experts_TK.device)
            places_TK.view(-1).scatter_(0, sorted_chunk.order[: len(place_S)], places_S)
            places.append(places_TK)
        self.planning_seconds += time.perf_counter() - start
        # The exchange of rows between places, and that of the weights of replicas.
        plans: list[ReplicaPlan] = []
        first, own_rank = self.ep.index * self.num_local, self.ep.index
        for decided, inner in zip(quotas, self.inner.plan_chunks(places), strict=True):
            num_home, by_expert = sum(inner.rows_L[: self.num_local]), inner.by_expert
            # Home experts go to each rank in the order of its spare slots. A rank's slots are
            # ordered by home, so experts arrive in the order of the slots.
            in_slots = [[e for e in row if e >= 0] for row in decided.spare_expert.tolist()]
            sent = [
                [e - first for e in row if first <= e < first + self.num_local]  # by receiver
                for row in in_slots
            ]
            homes = self._home[in_slots[own_rank]] if in_slots[own_rank] else np.zeros(0, np.int64)
            plans.append(
                ReplicaPlan(
                    quotas=decided,
                    inner=inner,
                    home=slice_map(by_expert, 0, num_home),
                    spare=slice_map(by_expert, num_home, by_expert.num_rows),
                    sent=[e for row in sent for e in row],
                    sent_splits=[len(row) for row in sent],
                    received_splits=np.bincount(homes, minlength=self.ep.size).tolist(),
                )
            )
        return plans

    def _loops(self) -> AbstractContextManager[None]:
        """Context of the planner's loops: plain Python for small plans, which end before a compiler
        has loaded."""
        small = self.num_experts * self.ep.size <= LARGEST_UNCOMPILED
        return plain_loops() if small else nullcontext()

    def warm_up(self) -> None:
        """Load or compile the planner, so that the first step does not wait for it."""
        counts = np.ones((self.ep.size, self.num_experts), np.int64)
        counts[:, 0] = self.num_experts  # an uneven load, so that replicas are planned
        with self._loops():
            assign_tokens(self._quotas(counts), counts)

    def _quotas(self, counts_PE: Ints) -> QuotaPlan:
        """Replicas and quotas for these tokens of ranks and experts; every rank has `spare_slots`
        slots, unused ones with expert -1."""
        quotas = plan_quotas(counts_PE, self._home, 0)
        tokens = quotas.rank_tokens
        if int(tokens.max()) * len(tokens) * 50 <= int(tokens.sum()) * 51:
            pass  # within 2 % of the mean no replica pays
        elif self.policy == "quota":
            quotas = plan_quotas(counts_PE, self._home, self.spare_slots)
        else:
            quotas = shadow_experts(
                counts_PE,
                self._home,
                shadow_rows=SHADOW_ROWS * self.experts.down.shape[2] * self.etp.size,
                max_shadows=self.spare_slots,
            )
        unused = ((0, 0), (0, self.spare_slots - quotas.spare_expert.shape[1]))
        return replace(
            quotas,
            spare_expert=np.pad(quotas.spare_expert, unused, constant_values=-1),
            spare_quota=np.pad(quotas.spare_quota, unused),
        )

    def dispatch(
        self, x_TH: Tensor, weights_TK: Tensor, plan: ReplicaPlan
    ) -> Pending[DispatchedRows | ReplicatedRows]:
        fetched: Pending[tuple[Tensor, ...]] | None = None
        if plan.quotas.num_replicas:
            # The weights of local replicas: started before the rows, waited for after the rows of
            # home experts. Backward: the gradients of replicas go home.
            weights = self.experts.weights.tensors

            def unpack(flat_SW: Tensor) -> tuple[Tensor, ...]:
                parts = flat_SW.split([weight[0].numel() for weight in weights], dim=1)
                return tuple(
                    part.view(-1, *weight.shape[1:])
                    for part, weight in zip(parts, weights, strict=True)
                )

            fetched = overlapped_all_to_all(
                _Pack.apply(plan.sent, *weights),
                self.ep,
                plan.sent_splits,
                plan.received_splits,
                caller="moe.replicas",
            ).then(unpack)
        arriving = self.inner.dispatch(x_TH, weights_TK, plan.inner)

        def with_replicas(rows: DispatchedRows) -> DispatchedRows | ReplicatedRows:
            home_rows = rows._replace(counts_L=rows.counts_L[: self.num_local])
            if fetched is None:
                return home_rows
            stop = self.num_local + sum(plan.received_splits)
            counts_S = rows.counts_L[self.num_local : stop]
            return ReplicatedRows(*home_rows, plan.home, plan.spare, counts_S, fetched)

        return arriving.then(with_replicas)

    def combine(self, y_RH: Tensor, plan: ReplicaPlan) -> Pending[Tensor]:
        return self.inner.combine(y_RH, plan.inner)


def in_fetched_order(quotas: QuotaPlan) -> QuotaPlan:
    """The same plan with each rank's spare slots ordered by (home, expert), unused ones last."""
    expert, quota = quotas.spare_expert, quotas.spare_quota
    home = np.where(expert < 0, len(quotas.home), quotas.home[expert])
    order = np.lexsort((expert, home), axis=1)
    return replace(
        quotas,
        spare_expert=np.take_along_axis(expert, order, axis=1),
        spare_quota=np.take_along_axis(quota, order, axis=1),
    )


def own_places(
    quotas: QuotaPlan, counts: Ints, rank: int, lane: int, *, ranks_per_node: int = 1
) -> Ints:
    """Place of each (token, slot) pair of one owner, int64 [S], numbered as in
    `QuotaPlan.place_rank`; pairs are by expert, then by token.

    `counts` [P, etp, E]. A rank's pairs of an expert are cut into runs, one a place; its lanes
    share them in order.
    """
    # Pairs of the rank for each place; places by expert, without unused slots; where each run ends.
    sent = assign_tokens(quotas, counts.sum(axis=1), ranks_per_node=ranks_per_node)[rank]
    expert = quotas.place_expert
    order = np.argsort(expert, kind="stable")
    order = order[expert[order] >= 0]
    stops = np.cumsum(sent[order])
    # The pairs of a rank are ordered by expert, then by lane: those of this lane and expert e are
    # the begin[e]-th to the end[e]-th.
    ranks_counts = counts[rank].sum(axis=0)
    begin = np.cumsum(ranks_counts) - ranks_counts + counts[rank, :lane].sum(axis=0)
    end = begin + counts[rank, lane]
    first, last = begin[expert[order]], end[expert[order]]
    runs = np.clip(stops, first, last) - np.clip(stops - sent[order], first, last)
    return np.repeat(order, runs)


class _Pack(torch.autograd.Function):
    """Weights of `chosen` experts as rows [chosen, W]; an expert may occur several times. Backward:
    its gradients are added up."""

    @staticmethod
    def forward(ctx: Any, chosen: list[int], *weights: Tensor) -> Tensor:
        ctx.chosen, ctx.shapes = chosen, [weight.shape for weight in weights]
        widths = [weight[0].numel() for weight in weights]
        packed = weights[0].new_empty(len(chosen), sum(widths))
        for part, weight in zip(packed.split(widths, dim=1), weights, strict=True):
            for row, expert in zip(part, chosen, strict=True):
                row.copy_(weight[expert].flatten())
        return packed

    @staticmethod
    def backward(ctx: Any, grad_CW: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NoSecondDerivative
        if not ctx.chosen:
            return None, *(None for _ in ctx.shapes)
        wide = torch.promote_types(grad_CW.dtype, torch.float32)
        gradients = [grad_CW.new_zeros(shape, dtype=wide) for shape in ctx.shapes]
        widths = [gradient[0].numel() for gradient in gradients]
        for part, gradient in zip(grad_CW.split(widths, dim=1), gradients, strict=True):
            for row, expert in zip(part, ctx.chosen, strict=True):
                gradient[expert] += row.view_as(gradient[expert])
        return None, *gradients


def replicated(model: Transformer) -> list[MoE]:
    """MoE layers of this rank whose experts may have replicas."""
    return [m for m in model.moe_layers().values() if isinstance(m.dispatcher, ReplicaDispatcher)]


def take_rank_tokens(model: Transformer, mesh: Mesh) -> Tensor:
    """Tokens that each rank of ep has computed in every MoE layer of the whole model since the last
    call, int64 [layers, P]: this rank's addend to the sum over `stage` and `pp`."""
    layers = model.config.routed_layers
    tokens = torch.zeros(len(layers), mesh["ep"].size, dtype=torch.int64)
    for layer, moe in model.moe_layers().items():
        if isinstance(moe.dispatcher, ReplicaDispatcher):
            # All ranks of an ep*etp group count the same tokens: one of them adds them.
            if mesh["ep_etp"].index == 0:
                tokens[layers.index(layer)] = torch.from_numpy(moe.dispatcher.rank_tokens)
            moe.dispatcher.rank_tokens = np.zeros_like(moe.dispatcher.rank_tokens)
    return upload(tokens, mesh.device)
