"""Closed forms of the large collectives of one step: number of events and bytes.

They cover every :class:`PlannedLayout`, including those of other trainers, and count one GPU of one
pipeline rank. Left out are counts, ids and weights of dispatches, loads, norms and reports.

Degrees: t, c, e, x of tp, cp, ep, etp. Tokens: u = b s / c of a microbatch, with b sequences of s
positions; m microbatches, v stages of a rank. Widths: h hidden, V vocabulary, h_q, h_k, h_v, h_o
queries, keys, values and results of all heads; of MLA r_q and r_kv, the compressed queries and the
compressed keys and values, and d_r, the rotary key. k experts of a token, w bytes of an element, g
of a gradient, N ranks that hold the same weights, Psi parameters of a rank. "1 + 1" events are one
in the forward and one in the backward.

"wire" bytes are sent by the GPU in one event (ring collectives, direct exchanges); "payload" is the
full tensor. With parameter servers the GPU is one of them, which also receives (N-1)/S g Psi of
gradients.

| what | wire bytes of an event | events a step |
|---|---|---|
| TP | all-reduce 2 (t-1)/t u h w | 2 a block and microbatch; 3 with full recomputation |
| TP + SP | all-gather or reduce-scatter (t-1)/t u h w | 4 a block and microbatch; 6 recomputed; |
| | | 1 more if the input is re-gathered |
| entry of MLA | the same, r_q (without it h) + r_kv + d_r wide | as TP + SP |
| exit all_to_all | (t-1)/t^2 u h_o w | 1 + 1 an attention and microbatch |
| CP ring: keys, values | 1/c s b (h_k + h_v) w / t | (c-1) + (c-1) a layer and microbatch |
| CP ring: gradients | 1/c s b (h_k + h_v) max(w, 4) / t | c-1 a layer and microbatch |
| CP all_gather | (c-1)/c s b (h_k + h_v) w / t gathered, | 1 + 1 a layer and microbatch, |
| | as much of dK and dV scattered | 1 |
| CP all_to_all: heads | (c-1)/c u (h_q + r (h_k + h_v)) w / t, | 1 + 1 a layer and microbatch |
| | r ranks on average receive a key/value head | |
| CP all_to_all: results | (c-1)/c u h_o w / t | 1 + 1 a layer and microbatch |
| PP | u h w, / t with SP | 2 v m from an inner rank |
| EP | (e-1)/e k (u/t) h w; fp8 dispatch 1 + 4/128 bytes | 4 an MoE layer and microbatch, 6 rec. |
| ETP | (x-1) k (u/t) h w | as EP |
| data, ZeRO 0 | all-reduce 2 (N-1)/N g Psi | 1 |
| ZeRO 1, 2 | (N-1)/N g Psi scattered, (N-1)/N w Psi gathered | 1 (ZeRO 2 scatters m times) |
| server, S of them | (1 - 1/S) g Psi pushed, (N-1)/S w Psi pulled from it | 1 |
| ZeRO 3 | 2 times (N-1)/N w Psi gathered, (N-1)/N g Psi scattered | m; kept: 1 gather a step |
| norms and routers under SP | all-reduce 2 (t-1)/t g for each of their weights | 1 |
| tied embedding | all-reduce g V h / t between first and last stage | 1 |

Sources: arXiv:1909.08053, 2205.05198 (TP, SP), 2310.01889 (ring), 2309.14509 (Ulysses), 1910.02054
(ZeRO), 2006.16668 (EP); the forms of single collectives are in `moemesh.trace.wire`.
"""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import NamedTuple

from moemesh.config.dispatcher_table import DISPATCHERS
from moemesh.config.layout import AXES
from moemesh.config.plan import SHARDED_STATES
from moemesh.planner.memory import rank_weights
from moemesh.planner.planned_layout import PlannedLayout
from moemesh.planner.shapes.shape import ModelShape
from moemesh.planner.stage_cut import Stages, pipeline_step
from moemesh.planner.traffic.exchanges import (
    EXIT_GRADIENTS,
    STATE_EXCHANGES,
    ledger_of,
    repeated_callers,
)
from moemesh.sharding.context import head_share
from moemesh.sharding.dispatchers import packed_bytes, rows_moved
from moemesh.trace import wire
from moemesh.trace.ledger import Ledger


