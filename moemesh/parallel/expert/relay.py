"""Token rows through two domains: over the link between nodes once, then on inside the node.

Legend: T own tokens, K slots per token, S rows sent (to ranks of the own node, then to other
nodes), M rows that visit this node through this rank, G those of them that crossed, N rows received
(tokens of this node first), R rows by expert, H hidden.

| path | first | then |
|---|---|---|
| :class:`DispatchPath` | T to ranks of the node, and across to the same place | G on inside |
| :class:`CombinePath` | N whose tokens crossed, inside, and summed | across; the other N inside |

What stays inside the node does not wait for the link: it is sent while other rows cross, and on the
way back summed and sent while they do. The second step of a path is taken by a worker thread, as
soon as the first has arrived. To the ledger both parts of an inner hop are one exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moemesh.comm import collectives, transfers
from moemesh.comm.mesh import Axis
from moemesh.comm.overlap import Codec
from moemesh.comm.transfers import Work, exchange_start
from moemesh.comm.worker_thread import WorkerThread
from moemesh.ops.host_copy import HostCopy
from moemesh.ops.pending import Pending
from moemesh.ops.permute import (
    RowMap,
    count_ids,
    gather_rows,
    map_from_sources,
    places_of_true,
    sum_rows,
    sum_rows_between,
)
from moemesh.trace import wire
from moemesh.watch import progress_words
from moemesh.watch.progress_words import Ticket

#: Rows no longer than this (a token's weights) take next to no time on a link.
_SHORT_ROW_BYTES = 256


class Splits(NamedTuple):
    """Rows to, and rows from each rank of an axis."""

    sent: list[int]
    received: list[int]

    def back(self) -> Splits:
        return Splits(self.received, self.sent)


@dataclass(frozen=True, kw_only=True)
class Relay:
    """`sent` maps the S rows to tokens, `forwarded` the rows sent on to the G that crossed; `own`
    and `onward` are the two parts of the hop over `node`. Of own tokens `num_staying` visit it."""

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
        """Enter both hops in the ledger; what stays counts as sent by a rank to itself.

        Returns what says in the progress word that the rail, or the node, is waited for.
        """
        tickets: list[Ticket | None] = []
        across = Splits(list(self.across.sent), list(self.across.received))
        across.sent[self.rail.index] = across.received[self.rail.index] = self.num_staying
        inside = Splits(
            [own + on for own, on in zip(self.own.sent, self.onward.sent, strict=True)],
            [own + on for own, on in zip(self.own.received, self.onward.received, strict=True)],
        )
        for axis, splits in ((self.rail, across), (self.node, inside)):
            if axis.size > 1:
                out, into = splits.back() if is_combine else splits
                moved = wire.all_to_all(
                    [rows * row_bytes for rows in out],
                    [rows * row_bytes for rows in into],
                    axis.index,
                )
                tickets.append(transfers.record(axis, "all_to_all", phase, caller, moved))
            else:
                tickets.append(None)
        return tickets


class DispatchPath:
    """T -> N, or with `by_expert` -> R; the transpose of :class:`CombinePath`."""

    def __init__(
        self,
        relay: Relay,
        caller: str,
        *,
        codec: Codec | None = None,
        by_expert: RowMap | None = None,
    ) -> None:
        self.relay, self.caller, self.codec, self.by_expert = relay, caller, codec, by_expert

    def start(self, x_TH: Tensor, phase: str) -> None:
        relay = self.relay
        self._hidden, self._dtype = x_TH.shape[1], x_TH.dtype
        x_TH = x_TH if self.codec is None else self.codec.encode(x_TH)
        row_bytes = x_TH.shape[1] * x_TH.element_size()
        self._tickets = relay.record(row_bytes, phase, self.caller, is_combine=False)
        source_S, num_own = relay.sent.source_R, sum(relay.own.sent)
        near, far = sum(relay.own.received), sum(relay.onward.received)
        self._rows_NH = rows_NH = x_TH.new_empty(near + far, x_TH.shape[1])
        tag = relay.worker.tag()
        self._onward: Pending[Work | None] = Pending.ready(None)
        if relay.rail.size > 1:
            came_GH = x_TH.new_empty(sum(relay.across.received), x_TH.shape[1])
            away = x_TH.index_select(0, source_S[num_own:])

            def cross() -> Work | None:
                return exchange_start(away, came_GH, relay.rail, *relay.across, tag=tag)

            # Not beside others: chunks would share the link, and the first come as late as all.
            crossing = cross() if relay.worker.is_idle else None

            def carry_on() -> Work | None:
                _wait(crossing or cross())
                rows = gather_rows(came_GH, relay.forwarded)
                return exchange_start(rows, rows_NH[near:], relay.node, *relay.onward, tag=tag)

        own = x_TH.index_select(0, source_S[:num_own])
        self._staying = exchange_start(own, rows_NH[:near], relay.node, *relay.own, tag=tag)
        if relay.rail.size > 1:
            is_long = row_bytes > _SHORT_ROW_BYTES
            self._onward = relay.worker.submit(carry_on, x_TH.device, is_long=is_long)

    def finish(self) -> Tensor:
        rail, node = self._tickets
        progress_words.waiting(rail)
        _wait(self._onward.wait())
        progress_words.waiting(node)
        _wait(self._staying)
        progress_words.left()
        rows_NH = self._rows_NH
        del self._rows_NH, self._onward, self._staying
        if self.codec is not None:
            rows_NH = self.codec.decode(rows_NH, self._hidden, self._dtype)
        return rows_NH if self.by_expert is None else gather_rows(rows_NH, self.by_expert)


class CombinePath:
    """N, or with `by_expert` R, summed -> T; the transpose of :class:`DispatchPath`."""

    def __init__(
        self, relay: Relay, caller: str, *, by_expert: RowMap | None = None, num_near: int = 0
    ) -> None:
        """`num_near`: how many of the R rows are of tokens of this node."""
        self.relay, self.caller, self.by_expert = relay, caller, by_expert
        self.num_near = num_near

    def start(self, y: Tensor, phase: str) -> None:
        relay, y = self.relay, y.contiguous()
        row_bytes = y.shape[1] * y.element_size()
        self._tickets = relay.record(row_bytes, phase, self.caller, is_combine=True)
        near, num_own = sum(relay.own.received), sum(relay.own.sent)
        self._back_SH = back_SH = y.new_empty(relay.sent.num_rows, y.shape[1])
        tag = relay.worker.tag()
        self._crossing: Pending[Work | None] = Pending.ready(None)
        if relay.rail.size > 1:
            far = self._summed(y, range(near, near + sum(relay.onward.received)), is_far=True)
            came = y.new_empty(relay.forwarded.num_rows, y.shape[1])
            inside = exchange_start(far, came, relay.node, *relay.onward.back(), tag=tag)

            def carry_on() -> Work | None:
                _wait(inside)
                away = sum_rows(came, relay.forwarded)
                into = back_SH[num_own:]
                return exchange_start(away, into, relay.rail, *relay.across.back(), tag=tag)

            self._crossing = relay.worker.submit(carry_on, y.device)
        own = self._summed(y, range(near), is_far=False)
        into = back_SH[:num_own]
        self._staying = exchange_start(own, into, relay.node, *relay.own.back(), tag=tag)

    def _summed(self, y: Tensor, received: range, *, is_far: bool) -> Tensor:
        """The rows `received`: of tokens that crossed (`is_far`), or of the others."""
        if self.by_expert is None:
            return y[received.start : received.stop]
        border, end = self.num_near, self.by_expert.num_rows
        copies = range(border, end) if is_far else range(border)
        return sum_rows_between(y, self.by_expert, received, copies)

    def finish(self) -> Tensor:
        rail, node = self._tickets
        progress_words.waiting(rail)
        _wait(self._crossing.wait())
        progress_words.waiting(node)
        _wait(self._staying)
        progress_words.left()
        back_SH = self._back_SH
        del self._back_SH, self._crossing, self._staying
        return sum_rows(back_SH, self.relay.sent)


def _wait(work: Work | None) -> None:
    if work is not None:
        work.wait()


class RelayCounts(NamedTuple):
    """All sizes of one exchange that the host has to know: rows over the rail and inside the node
    (as in :class:`Relay`), pairs of a row and a local expert among the rows of this node's tokens,
    and of each lane (rank of the etp axis) the rows and all such pairs."""

    across: Splits
    own: Splits
    onward: Splits
    near_pairs: int
    lane_rows: list[int]
    lane_pairs: list[int]


def count_rows(
    chunks: Sequence[Tensor], num_local: int, rail: Axis, node: Axis, etp: Axis, *, caller: str
) -> list[RelayCounts]:
    """Sizes of both hops, for each chunk of experts [T, K], from counts alone, before any row or id
    has moved: the host waits once for all of them.

    A rank tells the one in its place of every node how many of its tokens go there, and how many
    tokens and pairs each rank of that node gets from it; that one adds up what it will send on.
    """
    # Legend: R ranks of the rail, N ranks of the node, C chunks.
    told: list[Tensor] = []
    num_ranks = rail.size * node.size
    for experts_TK in chunks:
        # Of the tokens of a chunk those that go to each node, then tokens and pairs of each rank.
        visits_TRN = _visits(experts_TK, num_local, num_ranks).view(-1, rail.size, node.size)
        sent_R1 = visits_TRN.any(2).sum(0)[:, None]
        pairs_E = count_ids(experts_TK.reshape(-1), num_local * num_ranks)
        pairs_RN = pairs_E.view(rail.size, node.size, num_local).sum(2)
        told.append(torch.cat([sent_R1, _packed(visits_TRN.sum(0), pairs_RN)], dim=1))
    told_RC = torch.stack(told, dim=1)
    sent_RC = told_RC[:, :, 0]
    told_RC = collectives.exchange_counts(told_RC, rail, caller=caller)
    received_RC, (visits_RCN, pairs_RCN) = told_RC[:, :, 0], _unpacked(told_RC[:, :, 1:])
    own_NC, near_NC = visits_RCN[rail.index].t(), pairs_RCN[rail.index].t()
    onward_NC, far_NC = visits_RCN.sum(0).t() - own_NC, pairs_RCN.sum(0).t() - near_NC
    packed = torch.stack([_packed(own_NC, onward_NC), _packed(near_NC, far_NC)], dim=2)
    packed = collectives.exchange_counts(packed, node, caller=caller)
    (own_in, onward_in), (near, far) = map(_unpacked, packed.unbind(2))
    lane = torch.stack([(own_in + onward_in).sum(0), (near + far).sum(0)])
    lanes = collectives.all_gather(lane[None], etp, caller=caller)
    rows = (sent_RC, received_RC, own_NC, own_in, onward_NC, onward_in, near.sum(0, keepdim=True))
    parts = (*rows, *lanes.unbind(1))
    found: list[RelayCounts] = []
    for one in HostCopy(torch.cat(parts).t()).tensor():
        numbers: list[list[int]] = [part.tolist() for part in one.split([*map(len, parts)])]
        across, own, onward = (Splits(*numbers[place : place + 2]) for place in (0, 2, 4))
        found.append(RelayCounts(across, own, onward, numbers[6][0], *numbers[7:]))
    return found


def plan_relay(
    experts_TK: Tensor,
    owner: int,
    num_local: int,
    rail: Axis,
    node: Axis,
    counts: RelayCounts,
    worker: WorkerThread,
    *,
    caller: str,
) -> tuple[Relay, Tensor]:
    """The relay that brings each token to the ranks of its experts, and the ids of its rows.

    Exchanges ids once per row and hop. The second result holds, for each received row, its experts,
    counted from this rank's first one (-1 elsewhere), and behind them its owner (int32 [N, K + 1]).
    """
    across, own, onward = counts.across, counts.own, counts.onward
    owner_T1 = experts_TK.new_full((len(experts_TK), 1), owner)
    ids = torch.cat([experts_TK, owner_T1], dim=1).to(torch.int32)
    visits_TR = _visits(experts_TK, num_local * node.size, rail.size)
    tokens = _rows_by_part(visits_TR, sum(across.sent))[1]  # by node, then by token
    ids_M = collectives.all_to_all(ids[tokens], rail, *across, caller=caller)
    ids_M = _local(ids_M, rail.index, num_local * node.size)
    # Tokens of this rank are a block among them.
    first, num_staying = sum(across.received[: rail.index]), across.received[rail.index]
    is_own_M = torch.zeros(len(ids_M), dtype=torch.bool, device=ids_M.device)
    is_own_M[first : first + num_staying] = True
    visits_MN = _visits(ids_M[:, :-1], num_local, node.size)
    parts = [
        _rows_by_part(visits_MN & mask[:, None], sum(splits.sent))
        for mask, splits in ((is_own_M, own), (~is_own_M, onward))
    ]
    # Both parts in one exchange; on arrival those of this node's tokens come first.
    (own_rank, own_M), (onward_rank, onward_M) = parts
    order = torch.argsort(torch.cat([2 * own_rank, 2 * onward_rank + 1]), stable=True)
    both = ([a + b for a, b in zip(*pair, strict=True)] for pair in zip(own, onward, strict=True))
    both_M = torch.cat([own_M, onward_M])[order]
    received = collectives.all_to_all(ids_M[both_M], node, *both, caller=caller)
    # From each rank the rows of its node's tokens, then the others.
    sizes = [size for pair in zip(own.received, onward.received, strict=True) for size in pair]
    blocks = received.split(sizes)
    ids_N = torch.cat([*blocks[::2], *blocks[1::2]])
    stay = sum(across.sent[: rail.index])
    staying, away = tokens[stay : stay + num_staying], across.sent.copy()
    away[rail.index] = 0
    came = across.received.copy()
    came[rail.index] = 0
    tokens = torch.cat([tokens[:stay], tokens[stay + num_staying :]])
    relay = Relay(
        rail=rail,
        node=node,
        sent=map_from_sources(torch.cat([staying[own_M - first], tokens]), len(experts_TK)),
        own=own,
        across=Splits(away, came),
        forwarded=map_from_sources(onward_M - (onward_M > first) * num_staying, sum(came)),
        onward=onward,
        num_staying=num_staying,
        worker=worker,
    )
    return relay, _local(ids_N, node.index, num_local)


def _visits(experts: Tensor, experts_per_part: int, num_parts: int) -> Tensor:
    """[rows, parts]: whether a row has an expert in each of `num_parts` equal parts."""
    part = torch.where(experts < 0, -1, experts // experts_per_part)
    parts = torch.arange(num_parts, dtype=experts.dtype, device=experts.device)
    return (part[:, :, None] == parts).any(1)


def _local(ids: Tensor, index: int, experts_per_part: int) -> Tensor:
    """Experts counted from the first of part `index`, -1 where they are in another."""
    local = ids[:, :-1] - index * experts_per_part
    local = local.masked_fill((local < 0) | (local >= experts_per_part), -1)
    return torch.cat([local, ids[:, -1:]], dim=1)


def _rows_by_part(visits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Part and row of the `count` visits [rows, parts], by part, then by row."""
    places = places_of_true(visits.t().reshape(-1), count)
    num_rows = max(len(visits), 1)
    return places // num_rows, places % num_rows


def _packed(low: Tensor, high: Tensor) -> Tensor:
    """Two counts as one int64."""
    return torch.stack([low, high], dim=-1).to(torch.int32).view(torch.int64)[..., 0]


def _unpacked(packed: Tensor) -> tuple[Tensor, Tensor]:
    low, high = packed[..., None].view(torch.int32).long().unbind(-1)
    return low, high
