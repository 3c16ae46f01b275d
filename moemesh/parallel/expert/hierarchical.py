"""Node-aware expert parallelism: a token crosses to each node once, whatever its experts there.

Legend: T own tokens, K slots per token, S rows sent (to ranks of the own node, then to other
nodes), M rows that visit this node through this rank, G those of them that crossed, N rows received
(tokens of this node first; gathered over etp), R rows by expert, E (L) experts (local ones), O
owners, H hidden. The ep axis is cut into `rail` (ranks in the same place of each node) and `node`
(ranks inside one node).

| step | in | out | forward comm | backward comm |
|---|---|---|---|---|
| plan | experts T x K | two hops | counts of all chunks, ids: over rail, node, etp | none |
| dispatch | T x H | N x H | all_to_all over rail, then over node; all_gather(etp) | the way back |
| combine | N x H | T x H | reduce_scatter(etp); all_to_all over node, then rail | the way there |

Results are summed on the expert's rank, then inside the node, and cross back once: DeepEP's
asymmetric-domain forwarding. With one node only the inner hop is left, which sends a token once to
each rank instead of once to each expert.

| path | first | then |
|---|---|---|
| :meth:`Relay.send` | T: over the node, and over the rail | G over the node |
| :meth:`Relay.send_back` | N of tokens that crossed, over the node | their sums over the rail |
| | the other N over the node | |

Rows that stay inside the node do not wait for the link: they are sent while other rows cross, and
on the way back summed and sent while other rows cross. On the CPU the second step of a path is
taken by a worker thread, as soon as the first has arrived. In the ledger both parts of an inner hop
are one exchange.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from moemesh.comm import collectives, transfers
from moemesh.comm.mesh import Axis
from moemesh.comm.overlap import Codec, overlapped_exchange
from moemesh.comm.transfers import Work, exchange_start
from moemesh.model.dispatcher import DispatchedRows, Dispatcher, pick_weights
from moemesh.monitor import progress
from moemesh.monitor.progress import Ticket, in_background
from moemesh.ops.host_copy import HostCopy
from moemesh.ops.pending import Pending
from moemesh.ops.permute import (
    RowMap,
    SortedByExpert,
    count_by_owner,
    count_ids,
    gather_rows,
    map_from_sources,
    places_of_true,
    sum_rows,
    sum_rows_between,
    unpermute,
)
from moemesh.parallel.expert.site import DispatcherSite
from moemesh.trace import wire

T = TypeVar("T")

#: Rows of at most this size (a token's weights) take next to no time on a link.
_SHORT_ROW_BYTES = 256


class WorkerThread:
    """A thread that continues chains of exchanges while the main thread computes; it starts at the
    first task, and ends with the process.

    A chain of exchanges (receive, sum, send on) blocks at each wait; in the main thread it would
    block the computation as well. Tasks run in the order in which they were submitted. If that
    order is the same on all ranks, and a task waits only for messages that no task sends, or that
    an earlier task sends, deadlocks are impossible. For tensors of a device tasks run at once, in
    the caller: waits of NCCL do not block the host.
    """

    def __init__(self) -> None:
        self._tasks: SimpleQueue[tuple[Callable[[], Any], Future[Any], bool]] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._num_tags = self._num_long = 0

    @property
    def is_idle(self) -> bool:
        """Whether no long task is waiting or running."""
        return not self._num_long

    def tag(self) -> int:
        """A tag that no exchange in flight has; all ranks must call this in the same order."""
        self._num_tags = (self._num_tags + 1) % (1 << 20)
        return self._num_tags

    def submit(
        self, task: Callable[[], T], device: torch.device, *, is_long: bool = True
    ) -> Pending[T]:
        """Run ``task()`` in the thread, without gradient; an exception is raised by the wait.
        `is_long`: exchanges that start meanwhile would slow it down (:attr:`is_idle`)."""
        if device.type != "cpu":
            return Pending.ready(task())
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="moemesh-worker", daemon=True)
            self._thread.start()
        with self._lock:
            self._num_long += is_long
        future: Future[T] = Future()
        self._tasks.put((task, future, is_long))
        return Pending(future.result)

    @torch.no_grad()
    def _run(self) -> None:
        in_background()
        while True:
            task, future, is_long = self._tasks.get()
            try:
                future.set_result(task())
            except BaseException as error:
                future.set_exception(error)
            with self._lock:
                self._num_long -= is_long
            del task, future  # frees the rows that they hold, before the thread waits


class Splits(NamedTuple):
    """Rows to, and rows from each rank of an axis."""

    sent: list[int]
    received: list[int]

    def back(self) -> Splits:
        """The splits of the way back."""
        return Splits(self.received, self.sent)

    def plus(self, other: Splits) -> Splits:
        """The sums of both, rank by rank."""
        pairs = zip(self, other, strict=True)
        return Splits(*([*map(sum, zip(*pair, strict=True))] for pair in pairs))

    def with_own(self, index: int, count: int) -> Splits:
        """These splits with another number of rows from rank `index` to itself."""
        return Splits(*([*rows[:index], count, *rows[index + 1 :]] for rows in self))


@dataclass(frozen=True, kw_only=True)
class Relay:
    """Both hops of one exchange.

    `sent` maps the S rows of this rank to its tokens. `own` splits those that stay in the node, and
    `across` those that cross over `rail`. `forwarded` maps the rows sent on inside the node to the
    G that crossed, and `onward` splits them. `num_staying`: own tokens that visit this node.
    """

    rail: Axis
    node: Axis
    sent: RowMap
    own: Splits
    across: Splits
    forwarded: RowMap
    onward: Splits
    num_staying: int
    worker: WorkerThread

    def record(
        self, row_bytes: int, phase: str, caller: str, *, is_combine: bool
    ) -> list[Ticket | None]:
        """Enter both hops in the ledger; over the rail, tokens that stay in the node count as sent
        by this rank to itself. Returns the tickets of waits for the rail and for the node, for the
        progress record."""
        tickets: list[Ticket | None] = []
        across = self.across.with_own(self.rail.index, self.num_staying)
        for axis, splits in ((self.rail, across), (self.node, self.own.plus(self.onward))):
            tickets.append(None)
            if axis.size > 1:
                out, into = (
                    [rows * row_bytes for rows in part]
                    for part in (splits.back() if is_combine else splits)
                )
                moved = wire.all_to_all(out, into, axis.index)
                tickets[-1] = transfers.record(axis, "all_to_all", phase, caller, moved)
        return tickets

    def send(
        self, x_TH: Tensor, /, *, phase: str, caller: str, by_expert: RowMap | None = None
    ) -> Callable[[], Tensor]:
        """Start T -> N (with `by_expert` -> R); returns the wait. Transpose of `send_back`."""
        row_bytes = x_TH.shape[1] * x_TH.element_size()
        tickets = self.record(row_bytes, phase, caller, is_combine=False)
        # The first `num_own` of the S rows stay in the node; the first `near` of the N rows are of
        # tokens of this node, the other `far` crossed.
        source_S, num_own = self.sent.source_R, sum(self.own.sent)
        near, far = sum(self.own.received), sum(self.onward.received)
        rows_NH = x_TH.new_empty(near + far, x_TH.shape[1])
        tag = self.worker.tag()
        onward: Pending[Work | None] = Pending.ready(None)
        if self.rail.size > 1:
            crossed_GH = x_TH.new_empty(sum(self.across.received), x_TH.shape[1])
            leaving = x_TH.index_select(0, source_S[num_own:])

            def cross() -> Work | None:
                return exchange_start(leaving, crossed_GH, self.rail, *self.across, tag=tag)

            # Chunks that cross at the same time share the link, and the first arrives as late as
            # the last: while another chunk crosses, this one waits for its turn in the worker.
            crossing = cross() if self.worker.is_idle else None

            def carry_on() -> Work | None:
                _wait(crossing or cross())
                rows = gather_rows(crossed_GH, self.forwarded)
                return exchange_start(rows, rows_NH[near:], self.node, *self.onward, tag=tag)

        own_rows = x_TH.index_select(0, source_S[:num_own])
        staying = exchange_start(own_rows, rows_NH[:near], self.node, *self.own, tag=tag)
        if self.rail.size > 1:
            is_long = row_bytes > _SHORT_ROW_BYTES
            onward = self.worker.submit(carry_on, x_TH.device, is_long=is_long)

        def arrived() -> Tensor:
            _wait_for_both(tickets, onward, staying)
            return rows_NH if by_expert is None else gather_rows(rows_NH, by_expert)

        return arrived

    def send_back(
        self,
        y: Tensor,
        /,
        *,
        phase: str,
        caller: str,
        by_expert: RowMap | None = None,
        num_near: int = 0,
    ) -> Callable[[], Tensor]:
        """Start N (with `by_expert` R) -> T, summed; returns the wait. Transpose of :meth:`send`.
        The first `num_near` of the R rows are of tokens of this node."""
        y = y.contiguous()
        row_bytes = y.shape[1] * y.element_size()
        tickets = self.record(row_bytes, phase, caller, is_combine=True)
        near, num_own = sum(self.own.received), sum(self.own.sent)
        back_SH = y.new_empty(self.sent.num_rows, y.shape[1])
        tag = self.worker.tag()

        def summed(received: range, copies: Callable[[RowMap], range]) -> Tensor:
            """Results [rows, H] of the rows `received`: of `y` as it is, or, with `by_expert`, sums
            over the rows of `y` in the range ``copies(by_expert)``."""
            if by_expert is None:
                return y[received.start : received.stop]
            return sum_rows_between(y, by_expert, received, copies(by_expert))

        crossing: Pending[Work | None] = Pending.ready(None)
        if self.rail.size > 1:
            crossed = range(near, near + sum(self.onward.received))
            results = summed(crossed, lambda rows: range(num_near, rows.num_rows))
            gathered = y.new_empty(self.forwarded.num_rows, y.shape[1])
            inside = exchange_start(results, gathered, self.node, *self.onward.back(), tag=tag)

            def carry_on() -> Work | None:
                _wait(inside)
                sums_GH = sum_rows(gathered, self.forwarded)
                into = back_SH[num_own:]
                return exchange_start(sums_GH, into, self.rail, *self.across.back(), tag=tag)

            crossing = self.worker.submit(carry_on, y.device)
        own_sums, into = summed(range(near), lambda _: range(num_near)), back_SH[:num_own]
        staying = exchange_start(own_sums, into, self.node, *self.own.back(), tag=tag)

        def arrived() -> Tensor:
            _wait_for_both(tickets, crossing, staying)
            return sum_rows(back_SH, self.sent)

        return arrived


def _wait(work: Work | None) -> None:
    if work is not None:
        work.wait()


def _wait_for_both(
    tickets: list[Ticket | None], crossing: Pending[Work | None], staying: Work | None
) -> None:
    """Wait for the rows over the rail, then for those inside the node."""
    rail, node = tickets
    progress.waiting(rail)
    _wait(crossing.wait())
    progress.waiting(node)
    _wait(staying)
    progress.left()


class RelayCounts(NamedTuple):
    """Sizes of one exchange that the host has to know. `across`, `own`, `onward`: rows over the
    rail and inside the node, as in :class:`Relay`. `near_pairs`: pairs of a row and a local expert,
    for tokens of this node. `lane_rows`, `lane_pairs`: rows and all pairs of each lane (rank of the
    etp axis)."""

    across: Splits
    own: Splits
    onward: Splits
    near_pairs: int
    lane_rows: list[int]
    lane_pairs: list[int]


@dataclass(frozen=True, kw_only=True)
class HierarchicalPlan:
    """The relay of rows and results, and the order of rows at the experts."""

    relay: Relay
    lane_rows: list[int]
    by_expert: RowMap
    slot_R: Tensor
    counts_L: Tensor
    owner_N: Tensor
    #: Rows at the experts of tokens that did not cross between nodes (without etp).
    num_near: int


class HierarchicalDispatcher(Dispatcher):
    """Wins where links between nodes are slow and tokens have several experts in a node."""

    def __init__(
        self,
        ep: Axis,
        rail: Axis,
        node: Axis,
        etp: Axis,
        num_experts: int,
        *,
        codec: Codec | None = None,
    ) -> None:
        self.rail, self.node, self.etp = rail, node, etp
        self.num_local = num_experts // ep.size
        self.owner, self.num_owners = ep.index * etp.size + etp.index, ep.size * etp.size
        self.codec, self.worker = codec, WorkerThread()

    @classmethod
    def of(cls, site: DispatcherSite) -> HierarchicalDispatcher:
        axes = (site.mesh[name] for name in ("ep", "ep_rail", "ep_node", "etp"))
        return cls(*axes, site.config.num_experts, codec=site.codec)

    def plan_chunks(
        self, chunks: Sequence[Tensor], *, is_complete: bool = False
    ) -> list[HierarchicalPlan]:
        plans: list[HierarchicalPlan] = []
        for experts_TK, sizes in zip(chunks, self._count_rows(chunks), strict=True):
            relay, rows = self._plan_relay(experts_TK, sizes)
            rows = collectives.all_gather(rows, self.etp, sizes.lane_rows, caller="moe.counts")
            rows = rows.long()
            experts_NK, owner_N = rows[:, :-1], rows[:, -1]
            sorted_ = SortedByExpert(experts_NK, self.num_local, owner_N, self.num_owners)
            by_expert, slot_R = sorted_.rows(sum(sizes.lane_pairs))
            plans.append(
                HierarchicalPlan(
                    relay=relay,
                    lane_rows=sizes.lane_rows,
                    by_expert=by_expert,
                    slot_R=slot_R,
                    counts_L=sorted_.counts_E,
                    owner_N=owner_N,
                    num_near=sizes.near_pairs,
                )
            )
        return plans

    def _count_rows(self, chunks: Sequence[Tensor]) -> list[RelayCounts]:
        """Sizes of both hops, for each chunk of experts [T, K], from counts alone, before any row
        or id has moved: the host waits once for all of them.

        A rank sends to its peer in every node the number of its tokens that go there, and the
        numbers of tokens and pairs that each rank of that node gets from it; the peer adds up what
        it will forward.
        """
        # Legend: R ranks of the rail, N ranks of the node, C chunks.
        rail, node, num_local = self.rail, self.node, self.num_local
        tensors: list[Tensor] = []
        num_ranks = rail.size * node.size
        for experts_TK in chunks:
            # Columns: tokens that go to each node, then tokens and pairs of each rank in it.
            visits_TRN = _visits(experts_TK, num_local, num_ranks).view(-1, rail.size, node.size)
            sent_R1 = visits_TRN.any(2).sum(0)[:, None]
            pairs_E = count_ids(experts_TK.reshape(-1), num_local * num_ranks)
            pairs_RN = pairs_E.view(rail.size, node.size, num_local).sum(2)
            tensors.append(torch.cat([sent_R1, _packed(visits_TRN.sum(0), pairs_RN)], dim=1))
        columns = torch.stack(tensors, dim=1)  # [R, C, 1 + N]
        sent_RC = columns[:, :, 0]
        columns = collectives.exchange_counts(columns, rail, caller="moe.counts")
        received_RC, (visits_RCN, pairs_RCN) = columns[:, :, 0], _unpacked(columns[:, :, 1:])
        # What this rank sends inside the node: own and near for its own tokens, onward and far for
        # tokens that crossed to it.
        own_NC, near_NC = visits_RCN[rail.index].t(), pairs_RCN[rail.index].t()
        onward_NC, far_NC = visits_RCN.sum(0).t() - own_NC, pairs_RCN.sum(0).t() - near_NC
        packed = torch.stack([_packed(own_NC, onward_NC), _packed(near_NC, far_NC)], dim=2)
        packed = collectives.exchange_counts(packed, node, caller="moe.counts")
        (own_in, onward_in), (near, far) = map(_unpacked, packed.unbind(2))
        lane = torch.stack([(own_in + onward_in).sum(0), (near + far).sum(0)])
        lanes = collectives.all_gather(lane[None], self.etp, caller="moe.counts")
        hops = (sent_RC, received_RC, own_NC, own_in, onward_NC, onward_in)
        parts = (*hops, near.sum(0, keepdim=True), *lanes.unbind(1))
        counts: list[RelayCounts] = []
        for row in HostCopy(torch.cat(parts).t()).tensor():  # one row a chunk
            numbers: list[list[int]] = [part.tolist() for part in row.split([*map(len, parts)])]
            *splits, (near_pairs,), lane_rows, lane_pairs = numbers
            across, own, onward = (Splits(*splits[first : first + 2]) for first in (0, 2, 4))
            counts.append(RelayCounts(across, own, onward, near_pairs, lane_rows, lane_pairs))
        return counts

    def _plan_relay(self, experts_TK: Tensor, counts: RelayCounts) -> tuple[Relay, Tensor]:
        """The relay that brings each token to the ranks of its experts, and the ids of its rows.

        Exchanges ids once per row and hop. The second result holds, for each received row, its
        experts, counted from this rank's first one (-1 elsewhere), followed by its owner (int32
        [N, K + 1]).
        """
        rail, node, num_local = self.rail, self.node, self.num_local
        across, own, onward = counts.across, counts.own, counts.onward
        owner_T1 = experts_TK.new_full((len(experts_TK), 1), self.owner)
        ids = torch.cat([experts_TK, owner_T1], dim=1).to(torch.int32)
        visits_TR = _visits(experts_TK, num_local * node.size, rail.size)
        tokens = _rows_by_part(visits_TR, sum(across.sent))[1]  # by node, then by token
        ids_M = collectives.all_to_all(ids[tokens], rail, *across, caller="moe.counts")
        ids_M = _local(ids_M, rail.index, num_local * node.size)
        # This rank's own tokens are one block of the M rows.
        first, num_staying = sum(across.received[: rail.index]), across.received[rail.index]
        is_own_M = torch.zeros(len(ids_M), dtype=torch.bool, device=ids_M.device)
        is_own_M[first : first + num_staying] = True
        visits_MN = _visits(ids_M[:, :-1], num_local, node.size)
        own_rank, own_M = _rows_by_part(visits_MN & is_own_M[:, None], sum(own.sent))
        onward_rank, onward_M = _rows_by_part(visits_MN & ~is_own_M[:, None], sum(onward.sent))
        # Both parts in one exchange; each rank receives the rows of its node's tokens first.
        order = torch.argsort(torch.cat([2 * own_rank, 2 * onward_rank + 1]), stable=True)
        both = own.plus(onward)
        both_M = torch.cat([own_M, onward_M])[order]
        received = collectives.all_to_all(ids_M[both_M], node, *both, caller="moe.counts")
        # From each rank two blocks: rows of this node's tokens, then rows of tokens that crossed.
        sizes = [size for pair in zip(own.received, onward.received, strict=True) for size in pair]
        blocks = received.split(sizes)
        ids_N = torch.cat([*blocks[::2], *blocks[1::2]])
        # Own tokens that visit this node do not cross the rail.
        stay = sum(across.sent[: rail.index])
        staying = tokens[stay : stay + num_staying]
        tokens = torch.cat([tokens[:stay], tokens[stay + num_staying :]])
        crossing = across.with_own(rail.index, 0)
        num_came = sum(crossing.received)
        # `forwarded` counts rows of M without this rank's own block: rows after it move up.
        relay = Relay(
            rail=rail,
            node=node,
            sent=map_from_sources(torch.cat([staying[own_M - first], tokens]), len(experts_TK)),
            own=own,
            across=crossing,
            forwarded=map_from_sources(onward_M - (onward_M > first) * num_staying, num_came),
            onward=onward,
            num_staying=num_staying,
            worker=self.worker,
        )
        return relay, _local(ids_N, node.index, num_local)

    def rows_per_owner(self, plan: HierarchicalPlan) -> Tensor:
        return count_by_owner(plan.by_expert, plan.counts_L, plan.owner_N, self.num_owners)

    def dispatch(
        self, x_TH: Tensor, weights_TK: Tensor, plan: HierarchicalPlan
    ) -> Pending[DispatchedRows]:
        # Weights start first and are waited for with the rows: queued after rows on a slow link
        # they would delay all other work of this rank.
        def sent(x: Tensor, caller: str, codec: Codec | None = None) -> Pending[Tensor]:
            ways = (partial(way, caller=caller) for way in (plan.relay.send, plan.relay.send_back))
            return overlapped_exchange(x, *ways, codec)

        def arrived(pair: tuple[Tensor, Tensor]) -> DispatchedRows:
            gather = partial(collectives.all_gather, axis=self.etp, sizes=plan.lane_rows)
            weights_NK = gather(pair[0], caller="moe.dispatch.weights")
            x_NH = gather(pair[1], caller="moe.dispatch")
            weights_R = pick_weights(weights_NK, plan.slot_R)
            return DispatchedRows(x_NH, plan.by_expert, weights_R, plan.counts_L)

        weights = sent(weights_TK, "moe.dispatch.weights")
        return weights.join(sent(x_TH, "moe.dispatch", self.codec)).then(arrived)

    def combine(self, y_RH: Tensor, plan: HierarchicalPlan) -> Pending[Tensor]:
        by_expert, caller = plan.by_expert, "moe.combine"
        if self.etp.size > 1:
            y_RH = unpermute(y_RH, by_expert)
            y_RH = collectives.reduce_scatter(y_RH, self.etp, plan.lane_rows, caller=caller)
            by_expert = None
        send_back = partial(plan.relay.send_back, num_near=plan.num_near)
        return overlapped_exchange(
            y_RH,
            partial(send_back, caller=caller, by_expert=by_expert),
            partial(plan.relay.send, caller=caller, by_expert=by_expert),
        )


def _visits(experts: Tensor, experts_per_part: int, num_parts: int) -> Tensor:
    """[rows, parts]: whether a row has an expert in each of `num_parts` equal parts."""
    part = torch.where(experts < 0, -1, experts // experts_per_part)
    parts = torch.arange(num_parts, dtype=experts.dtype, device=experts.device)
    return (part[:, :, None] == parts).any(1)


def _local(ids: Tensor, index: int, experts_per_part: int) -> Tensor:
    """`ids` (experts, then the owner, [rows, K + 1]) with experts counted from the first of part
    `index`, -1 for those of other parts."""
    local = ids[:, :-1] - index * experts_per_part
    local = local.masked_fill((local < 0) | (local >= experts_per_part), -1)
    return torch.cat([local, ids[:, -1:]], dim=1)


def _rows_by_part(visits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Part and row of the `count` visits [rows, parts], by part, then by row."""
    places = places_of_true(visits.t().reshape(-1), count)
    num_rows = max(len(visits), 1)
    return places // num_rows, places % num_rows


def _packed(low: Tensor, high: Tensor) -> Tensor:
    """Two counts as one int64, so that one exchange carries both."""
    return torch.stack([low, high], dim=-1).to(torch.int32).view(torch.int64)[..., 0]


def _unpacked(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of :func:`_packed`, as int64."""
    low, high = packed[..., None].view(torch.int32).long().unbind(-1)
    return low, high