class Volume(NamedTuple):
    """Collectives or messages of one kind: `events` per step. A rank sends `wire_bytes` in each and
    receives `received_bytes`; the tensor has `payload_bytes`."""

    axis: str
    op: str
    phase: str
    caller: str
    events: float
    payload_bytes: float
    wire_bytes: float
    received_bytes: float


def step_volumes(shape: ModelShape, layout: PlannedLayout, rank: int = 0) -> list[Volume]:
    """The collectives of one step of pipeline rank `rank`, without axes of one rank."""
    return _Volumes(shape, layout, rank).volumes


def volumes_ledger(shape: ModelShape, layout: PlannedLayout, rank: int = 0) -> Ledger:
    """The volumes of a step as a ledger, with the bytes of all events together."""
    return ledger_of(
        (*volume[:5], *(volume.events * size for size in volume[5:]))
        for volume in step_volumes(shape, layout, rank)
    )


class _Volumes:
    """The list `volumes` of one rank, filled axis by axis."""

    def __init__(self, shape: ModelShape, layout: PlannedLayout, rank: int) -> None:
        self.shape, self.layout, self.rank = shape, layout, rank
        self.volumes: list[Volume] = []
        self.content = Stages.of(shape, layout, microbatches=1).contents[rank]
        self.step = pipeline_step(layout, 1)
        mtp_layers = shape.num_mtp_layers * self.content.has_head
        kinds = self.content.kinds + Counter({shape.mtp_kind: mtp_layers})
        self.layers = kinds.total()
        self.moe = sum(number for kind, number in kinds.items() if kind.moe)
        #: Microbatches that each layer of the rank computes in a step.
        self.m = layout.microbatches
        if self.step.share < 1:
            # A rank runs two stages, each on half of the microbatches.
            self.m = layout.microbatches / 2
        self.repeated = repeated_callers(layout.recompute)
        #: Bytes of a microbatch's residual stream before tp cuts it.
        self.stream = layout.tokens * shape.hidden_size * layout.element_bytes
        if layout.tp > 1:
            self._tensor()
        if layout.cp > 1:
            self._context()
        if self.moe and layout.ep * layout.etp > 1:
            self._experts()
        if layout.pp > 1:
            cut = layout.shard_messages
            cut = layout.sequence_parallel if cut is None else cut
            size = self.stream / (layout.tp if cut else 1)
            for phase, number in zip(("forward", "backward"), self.step.sent_by(rank), strict=True):
                self._enter("pp", "send_receive", phase, "pipeline", number * self.m, size)
        weights, width = rank_weights(shape, layout, rank), layout.gradient_bytes
        if layout.sequence_parallel and layout.tp > 1 and weights.replicated:
            size = weights.replicated * width
            self._enter("tp", "all_reduce", "backward", "gradients", 1, size)
        dense, experts = weights.on_rank(layout)
        replicas, shards = layout.dense_replicas, layout.dense_shards
        self._sums("dp_cp", dense, layout.trained_dense, replicas, shards, self.layers)
        replicas, shards = layout.edp, layout.expert_shards
        self._sums("edp", experts, layout.trained_experts, replicas, shards, self.moe)
        has_one_end = self.content.has_embedding != self.content.has_head
        if shape.tied_embeddings and layout.pp > 1 and has_one_end:
            size = shape.vocab_size * shape.hidden_size / layout.tp * width
            self._enter("pp", "all_reduce", "backward", "tied_embedding", 1, size, 2)

    def _enter(
        self, axis: str, op: str, phase: str, caller: str, count: float, size: float, ranks: int = 0
    ) -> None:
        """Events with a tensor of `size` bytes among `ranks` (0: the degree of the axis)."""
        ranks = ranks or getattr(self.layout, axis)
        if ranks < 2 or not count:
            return
        sent = size
        if op != "send_receive":
            # Collectives are rings, an all-reduce in two phases, or direct exchanges.
            sent *= (2 if op == "all_reduce" else 1) * (ranks - 1) / ranks
        self.volumes.append(Volume(axis, op, phase, caller, count, size, sent, sent))

    def _layer(
        self,
        axis: str,
        forward: str,
        backward: str,
        caller: str,
        count: float,
        size: float,
        back: float | None = None,
        members: int = 0,
    ) -> None:
        """Enter the collective `forward` with `size` bytes, twice if recomputation repeats its
        caller, and the collective `backward` with `back` bytes (None: `size`). An empty name
        enters nothing.
        """
        for phase in ("forward", "recompute") if caller in self.repeated else ("forward",):
            if forward:
                self._enter(axis, forward, phase, caller, count, size, members)
        if backward:
            size = size if back is None else back
            self._enter(axis, backward, "backward", caller, count, size, members)

    def _tensor(self) -> None:
        """Collectives over tp of blocks, embedding and head."""
        layout, m = self.layout, self.m
        shared = self.moe if self.shape.shared_intermediate_size else 0
        mlps = self.layers - self.moe + shared
        entering = layout.tokens * sum(self.shape.entering_widths) * layout.element_bytes
        self._blocks("attention", self.layers * m, layout.attention_exit, entering)
        self._blocks("mlp", mlps * m, layout.mlp_exit, self.stream)
        # Rows of the table are summed into the stream, the stream is gathered for the logits.
        is_cut = layout.sequence_parallel
        summed, gathered = ("reduce_scatter", "all_gather") if is_cut else ("all_reduce", "")
        if self.content.has_embedding:
            self._layer("tp", summed, gathered, "embedding", m, self.stream)
        if self.content.has_head:
            self._layer("tp", gathered, summed, "head", m, self.stream)
            # Three fp32 numbers a token.
            self._enter("tp", "all_reduce", "forward", "head.loss", m, 3 * 4 * layout.tokens)

    def _blocks(self, caller: str, count: float, exit_form: str, entering: float) -> None:
        """`count` blocks with a tensor-parallel entry of `entering` bytes and an exit."""
        layout, enter, leave = self.layout, f"{caller}.enter", f"{caller}.leave"
        if not layout.sequence_parallel:
            self._layer("tp", "all_reduce", "", leave, count, self.stream)
            self._layer("tp", "", "all_reduce", enter, count, entering)
            return
        leaving = self.stream
        if exit_form == "all_to_all":
            leaving = layout.tokens * self.shape.output_width * layout.element_bytes / layout.tp
        self._layer("tp", "all_gather", layout.input_gradient, enter, count, entering)
        self._layer("tp", exit_form, EXIT_GRADIENTS[exit_form], leave, count, leaving)
        if layout.rebuild != "none":
            tensors = 2 if layout.rebuild == "input_and_gradient" else 1
            rebuilt = "backward", f"{caller}.rebuild", count, tensors * self.stream
            self._enter("tp", "all_gather", *rebuilt)

    def _context(self) -> None:
        """Exchanges of attention over cp."""
        layout, shape, c = self.layout, self.shape, self.layout.cp
        # On one tp rank: `width` has the mean bytes of one channel of a token, `whole` the bytes of
        # all keys and values of a microbatch.
        width = layout.element_bytes / layout.tp
        keys = shape.kv_width + shape.value_width
        whole = layout.microbatch * layout.seq_len * keys * width
        count = self.layers * self.m
        match layout.context:
            case "ring":
                # In the backward gradients travel with their keys and values, in fp32 at least.
                hops, block = count * (c - 1), whole / c
                self._layer("cp", "send_receive", "send_receive", "context.keys", hops, block)
                block *= max(layout.element_bytes, 4) / layout.element_bytes
                self._enter("cp", "send_receive", "backward", "context.gradients", hops, block)
            case "all_gather":
                self._layer("cp", "all_gather", "all_gather", "context.keys", count, whole)
                self._enter("cp", "reduce_scatter", "backward", "context.keys", count, whole)
            case "all_to_all":
                # `copies` is the mean number of ranks that receive a key/value head.
                heads, copies = shape.num_heads // layout.tp, 1.0
                kv_heads = max(shape.kv_heads // layout.tp, 1)
                if not heads % c:
                    shares = (head_share(heads, kv_heads, c, index) for index in range(c))
                    copies = sum(len(share.keys) for share in shares) / kv_heads
                moved = (shape.query_width + keys * copies) * (layout.tokens * width)
                self._layer("cp", "all_to_all", "all_to_all", "context.heads", count, moved)
                moved = layout.tokens * shape.output_width * width
                self._layer("cp", "all_to_all", "all_to_all", "context.positions", count, moved)

    def _experts(self) -> None:
        """Dispatch and combine of the MoE layers."""
        layout, shape = self.layout, self.shape
        count = self.moe * self.m
        plain = shape.hidden_size * layout.element_bytes
        coded = packed_bytes(shape.hidden_size) if layout.payload == "fp8" else plain
        mesh, tokens = layout.mesh, layout.tokens / layout.tp * layout.imbalance
        #: Dispatcher -> rows that arrive at a rank over each axis.
        table = rows_moved(
            tokens=tokens,
            chosen=shape.experts_per_token,
            experts=shape.num_experts,
            ranks=layout.ep,
            ranks_per_node=mesh.ep_node,
        )
        name = layout.dispatcher if layout.dispatcher in table else "all_to_all"
        arriving = 0.0
        for hop in DISPATCHERS[name].hops:
            arriving = table[name].by_axis.get(hop.axis, arriving)
            # The etp ranks with one ep index gather each other's rows.
            rows = arriving * layout.etp if hop.is_gathered else arriving
            width = plain if hop.axis == "etp" else coded
            view, dims = AXES[hop.axis]
            members = prod(mesh.dimensions(view)[dim] for dim in dims)
            there, back = hop.ops
            sizes = count, rows * width, rows * plain, members
            self._layer(hop.axis, there, back, "moe.dispatch", *sizes)
            sizes = count, rows * plain, rows * plain, members
            self._layer(hop.axis, back, there, "moe.combine", *sizes)

    def _sums(
        self, axis: str, psi: float, share: float, replicas: int, shards: int, layers: int
    ) -> None:
        """Enter sums of gradients and gathers of weights, for `psi` parameters of a rank with a
        trained `share`."""
        layout, data = self.layout, self.layout.data
        buckets = layers if layout.bucket_per_layer else 1
        if not psi or replicas == 1 or (not share and layout.zero < 3):
            return
        gradient, weight = layout.gradient_bytes * psi * share, layout.element_bytes * psi
        if layout.zero < 3:
            weight *= share
        gradient, weight = gradient / buckets, weight / buckets
        # ZeRO-2 has no buffer for unreduced gradients of several microbatches.
        is_per_microbatch = layout.reduce_every_microbatch or "gradients" in SHARDED_STATES[data]
        sums = buckets * (layout.microbatches if is_per_microbatch else 1)
        if layout.parameter_server:
            servers = min(layout.servers, replicas)
            server = wire.parameter_server(gradient, weight, replicas, servers)
            push = gradient, server.push_sent, server.push_received
            pull = weight, server.pull_sent, server.pull_received
            self.volumes += [
                Volume(axis, "reduce_scatter", "backward", "gradients", sums, *push),
                Volume(axis, "all_gather", "optimizer", "weights", buckets, *pull),
            ]
            return
        members = {"all": replicas, "shard": shards, "copies": replicas // shards}
        for ranks, op, phase, caller in STATE_EXCHANGES[data]:
            count, size = sums, weight if caller == "weights" else gradient
            if phase == "optimizer" or (caller == "weights" and layout.reshard == "step"):
                if phase == "backward":
                    continue  # weights stay gathered from the forward
                count = buckets
            if ranks == "copies":
                size /= shards
            if size:
                name = f"{axis}_groups" if ranks == "copies" else axis
                self._enter(name, op, phase, caller, count, size, members[ranks])
